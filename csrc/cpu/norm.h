// One row of a norm, forward and backward. RMS: no mean. The compute type A is float, or double for double.
#pragma once
#include "rows.h"
#include <array>

namespace ckpt {

template <typename A> using vec_of = typename LanesOf<A>::type;

// A row in its compute type: itself, or a widened copy in `buffer`.
inline const float* widen(const float* x, int64_t, float*) { return x; }
inline const double* widen(const double* x, int64_t, double*) { return x; }
template <typename T>
inline const float* widen(const T* x, int64_t n, float* buffer) {
  for_each_step(0, n, [&](int64_t c, auto k) { store_some(buffer + c, load_some(x + c, k), k); });
  return buffer;
}

template <typename A>
inline vec_of<A> first_lanes(vec_of<A> v, int64_t n) {
  const I8 lane = {0, 1, 2, 3, 4, 5, 6, 7};
  return keep_lanes(v, lane < int32_t(n));
}

// Sums over a row of the K vectors that f(c, n) gives for columns [c, c + n): vectors within a block, double between blocks.
template <typename A, int K, typename F>
inline std::array<double, K> row_sums(int64_t n, const F& f) {
  constexpr int64_t block = 1024, chains = 4;
  std::array<double, K> total{};
  for (int64_t b = 0; b < n; b += block) {
    vec_of<A> acc[K][chains] = {};
    const int64_t end = std::min(n, b + block);
    int64_t c = b;
    for (; c + chains * kLanes <= end; c += chains * kLanes)
      for (int64_t i = 0; i < chains; ++i) {
        const auto v = f(c + i * kLanes, Full{});
        for (int k = 0; k < K; ++k) acc[k][i] += v[k];
      }
    for_each_step(c, end, [&](int64_t tail, auto m) {
      const auto v = f(tail, m);
      for (int k = 0; k < K; ++k) acc[k][0] += first_lanes<A>(v[k], m);
    });
    for (int k = 0; k < K; ++k) total[k] += sum_lanes((acc[k][0] + acc[k][1]) + (acc[k][2] + acc[k][3]));
  }
  return total;
}

template <typename A>
struct Statistics {
  A mean = 0, rstd = 0;
};

// Two passes over a row in cache, the second around the first one's mean: no cancellation, no negative variance.
template <bool RMS, typename A>
inline Statistics<A> statistics(const A* x, int64_t n, double eps) {
  using Sums1 = std::array<vec_of<A>, 1>;
  using Sums2 = std::array<vec_of<A>, 2>;
  if (RMS) {
    auto s = row_sums<A, 1>(n, [&](int64_t c, auto k) { auto v = load_some(x + c, k); return Sums1{v * v}; });
    return {0, A(1 / std::sqrt(s[0] / n + eps))};
  }
  const A guess = A(row_sums<A, 1>(n, [&](int64_t c, auto k) { return Sums1{load_some(x + c, k)}; })[0] / n);
  auto s = row_sums<A, 2>(n, [&](int64_t c, auto k) {
    auto d = load_some(x + c, k) - guess;
    return Sums2{d, d * d};
  });
  const double shift = s[0] / n, variance = std::max(0.0, s[1] / n - shift * shift);
  return {A(guess + shift), A(1 / std::sqrt(variance + eps))};
}

// Weight (+ offset) and bias of a norm of N columns; ones and zeros where absent, so that loops have one form.
template <typename A>
struct Affine {
  std::vector<A> w, b;
  Affine(const OptionalTensor& weight, const OptionalTensor& bias, int64_t N, double offset)
      : w(widened<A>(weight, offset)), b(widened<A>(bias)) {
    if (!given(weight)) w.assign(size_t(N), A(1));
    if (!given(bias)) b.assign(size_t(N), A(0));
  }
};

template <typename T, typename A>
inline void normalize_row(const A* x, Statistics<A> s, const Affine<A>& affine, T* y, int64_t n) {
  const A *w = affine.w.data(), *b = affine.b.data();
  for_each_step(0, n, [&](int64_t c, auto k) {
    auto xhat = (load_some(x + c, k) - s.mean) * s.rstd;
    store_some(y + c, xhat * load_some(w + c, k) + load_some(b + c, k), k);
  });
}

// What the backward of a row reads: dy, and xhat from x and its statistics or, with `inverse`, from y: (y - b) / w.
template <typename A>
struct BackwardRow {
  const A *dy, *saved, *w, *b, *inverse;  // inverse: 1 / w, or null where `saved` is x
  A mean, rstd;

