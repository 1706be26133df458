// dropout_add_fwd: y = residual + m * (x + bias).  dropout_add_bwd: dx = m * dy, dbias = column sums of dx.
#include "rows.h"
#include <torch/library.h>

namespace ckpt {
namespace {

at::Tensor dropout_add_fwd(const at::Tensor& x, const at::Tensor& residual, const OptionalTensor& bias, const OptionalTensor& seed, double p,
                           int64_t stream, at::IntArrayRef origin) {
  check_seed("dropout_add_fwd", seed, p, x.device());
  check_like("dropout_add_fwd", x, residual, "residual");
  check_param("dropout_add_fwd", bias, columns_of(x), "bias");
  RowMask mask(seed, p, stream, origin, x.sizes());
  at::Tensor y = fresh_like(x);
  if (mask.zero) return y.copy_(residual);
  CKPT_DISPATCH(x, "dropout_add_fwd", {
    using A = compute_t<scalar_t>;
    const int64_t C = columns_of(x);
    const auto xs = rows_of<scalar_t>(x), rs = rows_of<scalar_t>(residual);
    const auto bias_values = widened<A>(bias);
    scalar_t* out = y.data_ptr<scalar_t>();
    for_each_piece(rows_in(x), C, [&](int64_t m, int64_t c0, int64_t c1) {
      const scalar_t *row = xs[m], *residual_row = rs[m];
      scalar_t* y_row = out + m * C;
      const A *b = bias_values.data(), scale = A(mask.scale);
      masked_steps(mask, m, c0, c1, [&](int64_t c, auto n, I8 keep) {
        auto h = load_some(row + c, n);
        if (b) h += load_some(b + c, n);
        store_some(y_row + c, load_some(residual_row + c, n) + keep_lanes(h * scale, keep), n);
      });
    });
  });
  return y;
}

std::tuple<at::Tensor, at::Tensor> dropout_add_bwd(const at::Tensor& dy, const OptionalTensor& seed, double p, int64_t stream,
                                                   at::IntArrayRef origin, bool need_dbias) {
  check_seed("dropout_add_bwd", seed, p, dy.device());
  RowMask mask(seed, p, stream, origin, dy.sizes());
  const int64_t C = columns_of(dy), M = rows_in(dy);
  at::Tensor dx = fresh_like(dy), dbias;
  if (mask.zero) return {dx.zero_(), fresh({need_dbias ? C : 0}, statistics_options(dy)).zero_()};
  CKPT_DISPATCH(dy, "dropout_add_bwd", {
    using A = compute_t<scalar_t>;
    const auto dys = rows_of<scalar_t>(dy);
    scalar_t* out = dx.data_ptr<scalar_t>();
    RowBlocks blocks(M);
    ColumnSums<A> sums(need_dbias, blocks.count, C);
    auto piece = [&](int64_t m, int64_t c0, int64_t c1, A* sum) {
      const scalar_t* dy_row = dys[m];
      scalar_t* dx_row = out + m * C;
      const A scale = A(mask.scale);
      masked_steps(mask, m, c0, c1, [&](int64_t c, auto n, I8 keep) {
        auto g = keep_lanes(load_some(dy_row + c, n) * scale, keep);
        store_some(dx_row + c, g, n);
        if (sum) store_some(sum + c, load_some(sum + c, n) + g, n);
      });
    };
    if (need_dbias)
      blocks.for_each([&](int64_t block, int64_t m0, int64_t m1) {
        for (int64_t m = m0; m < m1; ++m) piece(m, 0, C, sums.of(block));
      });
    else
      for_each_piece(M, C, [&](int64_t m, int64_t c0, int64_t c1) { piece(m, c0, c1, nullptr); });
    dbias = sums.total({C}, statistics_options(dy));
  });
  return {dx, dbias};
}

}  // namespace
}  // namespace ckpt

TORCH_LIBRARY_IMPL(ckpt_ops, CPU, m) {
  m.impl("dropout_add_fwd", &ckpt::dropout_add_fwd);
  m.impl("dropout_add_bwd", &ckpt::dropout_add_bwd);
}
