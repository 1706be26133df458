// dropout_fwd (its own backward): y = m * x.  dropout_mask: m as booleans.
#include "strips.h"

namespace ckpt::cuda {
namespace {

template <typename T_>
struct Dropout {
  using T = T_;
  using Raw = Pack<T>;
  static constexpr int kSums = 0;
  Rows<const T> x;
  Rows<T> y;
  DeviceMask mask;
  bool wide;

  __device__ Draws begin(int64_t, int64_t) const { return Draws(mask); }
  __device__ Raw load(int64_t m, int64_t c, int64_t n) const { return load_pack(x.at(m, c), n, wide); }

  template <typename Sums>
  __device__ void finish(const Draws& draws, const Raw& raw, int64_t m, int64_t c, int64_t n, Sums&) const {
    using A = compute_t<T>;
    const uint32_t kept = draws.kept(m, c);
    A v[kPack];
    widen_pack(raw, v);
#pragma unroll
    for (int k = 0; k < kPack; ++k) v[k] = is_kept(kept, k) ? v[k] * A(mask.scale) : A(0);
    store_pack(y.at(m, c), narrow_pack<T>(v), n, wide);
  }
};

struct KeepMask {
  using T = float;
  struct Raw {};
  static constexpr int kSums = 0;
  bool* keep;
  int64_t C;
  DeviceMask mask;

  __device__ Draws begin(int64_t, int64_t) const { return Draws(mask); }
  __device__ Raw load(int64_t, int64_t, int64_t) const { return {}; }

  template <typename Sums>
  __device__ void finish(const Draws& draws, const Raw&, int64_t m, int64_t c, int64_t n, Sums&) const {
    const uint32_t kept = draws.kept(m, c);
#pragma unroll
    for (int k = 0; k < kPack; ++k)
      if (k < n) keep[m * C + c + k] = is_kept(kept, k);
  }
};

}  // namespace

void dropout_fwd(const Elementwise& shape, RowsArg x, void* y, const Device& device) {
  with_dtype(shape.dtype, [&](auto zero) {
    using T = decltype(zero);
    Dropout<T> op{rows<T>(x), {static_cast<T*>(y), shape.C}, shape.mask, false};
    op.wide = aligned(op.x) && aligned_rows<T>(shape.C, y);
    launch_strips(op, shape.M, shape.C, {}, device);
  });
}

void dropout_mask(int64_t M, int64_t C, const DeviceMask& mask, bool* keep, const Device& device) {
  launch_strips(KeepMask{keep, C, mask}, M, C, {}, device);
}

int64_t elementwise_groups(int64_t M, int64_t C, const Device& device) { return plan_strips(M, C, device.processors).grid.y; }

}  // namespace ckpt::cuda
