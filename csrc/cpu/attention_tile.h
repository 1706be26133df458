// One tile of attention: bq queries against bk keys. Matrix products are torch's own, on views of tiles; inside a parallel
// region they run on one thread.
#pragma once
#include "rows.h"
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <limits>

namespace ckpt {

template <typename A>
at::Tensor matrix(const A* data, int64_t rows, int64_t cols, int64_t stride) {
  return at::from_blob(const_cast<A*>(data), {rows, cols}, {stride, 1}, at::TensorOptions().dtype(c10::CppTypeToScalarType<A>::value));
}

// [B, H, N, D] as it lies in memory, rows with unit stride (a copy where they have not).
template <typename T>
struct Heads {
  at::Tensor owner;
  const T* data;
  int64_t sb, sh, sn, D;

  explicit Heads(const at::Tensor& t)
      : owner(t.size(3) > 1 && t.stride(3) != 1 ? t.contiguous() : t), data(owner.const_data_ptr<T>()), sb(owner.stride(0)),
        sh(owner.stride(1)), sn(owner.stride(2)), D(t.size(3)) {}

  const T* at(int64_t b, int64_t h, int64_t n) const { return data + b * sb + h * sh + n * sn; }

  // Rows [n, n + rows) of a head in the compute type: in place where they have it already, else widened into `buffer`.
  at::Tensor tile(int64_t b, int64_t h, int64_t n, int64_t rows, compute_t<T>* buffer) const {
    if constexpr (std::is_same_v<T, compute_t<T>>) {
      if (sn >= D) return matrix(at(b, h, n), rows, D, sn);
    }
    return scaled_tile(b, h, n, rows, 1, buffer);
  }

  at::Tensor scaled_tile(int64_t b, int64_t h, int64_t n, int64_t rows, compute_t<T> scale, compute_t<T>* buffer) const {
    for (int64_t r = 0; r < rows; ++r) {
      const T* x = at(b, h, n + r);
      for_each_step(0, D, [&](int64_t c, auto k) { store_some(buffer + r * D + c, load_some(x + c, k) * scale, k); });
    }
    return matrix(buffer, rows, D, D);
  }
};

// What a call asks for, and which keys a query may see.
struct Attend {
  int64_t B, Hq, Hkv, Nq, Nk, D, Dv, group;
  int64_t causal;  // 0 none, 1 upper left, 2 lower right
  double scale;
  RowMask mask;
  int64_t heads_total;
  at::Tensor attn_mask;  // bool or the compute type, [B, Hq, Nq, Nk], or undefined
  double masked_below;   // entries of a float mask at or below it hide the key

  // How many of the keys from j0 on, of bk, the query i may see by causality.
  int64_t visible(int64_t i, int64_t j0, int64_t bk) const {
    if (!causal) return bk;
    const int64_t last = i + (causal == 2 ? Nk - Nq : 0);
    return std::clamp<int64_t>(last - j0 + 1, 0, bk);
  }

  bool tile_visible(int64_t i0, int64_t bq, int64_t j0) const { return visible(i0 + bq - 1, j0, 1) > 0; }

  // Draws for query i of head (b, h), keys [j0, j0 + n), n <= kStretch.
  const uint16_t* draw(int64_t b, int64_t h, int64_t i, int64_t j0, int64_t n, uint16_t* buffer) const {
    return draw_row(mask, uint32_t(mask.plane0 + b * heads_total + h), uint32_t(mask.row0 + i), uint64_t(mask.col0 + j0), n, buffer);
  }

  // Adds a row of the attention mask to the scores s[0, n): -inf hides.
  template <typename A>
  void add_mask(A* s, int64_t b, int64_t h, int64_t i, int64_t j0, int64_t n) const {
    if (!attn_mask.defined()) return;
    const A hidden = -std::numeric_limits<A>::infinity();
    const int64_t step = attn_mask.stride(3);
    const int64_t offset = b * attn_mask.stride(0) + h * attn_mask.stride(1) + i * attn_mask.stride(2) + j0 * step;
    if (attn_mask.scalar_type() == at::kBool) {
      const bool* seen = attn_mask.const_data_ptr<bool>() + offset;
      for (int64_t j = 0; j < n; ++j)
        if (!seen[j * step]) s[j] = hidden;
    } else {
      const A* bias = attn_mask.const_data_ptr<A>() + offset;
      for (int64_t j = 0; j < n; ++j) s[j] = bias[j * step] <= A(masked_below) ? hidden : s[j] + bias[j * step];
    }
  }
};

template <typename A>
inline A row_max(const A* s, int64_t n) {
  using V = typename LanesOf<A>::type;
  A m = -std::numeric_limits<A>::infinity();
  int64_t c = 0;
  if (n >= kLanes) {
    V v = load8(s);
    for (c = kLanes; c + kLanes <= n; c += kLanes) v = larger(load8(s + c), v);
    for (int i = 0; i < kLanes; ++i) m = std::max(m, A(v[i]));
  }
  for (; c < n; ++c) m = std::max(m, s[c]);
  return m;
}

// s[0, n) = exp(s - m); returns the sum. Columns [n, width) become 0.
template <typename A>
inline A exp_row(A* s, int64_t n, int64_t width, A m) {
  using V = typename LanesOf<A>::type;
  V sum = {};
  int64_t c = 0;
  for (; c + kLanes <= n; c += kLanes) {
    V p = exp_of(load8(s + c) - m);
    store8(s + c, p);
    sum += p;
  }
  A total = sum_lanes(sum);
  if (c < n) {
    V p = exp_of(load_some(s + c, n - c) - m);
    store_some(s + c, p, n - c);
    for (int64_t i = 0; i < n - c; ++i) total += p[i];
  }
  std::fill(s + n, s + width, A(0));
  return total;
}

}  // namespace ckpt
