// layer_norm and its backward, as ckpt_ops/ops/layer_norm.py has them, with save="input".
#pragma once
#include "autograd/plain.h"

namespace ckpt::functions::layer_norm {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

auto& fwd() {
  using Signature = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const OptionalTensor&, const OptionalTensor&, c10::SymIntArrayRef,
                                                       double);
  static const auto op = kernel<Signature>("ckpt_ops::layer_norm_fwd");
  return op;
}

auto& bwd() {
  using Signature = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
                                                       const OptionalTensor&, const OptionalTensor&, c10::SymIntArrayRef, bool, bool,
                                                       bool, bool);
  static const auto op = kernel<Signature>("ckpt_ops::layer_norm_bwd");
  return op;
}

struct LayerNorm : torch::autograd::Function<LayerNorm> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                        at::IntArrayRef shape, double eps) {
    auto [y, mean, rstd] = compute(fwd(), x, weight, bias, c10::fromIntArrayRefSlow(shape), eps);
    const bool dw = needs_graph(weight);
    if (x.requires_grad() || dw) {  // for a bias alone, nothing
      ctx->save_for_backward({x, mean, rstd, x.requires_grad() && weight ? *weight : Tensor()});
    }
    ctx->set_materialize_grads(false);
    ctx->saved_data["shape"] = shape;
    ctx->saved_data["weight"] = weight ? c10::IValue(weight->scalar_type()) : c10::IValue();
    ctx->saved_data["bias"] = bias ? c10::IValue(bias->scalar_type()) : c10::IValue();
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Tensor& dy = grads[0];
    if (!dy.defined()) return variable_list(5);
    const auto saved = ctx->get_saved_variables();
    const bool any = !saved.empty();
    const Tensor none, &x = any ? saved[0] : none, &weight = any ? saved[3] : none;
    const auto shape = ctx->saved_data["shape"].toIntVector();
    const auto &w = ctx->saved_data["weight"], &b = ctx->saved_data["bias"];
    const bool need_dx = any && ctx->needs_input_grad(0), need_dw = any && !w.isNone() && ctx->needs_input_grad(1);
    const bool need_db = !b.isNone() && ctx->needs_input_grad(w.isNone() ? 1 : 2);
    auto [dx, dw, db] = bwd().call(dy, any ? x : dy, if_defined(any ? saved[1] : none), if_defined(any ? saved[2] : none), if_defined(weight),
                                   std::nullopt, c10::fromIntArrayRefSlow(shape), false, need_dx, need_dw, need_db);
    variable_list result{need_dx ? dx : Tensor(), parameter_gradient(dw, w, need_dw), parameter_gradient(db, b, need_db), {}, {}};
    first_derivative_only("layer_norm", result, {dy, x, weight});
    return result;
  }
};

// layer_norm(input, backend, normalized_shape, weight, bias, eps) -> Tensor, or None where it declines.
PyObject* call(PyObject*, PyObject* const* values, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Arguments arguments(values, count);
  const Tensor x = arguments.tensor();
  arguments.backend(x);
  const auto shape = arguments.normalized_shape(x);
  const auto weight = arguments.parameter(x, shape), bias = arguments.parameter(x, shape);
  const double eps = arguments.number();
  if (arguments.declined || !serves(fwd(), x)) Py_RETURN_NONE;
  Tensor y;
  if (recorded(x, weight, bias)) y = LayerNorm::apply(x, weight, bias, at::IntArrayRef(shape), eps);
  else y = std::get<0>(compute(fwd(), x, weight, bias, c10::fromIntArrayRefSlow(shape), eps));
  return THPVariable_Wrap(std::move(y));
  END_HANDLE_TH_ERRORS
}

}  // namespace ckpt::functions::layer_norm
