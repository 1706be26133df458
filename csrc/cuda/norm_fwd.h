// The norms' forward: y = (x - mean) * rstd * weight + bias, the row in registers while it fits, looped over past that.
// Statistics are taken around the row's first element, so that a large mean costs no digits.
#pragma once
#include "norm.h"

namespace ckpt::cuda {

// The row that is normalised: x itself.
template <typename T_>
struct Plain {
  using T = T_;
  using Raw = Pack<T>;
  Rows<const T> x;
  bool wide;

  bool aligned() const { return cuda::aligned(x); }
  __device__ __forceinline__ Draws draws() const { return Draws(DeviceMask{}); }
  __device__ __forceinline__ compute_t<T> first(int64_t m) const { return widen(*x.at(m, 0)); }
  __device__ __forceinline__ Raw load(int64_t m, int64_t c, int64_t n) const { return load_pack(x.at(m, c), n, wide); }
  __device__ __forceinline__ Pack<T> finish(const Draws&, const Raw& raw, int64_t, int64_t, int64_t) const { return raw; }
  __device__ __forceinline__ Pack<T> again(int64_t m, int64_t c, int64_t n) const { return load(m, c, n); }
};

// r = residual + m * (x + input_bias), stored on the way; its statistics are those of r as stored.
template <typename T_>
struct DropoutAdd {
  using T = T_;
  using A = compute_t<T>;
  struct Raw {
    Pack<T> x, residual;
  };
  Rows<const T> x, residual;
  Columns<T> input_bias;
  Rows<T> r;
  DeviceMask mask;
  bool wide;

  bool aligned() const {
    return cuda::aligned(x) && cuda::aligned(residual) && cuda::aligned(input_bias) && cuda::aligned(static_cast<const void*>(r.data));
  }
  __device__ __forceinline__ Draws draws() const { return Draws(mask); }
  __device__ __forceinline__ A first(int64_t m) const { return widen(*residual.at(m, 0)); }
  __device__ __forceinline__ Raw load(int64_t m, int64_t c, int64_t n) const {
    return {load_pack(x.at(m, c), n, wide), load_pack(residual.at(m, c), n, wide)};
  }

  __device__ __forceinline__ void load_bias(int64_t c, int64_t n, A (&bias)[kPack]) const {
    if (mask.pieces == 1 || input_bias.data == nullptr) return input_bias.load(c, n, wide, A(0), bias);
    int64_t column = c % mask.columns;  // a pack may begin in one row of x and end in the next
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      bias[k] = k < n ? input_bias.at(column) : A(0);
      if (++column == mask.columns) column = 0;
    }
  }

  // All lanes of a warp call it, with or without work.
  __device__ __forceinline__ Pack<T> finish(const Draws& draws, const Raw& raw, int64_t m, int64_t c, int64_t n) const {
    const uint32_t kept = draws.kept(m, c);
    A v[kPack], residuals[kPack], bias[kPack];
    widen_pack(raw.x, v);
    widen_pack(raw.residual, residuals);
    load_bias(c, n, bias);
#pragma unroll
    for (int k = 0; k < kPack; ++k) v[k] = residuals[k] + (is_kept(kept, k) ? (v[k] + bias[k]) * A(mask.scale) : A(0));
    const Pack<T> stored = narrow_pack<T>(v);
    store_pack(r.at(m, c), stored, n, wide);
    return stored;
  }

  __device__ __forceinline__ Pack<T> again(int64_t m, int64_t c, int64_t n) const { return load_pack(r.at(m, c), n, wide); }
};

template <typename T>
struct NormOutput {
  using A = compute_t<T>;
  Affine<T> affine;
  Rows<T> y;
  A *mean, *rstd;
  A eps;
  bool wide;

  __device__ __forceinline__ void write(const Pack<T>& row, A mean_, A rstd_, int64_t m, int64_t c, int64_t n) const {
    A v[kPack], w[kPack], b[kPack];
    widen_pack(row, v);
    affine.load_weight(c, n, wide, w);
    affine.bias.load(c, n, wide, A(0), b);
#pragma unroll
    for (int k = 0; k < kPack; ++k) v[k] = (v[k] - mean_) * rstd_ * w[k] + b[k];
    store_pack(y.at(m, c), narrow_pack<T>(v), n, wide);
  }
};

template <typename T, typename Part>
__device__ __forceinline__ void add_pack(Part& part, const Pack<T>& row, compute_t<T> shift, int64_t n) {
  if (n <= 0) return;
  compute_t<T> v[kPack];
  widen_pack(row, v);
#pragma unroll
  for (int k = 0; k < kPack; ++k) v[k] -= shift;
  part.add(v, n < kPack ? int(n) : kPack);
}

