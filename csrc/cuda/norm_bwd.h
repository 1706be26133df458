// The norms' backward, g = dy * w:  dx = rstd * (g - mean(g) - xhat * mean(g * xhat)),  dw = sum dy * xhat,  db = sum dy.
// With dropout and addition before (FUSED): dresidual = dr + that, dx = m * dresidual, dinput_bias = sum of dx.
// A row that fits is held in registers, with the sums over rows of its columns. A longer one is looped over twice, and its
// sums are made by a second kernel that walks down the columns.
#pragma once
#include "norm.h"

namespace ckpt::cuda {

template <typename T_, bool FUSED>
struct BackwardRow {
  using T = T_;
  using A = compute_t<T>;
  struct Raw {
    Pack<T> dy, saved, dr;
  };
  struct Statistics {
    A mean, rstd;
  };
  struct Terms {
    A dy[kPack], xhat[kPack], w[kPack];
  };

  Rows<const T> dy, saved, dr;
  const A *mean, *rstd;
  Affine<T> affine;
  Rows<T> dx, dresidual;
  A* row_means;  // [M, 2]
  DeviceMask mask;
  bool rms, from_output, wide;

  __device__ __forceinline__ Raw load(int64_t m, int64_t c, int64_t n) const {
    Raw raw{load_pack(dy.at(m, c), n, wide), load_pack(saved.at(m, c), n, wide), {}};
    if (FUSED && dr.data) raw.dr = load_pack(dr.at(m, c), n, wide);
    return raw;
  }

  __device__ __forceinline__ Statistics statistics(int64_t m) const { return {mean ? mean[m] : A(0), rstd ? rstd[m] : A(0)}; }

  // xhat is made from x, or from y as (y - bias) / weight.
  __device__ __forceinline__ Terms terms(const Raw& raw, const Statistics& s, int64_t c, int64_t n) const {
    Terms t;
    widen_pack(raw.dy, t.dy);
    widen_pack(raw.saved, t.xhat);
    affine.load_weight(c, n, wide, t.w);
    if (from_output) {
      A b[kPack];
      affine.bias.load(c, n, wide, A(0), b);
#pragma unroll
      for (int k = 0; k < kPack; ++k) t.xhat[k] = k < n ? (t.xhat[k] - b[k]) * inverse(t.w[k]) : A(0);
    } else {
#pragma unroll
      for (int k = 0; k < kPack; ++k) t.xhat[k] = k < n ? (t.xhat[k] - s.mean) * s.rstd : A(0);
    }
    return t;
  }

  __device__ __forceinline__ void add_sums(const Terms& t, TwoSums<A>& sums) const {
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      const A g = t.dy[k] * t.w[k];
      sums.a += g;
      sums.b += g * t.xhat[k];
    }
  }

  // mean(g), which has no part in an RMS norm, and mean(g * xhat).
  __device__ __forceinline__ TwoSums<A> means(const TwoSums<A>& sums, int64_t N) const {
    return {rms ? A(0) : sums.a / A(N), sums.b / A(N)};
  }

  // The gradient of the norm's input, plus dr.
  __device__ __forceinline__ void gradient(const Raw& raw, const Terms& t, A rstd_, const TwoSums<A>& means, A (&d)[kPack]) const {
    A more[kPack] = {};
    if (FUSED) widen_pack(raw.dr, more);
#pragma unroll
    for (int k = 0; k < kPack; ++k) d[k] = multiply_add(-t.xhat[k], means.b, t.dy[k] * t.w[k] - means.a) * rstd_ + more[k];
  }

  // In place: the gradient of what was dropped out.
  __device__ __forceinline__ void drop(const Draws& draws, int64_t m, int64_t c, A (&d)[kPack]) const {
    const uint32_t kept = draws.kept(m, c);
#pragma unroll
    for (int k = 0; k < kPack; ++k) d[k] = is_kept(kept, k) ? d[k] * A(mask.scale) : A(0);
  }

  // All lanes of a warp call it, with or without work. d becomes dx.
  __device__ __forceinline__ void store(const Draws& draws, A (&d)[kPack], int64_t m, int64_t c, int64_t n) const {
    if constexpr (FUSED) {
      store_pack(dresidual.at(m, c), narrow_pack<T>(d), n, wide);
      drop(draws, m, c, d);
    }
    if (dx.data) store_pack(dx.at(m, c), narrow_pack<T>(d), n, wide);
  }
};

