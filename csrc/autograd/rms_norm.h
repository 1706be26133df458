// rms_norm and its backward, as ckpt_ops/ops/rms_norm.py has them, with save="input".
#pragma once
#include "autograd/plain.h"

namespace ckpt::functions::rms_norm {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

auto& fwd() {
  using Signature = std::tuple<Tensor, Tensor>(const Tensor&, const OptionalTensor&, c10::SymIntArrayRef, double, double);
  static const auto op = kernel<Signature>("ckpt_ops::rms_norm_fwd");
  return op;
}

auto& bwd() {
  using Signature = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, c10::SymIntArrayRef,
                                               double, bool, bool, bool);
  static const auto op = kernel<Signature>("ckpt_ops::rms_norm_bwd");
  return op;
}

struct RMSNorm : torch::autograd::Function<RMSNorm> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& x, const OptionalTensor& weight, at::IntArrayRef shape, double eps,
                        double offset) {
    auto [y, rstd] = compute(fwd(), x, weight, c10::fromIntArrayRefSlow(shape), eps, offset);
    ctx->save_for_backward({x, rstd, x.requires_grad() && weight ? *weight : Tensor()});
    ctx->set_materialize_grads(false);
    ctx->saved_data["shape"] = shape;
    ctx->saved_data["offset"] = offset;
    ctx->saved_data["weight"] = weight ? c10::IValue(weight->scalar_type()) : c10::IValue();
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Tensor& dy = grads[0];
    if (!dy.defined()) return variable_list(5);
    const auto saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &weight = saved[2];
    const auto shape = ctx->saved_data["shape"].toIntVector();
    const auto& w = ctx->saved_data["weight"];
    const bool need_dx = ctx->needs_input_grad(0), need_dw = !w.isNone() && ctx->needs_input_grad(1);
    auto [dx, dw] = bwd().call(dy, x, saved[1], if_defined(weight),
                               c10::fromIntArrayRefSlow(shape), ctx->saved_data["offset"].toDouble(), false, need_dx, need_dw);
    variable_list result{need_dx ? dx : Tensor(), parameter_gradient(dw, w, need_dw), {}, {}, {}};
    first_derivative_only("rms_norm", result, {dy, x, weight});
    return result;
  }
};

// rms_norm(input, backend, normalized_shape, weight, eps, offset) -> Tensor, or None where it declines.
PyObject* call(PyObject*, PyObject* const* values, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Arguments arguments(values, count);
  const Tensor x = arguments.tensor();
  arguments.backend(x);
  const auto shape = arguments.normalized_shape(x);
  const auto weight = arguments.parameter(x, shape);
  const double eps = arguments.epsilon(x), offset = arguments.number();
  if (arguments.declined || !serves(fwd(), x)) Py_RETURN_NONE;
  Tensor y;
  if (recorded(x, weight)) y = RMSNorm::apply(x, weight, at::IntArrayRef(shape), eps, offset);
  else y = std::get<0>(compute(fwd(), x, weight, c10::fromIntArrayRefSlow(shape), eps, offset));
  return THPVariable_Wrap(std::move(y));
  END_HANDLE_TH_ERRORS
}

}  // namespace ckpt::functions::rms_norm
