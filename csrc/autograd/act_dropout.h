// act_dropout and its backward, as ckpt_ops/ops/act_dropout.py has them.
#pragma once
#include "autograd/plain.h"

namespace ckpt::functions::act_dropout {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

auto& fwd() {
  using Signature = Tensor(const Tensor&, const OptionalTensor&, c10::string_view, const OptionalTensor&, double, int64_t,
                           at::IntArrayRef);
  static const auto op = kernel<Signature>("ckpt_ops::act_dropout_fwd");
  return op;
}

auto& bwd() {
  using Signature = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const OptionalTensor&, c10::string_view,
                                               const OptionalTensor&, double, int64_t, at::IntArrayRef, bool);
  static const auto op = kernel<Signature>("ckpt_ops::act_dropout_bwd");
  return op;
}

struct ActDropout : torch::autograd::Function<ActDropout> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& x, const OptionalTensor& bias, const std::string& act, const Place& at) {
    ctx->save_for_backward({x, or_undefined(bias), or_undefined(at.seed)});
    ctx->set_materialize_grads(false);
    ctx->saved_data["act"] = act;
    at.keep(ctx);
    return compute(fwd(), x, bias, act, at.seed, at.p, at.stream, at.origin);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return variable_list(4);
    const auto saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &bias = saved[1];
    const Place at = Place::of(ctx, saved[2]);
    const bool need_dbias = bias.defined() && ctx->needs_input_grad(1);
    auto [dx, dbias] = bwd().call(grads[0], x, if_defined(bias), ctx->saved_data["act"].toStringRef(), at.seed, at.p, at.stream,
                                  at.origin, need_dbias);
    variable_list result{dx, need_dbias ? dbias.to(bias.scalar_type()) : Tensor(), {}, {}};
    first_derivative_only("act_dropout", result, {grads[0], x, bias});
    return result;
  }
};

// ActDropout(x, bias, act, *place, namespace)
PyObject* call(PyObject*, PyObject* const* values, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Arguments arguments(values, count);
  const Tensor x = arguments.tensor();
  const OptionalTensor bias = arguments.optional_tensor();
  const std::string act = arguments.text();
  const Place at = arguments.place();
  arguments.namespace_is_ours();
  if (arguments.declined || !serves(fwd(), x)) Py_RETURN_NONE;
  Tensor y = recorded(x, bias) ? ActDropout::apply(x, bias, act, at) : compute(fwd(), x, bias, act, at.seed, at.p, at.stream, at.origin);
  return THPVariable_Wrap(std::move(y));
  END_HANDLE_TH_ERRORS
}

}  // namespace ckpt::functions::act_dropout