// The block's rows are the groups blockIdx.x * blockDim.y + threadIdx.y of the partial sums.
template <typename T, bool RMS, bool FUSED, int PACKS>
__global__ void __launch_bounds__(kRowThreads, 1) norm_bwd_kernel(const BackwardRow<T, FUSED> row, const int64_t M, const int64_t N,
                                                                  const Partials<compute_t<T>> partials) {
  using A = compute_t<T>;
  CKPT_SHARED(TwoSums<A>, parts);
  // Registers hold two sums a column; a third, dinput_bias, lies in shared memory, each thread's own: [PACKS * kPack, threads].
  A* const dbias = reinterpret_cast<A*>(parts + kMaxWarps) + threadIdx.y * blockDim.x + threadIdx.x;
  const int threads = int(blockDim.x * blockDim.y);
  if (FUSED)
    for (int i = 0; i < PACKS * kPack; ++i) dbias[i * threads] = A(0);
  const Draws draws(row.mask);
  const int64_t width = int64_t(blockDim.x) * kPack, mine = int64_t(threadIdx.x) * kPack;
  A dw[PACKS][kPack] = {}, db[PACKS][kPack] = {};
  for (int64_t group = blockIdx.x; group * blockDim.y < M; group += gridDim.x) {
    const int64_t m = group * blockDim.y + threadIdx.y, end = m < M ? N : 0;
    typename BackwardRow<T, FUSED>::Raw raw[PACKS] = {};
#pragma unroll
    for (int i = 0; i < PACKS; ++i)
      if (mine + i * width < end) raw[i] = row.load(m, mine + i * width, end - mine - i * width);
    const auto s = row.statistics(m < M ? m : M - 1);
    TwoSums<A> sums;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      const int64_t c = mine + i * width;
      const auto t = row.terms(raw[i], s, c, end - c);
      row.add_sums(t, sums);
#pragma unroll
      for (int k = 0; k < kPack; ++k) {
        dw[i][k] += t.dy[k] * t.xhat[k];
        if (!RMS) db[i][k] += t.dy[k];
      }
    }
    if (!FUSED && row.dx.data == nullptr) continue;  // sums alone are wanted: the same ones
    const TwoSums<A> means = row.means(merge_over_row(sums, parts), N);
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      const int64_t c = mine + i * width;
      stay_packed(raw[i].dy), stay_packed(raw[i].saved), stay_packed(raw[i].dr);
      A d[kPack];
      row.gradient(raw[i], row.terms(raw[i], s, c, end - c), s.rstd, means, d);
      row.store(draws, d, m, c, end - c);
      if constexpr (FUSED)
#pragma unroll
        for (int k = 0; k < kPack; ++k) dbias[(i * kPack + k) * threads] += k < end - c ? d[k] : A(0);
    }
  }
  const int64_t first = (int64_t(blockIdx.x) * blockDim.y + threadIdx.y) * N;
#pragma unroll
  for (int i = 0; i < PACKS; ++i)
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      const int64_t c = mine + i * width + k;
      if (c >= N) continue;
      if (partials.of[0]) partials.of[0][first + c] = dw[i][k];
      if (!RMS && partials.of[1]) partials.of[1][first + c] = db[i][k];
      if (FUSED && partials.of[2]) partials.of[2][first + c] = dbias[(i * kPack + k) * threads];
    }
}

template <typename T, bool FUSED>
__global__ void __launch_bounds__(kRowThreads, 1) norm_bwd_looped_kernel(const BackwardRow<T, FUSED> row, const int64_t M, const int64_t N) {
  using A = compute_t<T>;
  CKPT_SHARED(TwoSums<A>, parts);
  const Draws draws(row.mask);
  const int64_t width = int64_t(blockDim.x) * kPack, mine = int64_t(threadIdx.x) * kPack;
  for (int64_t group = blockIdx.x; group * blockDim.y < M; group += gridDim.x) {
    const int64_t m = group * blockDim.y + threadIdx.y, end = m < M ? N : 0;
    const auto s = row.statistics(m < M ? m : M - 1);
    TwoSums<A> sums;
    for (int64_t c = mine; c < end; c += width) row.add_sums(row.terms(row.load(m, c, end - c), s, c, end - c), sums);
    const TwoSums<A> means = row.means(merge_over_row(sums, parts), N);
    if (row.row_means && threadIdx.x == 0 && m < M) row.row_means[2 * m] = means.a, row.row_means[2 * m + 1] = means.b;
    for (int64_t first = 0; first < N; first += width) {
      const int64_t c = first + mine;
      typename BackwardRow<T, FUSED>::Raw raw = {};
      if (c < end) raw = row.load(m, c, end - c);
      A d[kPack];
      row.gradient(raw, row.terms(raw, s, c, end - c), s.rstd, means, d);
      row.store(draws, d, m, c, end - c);
    }
  }
}

// The sums over rows alone: dw, db and, FUSED, dinput_bias from the rows' means.
template <typename T_, bool FUSED>
struct BackwardColumns {
  using T = T_;
  using A = compute_t<T>;
  using Raw = typename BackwardRow<T, FUSED>::Raw;
  static constexpr int kSums = FUSED ? 3 : 2;
  BackwardRow<T, FUSED> row;

  __device__ Draws begin(int64_t, int64_t) const { return Draws(row.mask); }
  __device__ Raw load(int64_t m, int64_t c, int64_t n) const { return row.load(m, c, n); }

  template <typename Sums>
  __device__ void finish(const Draws& draws, const Raw& raw, int64_t m, int64_t c, int64_t n, Sums& sums) const {
    const int64_t known = n > 0 ? m : 0;  // a row that exists
    const auto s = row.statistics(known);
    const auto t = row.terms(raw, s, c, n);
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      sums[0][k] += t.dy[k] * t.xhat[k];
      sums[1][k] += t.dy[k];
    }
    if constexpr (FUSED) {
      if (row.row_means == nullptr) return;
      A d[kPack];
      row.gradient(raw, t, s.rstd, {row.row_means[2 * known], row.row_means[2 * known + 1]}, d);
      row.drop(draws, m, c, d);
#pragma unroll
      for (int k = 0; k < kPack; ++k) sums[2][k] += k < n ? d[k] : A(0);
    }
  }
};

}  // namespace ckpt::cuda
