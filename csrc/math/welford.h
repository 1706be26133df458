// A row's statistics, in parts that merge: each thread takes some of the row, and any tree of merges gives the whole.
// Means and squared deviations: Chan, Golub, LeVeque, "Updating formulae", Stanford STAN-CS-79-773; nothing cancels.
// A: float or double. Every part has add(values, n), merge(part) and finish(columns, eps), which gives 1 / sqrt(.. + eps).
#pragma once
#include "scalar.h"
#include <cstdint>

namespace ckpt {

template <typename A>
struct Welford {
  A count = 0, mean = 0, m2 = 0;

  // Takes the first n of K values, n >= 1.
  template <int K>
  CKPT_HD void add(const A (&values)[K], int n) {
    Welford part;
    A sum = 0;
    for (int k = 0; k < K; ++k) sum += k < n ? values[k] : A(0);
    part.count = A(n), part.mean = sum / A(n);
    for (int k = 0; k < K; ++k) {
      const A d = values[k] - part.mean;
      part.m2 += k < n ? d * d : A(0);
    }
    merge(part);
  }

  CKPT_HD void merge(const Welford& b) {
    if (b.count == 0) return;
    const A total = count + b.count, share = b.count / total, delta = b.mean - mean;
    mean += delta * share;
    m2 += b.m2 + delta * delta * count * share;
    count = total;
  }

  CKPT_HD A finish(int64_t n, A eps) const { return inverse_root_mean(m2, n, eps); }
};

template <typename A>
struct SumOfSquares {
  A sum = 0;

  template <int K>
  CKPT_HD void add(const A (&values)[K], int n) {
    for (int k = 0; k < K; ++k) sum += k < n ? values[k] * values[k] : A(0);
  }

  CKPT_HD void merge(const SumOfSquares& b) { sum += b.sum; }
  CKPT_HD A finish(int64_t n, A eps) const { return inverse_root_mean(sum, n, eps); }
};

// Two sums at once: those of a norm's backward.
template <typename A>
struct TwoSums {
  A a = 0, b = 0;
  CKPT_HD void merge(const TwoSums& other) { a += other.a, b += other.b; }
};

}  // namespace ckpt
