// dropout_add_fwd: y = residual + m * (x + bias).  dropout_add_bwd: dx = m * dy, dbias = column sums of dx.
#include "strips.h"

namespace ckpt::cuda {
namespace {

template <typename T_>
struct Forward {
  using T = T_;
  using A = compute_t<T>;
  static constexpr int kSums = 0;
  struct Raw {
    Pack<T> x, residual;
  };
  Rows<const T> x, residual;
  Columns<T> bias;
  Rows<T> y;
  DeviceMask mask;
  bool wide;

  __device__ Strip<T> begin(int64_t c, int64_t n) const { return begin_strip(mask, bias, c, n, wide); }
  __device__ Raw load(int64_t m, int64_t c, int64_t n) const {
    return {load_pack(x.at(m, c), n, wide), load_pack(residual.at(m, c), n, wide)};
  }

  template <typename Sums>
  __device__ void finish(const Strip<T>& strip, const Raw& raw, int64_t m, int64_t c, int64_t n, Sums&) const {
    const uint32_t kept = strip.draws.kept(m, c);
    A v[kPack], r[kPack];
    widen_pack(raw.x, v);
    widen_pack(raw.residual, r);
#pragma unroll
    for (int k = 0; k < kPack; ++k) v[k] = r[k] + (is_kept(kept, k) ? (v[k] + strip.bias[k]) * A(mask.scale) : A(0));
    store_pack(y.at(m, c), narrow_pack<T>(v), n, wide);
  }
};

template <typename T_>
struct Backward {
  using T = T_;
  using A = compute_t<T>;
  using Raw = Pack<T>;
  static constexpr int kSums = 1;
  Rows<const T> dy;
  Rows<T> dx;
  DeviceMask mask;
  bool wide;

  __device__ Draws begin(int64_t, int64_t) const { return Draws(mask); }
  __device__ Raw load(int64_t m, int64_t c, int64_t n) const { return load_pack(dy.at(m, c), n, wide); }

  template <typename Sums>
  __device__ void finish(const Draws& draws, const Raw& raw, int64_t m, int64_t c, int64_t n, Sums& sums) const {
    const uint32_t kept = draws.kept(m, c);
    A g[kPack];
    widen_pack(raw, g);
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      g[k] = is_kept(kept, k) ? g[k] * A(mask.scale) : A(0);
      sums[0][k] += g[k];
    }
    store_pack(dx.at(m, c), narrow_pack<T>(g), n, wide);
  }
};

}  // namespace

void dropout_add_fwd(const Elementwise& shape, RowsArg x, RowsArg residual, ColumnsArg bias, void* y, const Device& device) {
  with_dtype(shape.dtype, [&](auto zero) {
    using T = decltype(zero);
    Forward<T> op{rows<T>(x), rows<T>(residual), columns<T>(bias), {static_cast<T*>(y), shape.C}, shape.mask, false};
    op.wide = aligned(op.x) && aligned(op.residual) && aligned(op.bias) && aligned_rows<T>(shape.C, y);
    launch_strips(op, shape.M, shape.C, {}, device);
  });
}

void dropout_add_bwd(const Elementwise& shape, RowsArg dy, void* dx, const SumsArg& dbias, const Device& device) {
  with_dtype(shape.dtype, [&](auto zero) {
    using T = decltype(zero);
    Backward<T> op{rows<T>(dy), {static_cast<T*>(dx), shape.C}, shape.mask, false};
    op.wide = aligned(op.dy) && aligned_rows<T>(shape.C, dx);
    launch_strips(op, shape.M, shape.C, dbias, device);
  });
}

}  // namespace ckpt::cuda