  template <typename N>
  vec_of<A> xhat(int64_t c, N n) const {
    auto s = load_some(saved + c, n);
    return inverse ? (s - load_some(b + c, n)) * load_some(inverse + c, n) : (s - mean) * rstd;
  }
};

// mean(g) and mean(g * xhat) with g = dy * w, adding dy * xhat and dy to the columns' sums where those are given.
template <bool RMS, typename A>
inline std::array<A, 2> backward_sums(const BackwardRow<A>& row, int64_t n, A* dw, A* db) {
  using V = vec_of<A>;
  auto s = row_sums<A, 2>(n, [&](int64_t c, auto k) {
    V dy = load_some(row.dy + c, k), xhat = row.xhat(c, k), g = dy * load_some(row.w + c, k);
    if (dw) store_some(dw + c, load_some(dw + c, k) + dy * xhat, k);
    if (db) store_some(db + c, load_some(db + c, k) + dy, k);
    return std::array<V, 2>{g, g * xhat};
  });
  return {RMS ? A(0) : A(s[0] / n), A(s[1] / n)};
}

template <typename A, typename N>
inline vec_of<A> backward_step(const BackwardRow<A>& row, std::array<A, 2> means, int64_t c, N n) {
  auto g = load_some(row.dy + c, n) * load_some(row.w + c, n);
  return (g - means[0] - row.xhat(c, n) * means[1]) * row.rstd;
}

// Rows [m0, m1) at a time, over all threads.
template <typename F>
inline void for_each_norm_row(int64_t M, int64_t N, const F& body) {
  at::parallel_for(0, M, std::max<int64_t>(1, 32768 / std::max<int64_t>(1, N)), body);
}

struct NormOutputs {
  at::Tensor y, mean, rstd;
};

template <bool RMS>
NormOutputs norm_forward(const char* op, const at::Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                         at::IntArrayRef normalized_shape, double eps, double offset) {
  const int64_t N = norm_columns(op, x, normalized_shape), M = norm_rows(x, normalized_shape);
  check_param(op, weight, N, "weight");
  check_param(op, bias, N, "bias");
  const auto rows = leading(x, normalized_shape);
  NormOutputs out{fresh_like(x), fresh(rows, statistics_options(x)), fresh(rows, statistics_options(x))};
  CKPT_DISPATCH(x, "norm_fwd", {
    using A = compute_t<scalar_t>;
    const auto xs = rows_of<scalar_t>(x, int64_t(normalized_shape.size()));
    const Affine<A> affine(weight, bias, N, offset);
    scalar_t* y = out.y.data_ptr<scalar_t>();
    A *mean = out.mean.data_ptr<A>(), *rstd = out.rstd.data_ptr<A>();
    for_each_norm_row(M, N, [&](int64_t m0, int64_t m1) {
      std::vector<A> buffer(sizeof(A) == sizeof(scalar_t) ? 0 : size_t(N));
      for (int64_t m = m0; m < m1; ++m) {
        const A* row = widen(xs[m], N, buffer.data());
        const auto s = N ? statistics<RMS>(row, N, eps) : Statistics<A>{};
        mean[m] = s.mean, rstd[m] = s.rstd;
        normalize_row(row, s, affine, y + m * N, N);
      }
    });
  });
  return out;
}

struct NormGrads {
  at::Tensor dx, dw, db;
};

struct NormNeeds {
  bool dx, dw, db;
};

// saved: x with its statistics, or (from_output) y.
template <bool RMS>
NormGrads norm_backward(const char* op, const at::Tensor& dy, const at::Tensor& saved, const OptionalTensor& mean,
                        const OptionalTensor& rstd, const OptionalTensor& weight, const OptionalTensor& bias,
                        at::IntArrayRef normalized_shape, double offset, bool from_output, NormNeeds needs) {
  const int64_t N = norm_columns(op, saved, normalized_shape), M = norm_rows(saved, normalized_shape);
  check_like(op, saved, dy, "dy");
  const bool statistics_needed = needs.dx || (needs.dw && !from_output);
  check_param(op, weight, N, "weight");
  check_param(op, bias, N, "bias");
  check_param(op, mean, M, "mean");
  check_param(op, rstd, M, "rstd");
  TORCH_CHECK_VALUE(!statistics_needed || (given(rstd) && (RMS || from_output || given(mean))), op, ": statistics are missing");
  NormGrads grads{needs.dx ? fresh_like(dy) : fresh({0}, dy.options()), {}, {}};
  CKPT_DISPATCH(dy, "norm_bwd", {
    using A = compute_t<scalar_t>;
    const int64_t inner = int64_t(normalized_shape.size());
    const auto dys = rows_of<scalar_t>(dy, inner), ss = rows_of<scalar_t>(saved, inner);
    const Affine<A> affine(weight, bias, N, offset);
    std::vector<A> inverse;
    if (from_output)
      for (A w : affine.w) inverse.push_back(A(1) / w);
    const A* means = given(mean) ? mean->const_data_ptr<A>() : nullptr;
    const A* rstds = given(rstd) ? rstd->const_data_ptr<A>() : nullptr;
    scalar_t* dx = needs.dx ? grads.dx.data_ptr<scalar_t>() : nullptr;
    RowBlocks blocks(M);
    ColumnSums<A> dw(needs.dw, blocks.count, N), db(needs.db, blocks.count, N);
    blocks.for_each([&](int64_t block, int64_t m0, int64_t m1) {
      std::vector<A> buffer(sizeof(A) == sizeof(scalar_t) ? 0 : size_t(2 * N));
      for (int64_t m = m0; m < m1; ++m) {
        const BackwardRow<A> row{widen(dys[m], N, buffer.data()), widen(ss[m], N, buffer.data() + buffer.size() / 2), affine.w.data(),
                                 affine.b.data(), from_output ? inverse.data() : nullptr, means ? means[m] : A(0), rstds ? rstds[m] : A(0)};
        const auto sums = backward_sums<RMS>(row, N, dw.of(block), db.of(block));
        if (!dx) continue;
        for_each_step(0, N, [&](int64_t c, auto n) { store_some(dx + m * N + c, backward_step(row, sums, c, n), n); });
      }
    });
    grads.dw = dw.total(normalized_shape, statistics_options(dy));
    grads.db = db.total(normalized_shape, statistics_options(dy));
  });
  return grads;
}

}  // namespace ckpt
