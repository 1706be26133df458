// r = residual + m * (x + input_bias), y = norm(r), and its backward, for both norms: the row functions of norm.h.
#include "norm.h"
#include <torch/library.h>

namespace ckpt {
namespace {

// A norm's row is `pieces` rows of the mask, of C columns each (more than one where normalized_shape has several sizes).
struct Layout {
  int64_t M, N, C, pieces;
  Layout(const char* op, const at::Tensor& x, at::IntArrayRef normalized_shape)
      : M(norm_rows(x, normalized_shape)), N(norm_columns(op, x, normalized_shape)), C(columns_of(x)), pieces(C ? N / C : 0) {}
};

struct Call {
  at::IntArrayRef normalized_shape;
  double eps, offset;
  RowMask mask;
};

template <bool RMS>
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> forward(const char* op, const at::Tensor& x, const at::Tensor& residual,
                                                                   const OptionalTensor& input_bias, const OptionalTensor& weight,
                                                                   const OptionalTensor& bias, const Call& call) {
  const Layout at_(op, x, call.normalized_shape);
  check_like(op, x, residual, "residual");
  check_param(op, weight, at_.N, "weight");
  check_param(op, bias, at_.N, "bias");
  check_param(op, input_bias, at_.C, "input_bias");
  const auto rows = leading(x, call.normalized_shape);
  at::Tensor y = fresh_like(x), r = fresh_like(x), mean = fresh(rows, statistics_options(x)), rstd = fresh(rows, statistics_options(x));
  CKPT_DISPATCH(x, "norm_fwd", {
    using A = compute_t<scalar_t>;
    const int64_t N = at_.N, C = at_.C, inner = int64_t(call.normalized_shape.size());
    const auto xs = rows_of<scalar_t>(x, inner), residuals = rows_of<scalar_t>(residual, inner);
    const Affine<A> affine(weight, bias, N, call.offset);
    const auto bias_values = widened<A>(input_bias);
    scalar_t *ys = y.data_ptr<scalar_t>(), *rs = r.data_ptr<scalar_t>();
    A *means = mean.data_ptr<A>(), *rstds = rstd.data_ptr<A>();
    for_each_norm_row(at_.M, N, [&](int64_t m0, int64_t m1) {
      std::vector<A> buffer(sizeof(A) == sizeof(scalar_t) ? 0 : size_t(N));
      for (int64_t m = m0; m < m1; ++m) {
        for (int64_t piece = 0; piece < at_.pieces; ++piece) {
          const scalar_t *x_row = xs[m] + piece * C, *residual_row = residuals[m] + piece * C;
          scalar_t* r_row = rs + m * N + piece * C;
          const A *b = bias_values.data(), scale = A(call.mask.scale);
          const bool zero = call.mask.zero;
          masked_steps(call.mask, m * at_.pieces + piece, 0, C, [&](int64_t c, auto n, I8 keep) {
            auto h = load_some(x_row + c, n);
            if (b) h += load_some(b + c, n);
            h = zero ? vec_of<A>{} : keep_lanes(h * scale, keep);
            store_some(r_row + c, load_some(residual_row + c, n) + h, n);
          });
        }
        // Statistics of r as stored: the backward sees the rounded one.
        const A* row = widen(rs + m * N, N, buffer.data());
        const auto s = N ? statistics<RMS>(row, N, call.eps) : Statistics<A>{};
        means[m] = s.mean, rstds[m] = s.rstd;
        normalize_row(row, s, affine, ys + m * N, N);
      }
    });
  });
  return {y, r, mean, rstd};
}

struct Grads {
  at::Tensor dx, dresidual, dw, db, dinput_bias;
};

template <bool RMS>
Grads backward(const char* op, const at::Tensor& dy, const OptionalTensor& dr, const at::Tensor& r, const OptionalTensor& mean,
               const at::Tensor& rstd, const OptionalTensor& weight, const Call& call, NormNeeds needs, bool need_dinput_bias) {
  const Layout at_(op, r, call.normalized_shape);
  check_like(op, r, dy, "dy");
  if (given(dr)) check_like(op, r, *dr, "dr");
  check_param(op, weight, at_.N, "weight");
  check_param(op, mean, at_.M, "mean");
  check_param(op, rstd, at_.M, "rstd");
  const bool own_dx = call.mask.draws || call.mask.zero;  // else dx is dresidual
  Grads grads{own_dx ? fresh_like(dy) : fresh({0}, dy.options()), fresh_like(dy), {}, {}, {}};
  CKPT_DISPATCH(dy, "norm_bwd", {
    using A = compute_t<scalar_t>;
    const int64_t N = at_.N, C = at_.C, inner = int64_t(call.normalized_shape.size());
    const auto dys = rows_of<scalar_t>(dy, inner), rs = rows_of<scalar_t>(r, inner);
    const auto drs = rows_of<scalar_t>(given(dr) ? *dr : dy, inner);
    const bool has_dr = given(dr);
    const Affine<A> affine(weight, std::nullopt, N, call.offset);
    scalar_t *dx = own_dx ? grads.dx.data_ptr<scalar_t>() : nullptr, *dresidual = grads.dresidual.data_ptr<scalar_t>();
    const A* means = given(mean) ? mean->const_data_ptr<A>() : nullptr;
    const A* rstds = rstd.const_data_ptr<A>();
    RowBlocks blocks(at_.M);
    ColumnSums<A> dw(needs.dw, blocks.count, N), db(needs.db, blocks.count, N), dinput_bias(need_dinput_bias, blocks.count, C);
    blocks.for_each([&](int64_t block, int64_t m0, int64_t m1) {
      std::vector<A> buffer(sizeof(A) == sizeof(scalar_t) ? 0 : size_t(2 * N));
      A* bias_sum = dinput_bias.of(block);
      for (int64_t m = m0; m < m1; ++m) {
        const BackwardRow<A> row{widen(dys[m], N, buffer.data()), widen(rs[m], N, buffer.data() + buffer.size() / 2),
                                 affine.w.data(), nullptr, nullptr, means ? means[m] : A(0), rstds[m]};
        const auto sums = backward_sums<RMS>(row, N, dw.of(block), db.of(block));
        for (int64_t piece = 0; piece < at_.pieces; ++piece) {
          const int64_t first = piece * C;
          const scalar_t* dr_row = has_dr ? drs[m] + first : nullptr;
          scalar_t *dresidual_row = dresidual + m * N + first, *dx_row = own_dx ? dx + m * N + first : nullptr;
          const A scale = A(call.mask.scale);
          const bool zero = call.mask.zero;
          masked_steps(call.mask, m * at_.pieces + piece, 0, C, [&](int64_t c, auto n, I8 keep) {
            auto g = backward_step(row, sums, first + c, n);
            if (dr_row) g += load_some(dr_row + c, n);
            store_some(dresidual_row + c, g, n);
            if (dx_row) {
              g = zero ? vec_of<A>{} : keep_lanes(g * scale, keep);
              store_some(dx_row + c, g, n);
            }
            if (bias_sum) store_some(bias_sum + c, load_some(bias_sum + c, n) + g, n);
          });
        }
      }
    });
    grads.dw = dw.total(call.normalized_shape, statistics_options(dy));
    grads.db = db.total(call.normalized_shape, statistics_options(dy));
    grads.dinput_bias = dinput_bias.total({C}, statistics_options(dy));
  });
  return grads;
}

Call make_call(const char* op, const at::Tensor& x, at::IntArrayRef normalized_shape, double eps, double offset, const OptionalTensor& seed,
               double p, int64_t stream, at::IntArrayRef origin) {
  check_seed(op, seed, p, x.device());
  return {normalized_shape, eps, offset, RowMask(seed, p, stream, origin, x.sizes())};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> dropout_add_layer_norm_fwd(
    const at::Tensor& x, const at::Tensor& residual, const OptionalTensor& input_bias, const OptionalTensor& weight,
    const OptionalTensor& bias, at::IntArrayRef normalized_shape, double eps, const OptionalTensor& seed, double p, int64_t stream,
    at::IntArrayRef origin) {
  const char* op = "dropout_add_layer_norm_fwd";
  return forward<false>(op, x, residual, input_bias, weight, bias, make_call(op, x, normalized_shape, eps, 0, seed, p, stream, origin));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> dropout_add_layer_norm_bwd(
    const at::Tensor& dy, const OptionalTensor& dr, const at::Tensor& r, const at::Tensor& mean, const at::Tensor& rstd,
    const OptionalTensor& weight, at::IntArrayRef normalized_shape, const OptionalTensor& seed, double p, int64_t stream,
    at::IntArrayRef origin, bool need_dw, bool need_db, bool need_dinput_bias) {
  const char* op = "dropout_add_layer_norm_bwd";
  auto g = backward<false>(op, dy, dr, r, mean, rstd, weight, make_call(op, r, normalized_shape, 0, 0, seed, p, stream, origin),
                           {true, need_dw, need_db}, need_dinput_bias);
  return {g.dx, g.dresidual, g.dw, g.db, g.dinput_bias};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> dropout_add_rms_norm_fwd(const at::Tensor& x, const at::Tensor& residual,
                                                                        const OptionalTensor& input_bias, const OptionalTensor& weight,
                                                                        at::IntArrayRef normalized_shape, double eps, double offset,
                                                                        const OptionalTensor& seed, double p, int64_t stream,
                                                                        at::IntArrayRef origin) {
  const char* op = "dropout_add_rms_norm_fwd";
  auto [y, r, mean, rstd] = forward<true>(op, x, residual, input_bias, weight, std::nullopt,
                                          make_call(op, x, normalized_shape, eps, offset, seed, p, stream, origin));
  return {y, r, rstd};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> dropout_add_rms_norm_bwd(
    const at::Tensor& dy, const OptionalTensor& dr, const at::Tensor& r, const at::Tensor& rstd, const OptionalTensor& weight,
    at::IntArrayRef normalized_shape, double offset, const OptionalTensor& seed, double p, int64_t stream, at::IntArrayRef origin,
    bool need_dw, bool need_dinput_bias) {
  const char* op = "dropout_add_rms_norm_bwd";
  auto g = backward<true>(op, dy, dr, r, std::nullopt, rstd, weight, make_call(op, r, normalized_shape, 0, offset, seed, p, stream, origin),
                          {true, need_dw, false}, need_dinput_bias);
  return {g.dx, g.dresidual, g.dw, g.dinput_bias};
}

}  // namespace
}  // namespace ckpt

TORCH_LIBRARY_IMPL(ckpt_ops, CPU, m) {
  m.impl("dropout_add_layer_norm_fwd", &ckpt::dropout_add_layer_norm_fwd);
  m.impl("dropout_add_layer_norm_bwd", &ckpt::dropout_add_layer_norm_bwd);
  m.impl("dropout_add_rms_norm_fwd", &ckpt::dropout_add_rms_norm_fwd);
  m.impl("dropout_add_rms_norm_bwd", &ckpt::dropout_add_rms_norm_bwd);
}