template <typename A>
__device__ __forceinline__ A mean_of(const Welford<A>& part, A shift) { return shift + part.mean; }
template <typename A>
__device__ __forceinline__ A mean_of(const SumOfSquares<A>&, A) { return A(0); }

// PACKS a thread, or 0 for a row that is looped over twice.
template <typename Source, bool RMS, int PACKS>
__global__ void __launch_bounds__(kRowThreads, 1) norm_fwd_kernel(const Source source, const NormOutput<typename Source::T> out,
                                                                  const int64_t M, const int64_t N) {
  using T = typename Source::T;
  using A = compute_t<T>;
  using Part = part_of<RMS, A>;
  CKPT_SHARED(Part, parts);
  const Draws draws = source.draws();
  const int64_t width = int64_t(blockDim.x) * kPack, mine = int64_t(threadIdx.x) * kPack;
  for (int64_t group = blockIdx.x; group * blockDim.y < M; group += gridDim.x) {
    const int64_t m = group * blockDim.y + threadIdx.y, end = m < M ? N : 0;
    const A shift = !RMS && m < M ? source.first(m) : A(0);
    Part part;
    Pack<T> row[PACKS > 0 ? PACKS : 1];
    if constexpr (PACKS > 0) {
      typename Source::Raw raw[PACKS] = {};
#pragma unroll
      for (int i = 0; i < PACKS; ++i)
        if (mine + i * width < end) raw[i] = source.load(m, mine + i * width, end - mine - i * width);
#pragma unroll
      for (int i = 0; i < PACKS; ++i) {
        const int64_t c = mine + i * width;
        row[i] = source.finish(draws, raw[i], m, c, end - c);
        add_pack(part, row[i], shift, end - c);
      }
    } else {
      for (int64_t first = 0; first < N; first += width) {
        const int64_t c = first + mine;
        typename Source::Raw raw = {};
        if (c < end) raw = source.load(m, c, end - c);
        add_pack(part, source.finish(draws, raw, m, c, end - c), shift, end - c);
      }
    }
    part = merge_over_row(part, parts);
    const A mean = mean_of(part, shift), rstd = part.finish(N, out.eps);
    if (threadIdx.x == 0 && m < M) {
      if (!RMS) out.mean[m] = mean;
      out.rstd[m] = rstd;
    }
    if constexpr (PACKS > 0) {
#pragma unroll
      for (int i = 0; i < PACKS; ++i) {
        const int64_t c = mine + i * width;
        if (c < end) out.write(row[i], mean, rstd, m, c, end - c);
      }
    } else {
      for (int64_t c = mine; c < end; c += width) out.write(source.again(m, c, end - c), mean, rstd, m, c, end - c);
    }
  }
}

template <typename Source, bool RMS, int PACKS>
void launch_norm_fwd(const Source& source, const NormOutput<typename Source::T>& out, const NormForward& args, const Device& device) {
  const RowPlan plan = plan_rows(args.M, args.N, PACKS > 0 ? PACKS : 1);
  CKPT_LAUNCH((norm_fwd_kernel<Source, RMS, PACKS>), grid_of(plan.groups), plan.block, kMaxWarps * sizeof(part_of<RMS, double>),
              device.stream, source, out, args.M, args.N);
}

template <bool RMS, template <typename> class Source, typename T>
void norm_forward(Source<T> source, const NormForward& args, const Device& device) {
  using A = compute_t<T>;
  NormOutput<T> out{{columns<T>(args.weight), columns<T>(args.bias), A(args.offset)},
                    {static_cast<T*>(args.y), args.N},
                    static_cast<A*>(args.mean),
                    static_cast<A*>(args.rstd),
                    A(args.eps),
                    false};
  source.wide = out.wide = source.aligned() && aligned(out.affine.weight) && aligned(out.affine.bias) && aligned_rows<T>(args.N, args.y);
  if constexpr (sizeof(T) < sizeof(double)) {
    switch (forward_packs(args.dtype, args.N)) {
      case 1: return launch_norm_fwd<Source<T>, RMS, 1>(source, out, args, device);
      case 4: return launch_norm_fwd<Source<T>, RMS, 4>(source, out, args, device);
    }
  }
  launch_norm_fwd<Source<T>, RMS, 0>(source, out, args, device);
}

template <bool RMS>
void plain_norm_fwd(const NormForward& args, const Device& device) {
  with_dtype(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    norm_forward<RMS>(Plain<T>{rows<T>(args.x), false}, args, device);
  });
}

template <bool RMS>
void dropout_add_norm_fwd_of(const NormForward& args, const Device& device) {
  with_dtype(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    const AddArg& add = args.add;
    norm_forward<RMS>(DropoutAdd<T>{rows<T>(args.x), rows<T>(add.residual), columns<T>(add.input_bias),
                                    {static_cast<T*>(add.r), args.N}, add.mask, false},
                      args, device);
  });
}

}  // namespace ckpt::cuda
