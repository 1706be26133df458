// attention and its backward, as ckpt_ops/ops/attention.py has them.
#pragma once
#include "autograd/plain.h"

namespace ckpt::functions::attention {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What it takes beside tensors and its place.
struct Form {
  int64_t causal = 0;
  double scale = 1;
  int64_t heads_total = 0;
};

auto& fwd() {
  using Signature = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, int64_t, double,
                                               const OptionalTensor&, double, int64_t, at::IntArrayRef, int64_t);
  static const auto op = kernel<Signature>("ckpt_ops::attention_fwd");
  return op;
}

auto& bwd() {
  using Signature = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                       const Tensor&, const OptionalTensor&, int64_t, double, const OptionalTensor&,
                                                       double, int64_t, at::IntArrayRef, int64_t);
  static const auto op = kernel<Signature>("ckpt_ops::attention_bwd");
  return op;
}

std::tuple<Tensor, Tensor> run(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& mask, const Form& form,
                               const Place& at) {
  return compute(fwd(), q, k, v, mask, form.causal, form.scale, at.seed, at.p, at.stream, at.origin, form.heads_total);
}

struct Attention : torch::autograd::Function<Attention> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& mask,
                        const Form& form, const Place& at) {
    auto [o, lse] = run(q, k, v, mask, form, at);
    ctx->save_for_backward({q, k, v, o, lse, or_undefined(mask), or_undefined(at.seed)});
    ctx->set_materialize_grads(false);
    ctx->saved_data["causal"] = form.causal;
    ctx->saved_data["scale"] = form.scale;
    ctx->saved_data["heads_total"] = form.heads_total;
    at.keep(ctx);
    return o;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return variable_list(6);
    const auto saved = ctx->get_saved_variables();
    const Place at = Place::of(ctx, saved[6]);
    auto [dq, dk, dv] = bwd().call(grads[0], saved[0], saved[1], saved[2], saved[3], saved[4], if_defined(saved[5]),
                                   ctx->saved_data["causal"].toInt(), ctx->saved_data["scale"].toDouble(), at.seed, at.p, at.stream,
                                   at.origin, ctx->saved_data["heads_total"].toInt());
    variable_list result{dq, dk, dv, {}, {}, {}};
    first_derivative_only("attention", result, {grads[0], saved[0], saved[1], saved[2]});
    return result;
  }
};

// Attention(q, k, v, attn_mask, causal, scale, *place, heads_total, namespace) -> (o,)
PyObject* call(PyObject*, PyObject* const* values, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Arguments arguments(values, count);
  const Tensor q = arguments.tensor(), k = arguments.tensor(), v = arguments.tensor();
  const OptionalTensor mask = arguments.optional_any();
  Form form;
  form.causal = arguments.whole_number();
  form.scale = arguments.number();
  const Place at = arguments.place();
  form.heads_total = arguments.whole_number();
  arguments.namespace_is_ours();
  if (arguments.declined || !serves(fwd(), q)) Py_RETURN_NONE;
  Tensor o = recorded(q, k, v) ? Attention::apply(q, k, v, mask, form, at) : std::get<0>(run(q, k, v, mask, form, at));
  return as_tuple({o});
  END_HANDLE_TH_ERRORS
}

}  // namespace ckpt::functions::attention
