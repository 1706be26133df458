// dropout_fwd (its own backward) and dropout_mask.
#include "rows.h"
#include <torch/library.h>

namespace ckpt {
namespace {

at::Tensor dropout_fwd(const at::Tensor& x, const OptionalTensor& seed, double p, int64_t stream, at::IntArrayRef origin) {
  check_seed("dropout_fwd", seed, p, x.device());
  RowMask mask(seed, p, stream, origin, x.sizes());
  at::Tensor y = fresh_like(x);
  if (mask.zero) return y.zero_();
  CKPT_DISPATCH(x, "dropout_fwd", {
    using A = compute_t<scalar_t>;
    const int64_t C = columns_of(x);
    const auto xs = rows_of<scalar_t>(x);
    scalar_t* out = y.data_ptr<scalar_t>();
    for_each_piece(rows_in(x), C, [&](int64_t m, int64_t c0, int64_t c1) {
      const scalar_t* row = xs[m];
      scalar_t* y_row = out + m * C;
      const A scale = A(mask.scale);
      masked_steps(mask, m, c0, c1, [&](int64_t c, auto n, I8 keep) {
        store_some(y_row + c, keep_lanes(load_some(row + c, n) * scale, keep), n);
      });
    });
  });
  return y;
}

at::Tensor dropout_mask(const at::Tensor& seed, at::IntArrayRef shape, double p, int64_t stream, at::IntArrayRef origin) {
  check_seed("dropout_mask", seed, p, seed.device());
  RowMask mask(seed, p, stream, origin, shape);
  at::Tensor keep = fresh(shape, seed.options().dtype(at::kBool));
  if (!mask.draws) return keep.fill_(!mask.zero);
  const int64_t C = columns_of(keep);
  bool* out = keep.data_ptr<bool>();
  for_each_piece(rows_in(keep), C, [&](int64_t m, int64_t c0, int64_t c1) {
    masked_steps(mask, m, c0, c1, [&](int64_t c, auto n, I8 kept) {
      for (int64_t i = 0; i < n; ++i) out[m * C + c + i] = kept[i] != 0;
    });
  });
  return keep;
}

}  // namespace
}  // namespace ckpt

TORCH_LIBRARY_IMPL(ckpt_ops, CPU, m) {
  m.impl("dropout_fwd", &ckpt::dropout_fwd);
  m.impl("dropout_mask", &ckpt::dropout_mask);
}
