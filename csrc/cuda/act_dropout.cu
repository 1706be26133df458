// act_dropout_fwd: y = m * act(x + bias).  act_dropout_bwd: dx = m * act'(x + bias) * dy, dbias = column sums of dx.
#include "../math/scalar.h"
// Activations come second: their templates find the scalar functions only among what is declared before them.
#include "../math/activation.h"
#include "strips.h"

namespace ckpt::cuda {
namespace {

template <typename T_, typename Act>
struct Forward {
  using T = T_;
  using A = compute_t<T>;
  using Raw = Pack<T>;
  static constexpr int kSums = 0;
  Rows<const T> x;
  Columns<T> bias;
  Rows<T> y;
  DeviceMask mask;
  bool wide;

  __device__ Strip<T> begin(int64_t c, int64_t n) const { return begin_strip(mask, bias, c, n, wide); }
  __device__ Raw load(int64_t m, int64_t c, int64_t n) const { return load_pack(x.at(m, c), n, wide); }

  template <typename Sums>
  __device__ void finish(const Strip<T>& strip, const Raw& raw, int64_t m, int64_t c, int64_t n, Sums&) const {
    const uint32_t kept = strip.draws.kept(m, c);
    A v[kPack];
    widen_pack(raw, v);
#pragma unroll
    for (int k = 0; k < kPack; ++k) v[k] = is_kept(kept, k) ? Act::f(v[k] + strip.bias[k]) * A(mask.scale) : A(0);
    store_pack(y.at(m, c), narrow_pack<T>(v), n, wide);
  }
};

template <typename T_, typename Act>
struct Backward {
  using T = T_;
  using A = compute_t<T>;
  static constexpr int kSums = 1;
  struct Raw {
    Pack<T> x, dy;
  };
  Rows<const T> dy, x;
  Columns<T> bias;
  Rows<T> dx;
  DeviceMask mask;
  bool wide;

  __device__ Strip<T> begin(int64_t c, int64_t n) const { return begin_strip(mask, bias, c, n, wide); }
  __device__ Raw load(int64_t m, int64_t c, int64_t n) const {
    return {load_pack(x.at(m, c), n, wide), load_pack(dy.at(m, c), n, wide)};
  }

  template <typename Sums>
  __device__ void finish(const Strip<T>& strip, const Raw& raw, int64_t m, int64_t c, int64_t n, Sums& sums) const {
    const uint32_t kept = strip.draws.kept(m, c);
    A v[kPack], g[kPack];
    widen_pack(raw.x, v);
    widen_pack(raw.dy, g);
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      g[k] = is_kept(kept, k) ? Act::df(v[k] + strip.bias[k]) * A(mask.scale) * g[k] : A(0);
      sums[0][k] += g[k];
    }
    store_pack(dx.at(m, c), narrow_pack<T>(g), n, wide);
  }
};

// body(T{}, Act{})
template <typename Body>
void with_types(Dtype dtype, Act act, const Body& body) {
  with_dtype(dtype, [&](auto zero) {
    switch (act) {
      case Act::kGelu: return body(zero, Gelu{});
      case Act::kGeluTanh: return body(zero, GeluTanh{});
      case Act::kRelu: return body(zero, Relu{});
      case Act::kSilu: return body(zero, Silu{});
      case Act::kRelu2: return body(zero, Relu2{});
    }
  });
}

}  // namespace

void act_dropout_fwd(const Elementwise& shape, Act act, RowsArg x, ColumnsArg bias, void* y, const Device& device) {
  with_types(shape.dtype, act, [&](auto zero, auto f) {
    using T = decltype(zero);
    Forward<T, decltype(f)> op{rows<T>(x), columns<T>(bias), {static_cast<T*>(y), shape.C}, shape.mask, false};
    op.wide = aligned(op.x) && aligned(op.bias) && aligned_rows<T>(shape.C, y);
    launch_strips(op, shape.M, shape.C, {}, device);
  });
}

void act_dropout_bwd(const Elementwise& shape, Act act, RowsArg dy, RowsArg x, ColumnsArg bias, void* dx, const SumsArg& dbias,
                     const Device& device) {
  with_types(shape.dtype, act, [&](auto zero, auto f) {
    using T = decltype(zero);
    Backward<T, decltype(f)> op{rows<T>(dy), rows<T>(x), columns<T>(bias), {static_cast<T*>(dx), shape.C}, shape.mask, false};
    op.wide = aligned(op.dy) && aligned(op.x) && aligned(op.bias) && aligned_rows<T>(shape.C, dx);
    launch_strips(op, shape.M, shape.C, dbias, device);
  });
}

}  // namespace ckpt::cuda
