// dropout_add and its backward, as ckpt_ops/ops/dropout_add.py has them.
#pragma once
#include "autograd/plain.h"

namespace ckpt::functions::dropout_add {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

auto& fwd() {
  using Signature = Tensor(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, double, int64_t, at::IntArrayRef);
  static const auto op = kernel<Signature>("ckpt_ops::dropout_add_fwd");
  return op;
}

auto& bwd() {
  using Signature = std::tuple<Tensor, Tensor>(const Tensor&, const OptionalTensor&, double, int64_t, at::IntArrayRef, bool);
  static const auto op = kernel<Signature>("ckpt_ops::dropout_add_bwd");
  return op;
}

struct DropoutAdd : torch::autograd::Function<DropoutAdd> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& residual, const OptionalTensor& bias, const Place& at) {
    ctx->save_for_backward({or_undefined(at.seed)});
    ctx->set_materialize_grads(false);
    ctx->saved_data["bias"] = bias ? c10::IValue(bias->scalar_type()) : c10::IValue();
    at.keep(ctx);
    return compute(fwd(), x, residual, bias, at.seed, at.p, at.stream, at.origin);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Tensor& dy = grads[0];
    if (!dy.defined()) return variable_list(4);
    const Place at = Place::of(ctx, ctx->get_saved_variables()[0]);
    const auto& bias = ctx->saved_data["bias"];
    const bool need_dx = ctx->needs_input_grad(0), need_dbias = !bias.isNone() && ctx->needs_input_grad(2);
    Tensor dx = dy, dbias;
    if (need_dbias || (need_dx && at.p != 0)) {
      std::tie(dx, dbias) = bwd().call(dy, at.seed, at.p, at.stream, at.origin, need_dbias);
    }
    variable_list result{need_dx ? dx : Tensor(), ctx->needs_input_grad(1) ? dy : Tensor(),
                         parameter_gradient(dbias, bias, need_dbias), {}};
    first_derivative_only("dropout_add", result, {dy});
    return result;
  }
};

// DropoutAdd(x, residual, bias, *place, namespace)
PyObject* call(PyObject*, PyObject* const* values, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Arguments arguments(values, count);
  const Tensor x = arguments.tensor(), residual = arguments.tensor();
  const OptionalTensor bias = arguments.optional_tensor();
  const Place at = arguments.place();
  arguments.namespace_is_ours();
  if (arguments.declined || !serves(fwd(), x)) Py_RETURN_NONE;
  Tensor y = recorded(x, residual, bias) ? DropoutAdd::apply(x, residual, bias, at)
                                  : compute(fwd(), x, residual, bias, at.seed, at.p, at.stream, at.origin);
  return THPVariable_Wrap(std::move(y));
  END_HANDLE_TH_ERRORS
}

}  // namespace ckpt::functions::dropout_add
