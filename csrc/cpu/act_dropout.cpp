// act_dropout_fwd: y = m * act(x + bias).  act_dropout_bwd: dx = m * act'(x + bias) * dy, dbias = column sums of dx.
#include "rows.h"
#include "../math/activation.h"
#include <torch/library.h>

namespace ckpt {
namespace {

template <typename F>
void with_activation(c10::string_view act, const F& body) {
  if (act == "gelu") body(Gelu{});
  else if (act == "gelu_tanh") body(GeluTanh{});
  else if (act == "relu") body(Relu{});
  else if (act == "silu") body(Silu{});
  else if (act == "relu2") body(Relu2{});
  else TORCH_CHECK_VALUE(false, "act_dropout: unknown activation ", act);
}

template <typename T, typename Act>
void forward(Act, const at::Tensor& x, const OptionalTensor& bias, const RowMask& mask, at::Tensor& y) {
  using A = compute_t<T>;
  const int64_t C = columns_of(x);
  const auto xs = rows_of<T>(x);
  const auto bias_values = widened<A>(bias);
  T* out = y.data_ptr<T>();
  for_each_piece(rows_in(x), C, [&](int64_t m, int64_t c0, int64_t c1) {
    // Locals of the piece: what the outer function holds is read again in every step.
    const T* row = xs[m];
    const A *b = bias_values.data(), scale = A(mask.scale);
    T* y_row = out + m * C;
    masked_steps(mask, m, c0, c1, [&](int64_t c, auto n, I8 keep) {
      auto h = load_some(row + c, n);
      if (b) h += load_some(b + c, n);
      store_some(y_row + c, keep_lanes(Act::f(h) * scale, keep), n);
    });
  });
}

// One piece of a row; adds to its columns' sums where `sum` is given.
template <typename T, typename Act>
inline void backward_piece(const RowMask& mask, const T* x, const T* dy, const compute_t<T>* b, T* dx, compute_t<T>* sum, int64_t m,
                           int64_t c0, int64_t c1) {
  const auto scale = compute_t<T>(mask.scale);
  masked_steps(mask, m, c0, c1, [&](int64_t c, auto n, I8 keep) {
    auto h = load_some(x + c, n);
    if (b) h += load_some(b + c, n);
    auto g = keep_lanes(Act::df(h) * scale * load_some(dy + c, n), keep);
    store_some(dx + c, g, n);
    if (sum) store_some(sum + c, load_some(sum + c, n) + g, n);
  });
}

template <typename T, typename Act>
at::Tensor backward(Act, const at::Tensor& dy, const at::Tensor& x, const OptionalTensor& bias, const RowMask& mask, at::Tensor& dx,
                    bool need_dbias) {
  using A = compute_t<T>;
  const int64_t C = columns_of(x), M = rows_in(x);
  const auto xs = rows_of<T>(x), dys = rows_of<T>(dy);
  const auto bias_values = widened<A>(bias);
  const A* b = bias_values.empty() ? nullptr : bias_values.data();
  T* out = dx.data_ptr<T>();
  if (!need_dbias) {
    for_each_piece(M, C, [&](int64_t m, int64_t c0, int64_t c1) {
      backward_piece<T, Act>(mask, xs[m], dys[m], b, out + m * C, nullptr, m, c0, c1);
    });
    return fresh({0}, statistics_options(x));
  }
  RowBlocks blocks(M);
  ColumnSums<A> sums(true, blocks.count, C);
  blocks.for_each([&](int64_t block, int64_t m0, int64_t m1) {
    for (int64_t m = m0; m < m1; ++m) backward_piece<T, Act>(mask, xs[m], dys[m], b, out + m * C, sums.of(block), m, 0, C);
  });
  return sums.total({C}, statistics_options(x));
}

at::Tensor act_dropout_fwd(const at::Tensor& x, const OptionalTensor& bias, c10::string_view act, const OptionalTensor& seed, double p,
                           int64_t stream, at::IntArrayRef origin) {
  check_seed("act_dropout_fwd", seed, p, x.device());
  check_param("act_dropout_fwd", bias, columns_of(x), "bias");
  RowMask mask(seed, p, stream, origin, x.sizes());
  at::Tensor y = fresh_like(x);
  if (mask.zero) return y.zero_();
  with_activation(act, [&](auto f) { CKPT_DISPATCH(x, "act_dropout_fwd", { forward<scalar_t>(f, x, bias, mask, y); }); });
  return y;
}

std::tuple<at::Tensor, at::Tensor> act_dropout_bwd(const at::Tensor& dy, const at::Tensor& x, const OptionalTensor& bias,
                                                   c10::string_view act, const OptionalTensor& seed, double p, int64_t stream,
                                                   at::IntArrayRef origin, bool need_dbias) {
  check_seed("act_dropout_bwd", seed, p, x.device());
  check_like("act_dropout_bwd", x, dy, "dy");
  check_param("act_dropout_bwd", bias, columns_of(x), "bias");
  RowMask mask(seed, p, stream, origin, x.sizes());
  at::Tensor dx = fresh_like(x), dbias;
  if (mask.zero) return {dx.zero_(), fresh({need_dbias ? columns_of(x) : 0}, statistics_options(x)).zero_()};
  with_activation(act, [&](auto f) {
    CKPT_DISPATCH(x, "act_dropout_bwd", { dbias = backward<scalar_t>(f, dy, x, bias, mask, dx, need_dbias); });
  });
  return {dx, dbias};
}

}  // namespace
}  // namespace ckpt

TORCH_LIBRARY_IMPL(ckpt_ops, CPU, m) {
  m.impl("act_dropout_fwd", &ckpt::act_dropout_fwd);
  m.impl("act_dropout_bwd", &ckpt::act_dropout_bwd);
}
