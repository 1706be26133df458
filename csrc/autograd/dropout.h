// dropout and its backward, as ckpt_ops/ops/dropout.py has them.
#pragma once
#include "autograd/plain.h"

namespace ckpt::functions::dropout {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

auto& op() {
  using Signature = Tensor(const Tensor&, const OptionalTensor&, double, int64_t, at::IntArrayRef);
  static const auto op = kernel<Signature>("ckpt_ops::dropout_fwd");
  return op;
}

Tensor run(const Tensor& x, const Place& at) { return compute(op(), x, at.seed, at.p, at.stream, at.origin); }

struct Dropout : torch::autograd::Function<Dropout> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Place& at) {
    ctx->save_for_backward({or_undefined(at.seed)});
    ctx->set_materialize_grads(false);
    at.keep(ctx);
    return run(x, at);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return variable_list(2);
    variable_list result{run(grads[0], Place::of(ctx, ctx->get_saved_variables()[0])), {}};
    first_derivative_only("dropout", result, grads);
    return result;
  }
};

// Dropout(x, *place, namespace)
PyObject* call(PyObject*, PyObject* const* values, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Arguments arguments(values, count);
  const Tensor x = arguments.tensor();
  const Place at = arguments.place();
  arguments.namespace_is_ours();
  if (arguments.declined || !serves(op(), x)) Py_RETURN_NONE;
  Tensor y = recorded(x) ? Dropout::apply(x, at) : run(x, at);
  return THPVariable_Wrap(std::move(y));
  END_HANDLE_TH_ERRORS
}

}  // namespace ckpt::functions::dropout
