// dropout_add_layer_norm, dropout_add_rms_norm and their backwards, as ckpt_ops/ops/dropout_add_norm.py has them.
#pragma once
#include "autograd/plain.h"

namespace ckpt::functions::dropout_add_norm {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What both take beside tensors.
struct Norm {
  c10::SmallVector<int64_t, 4> shape;
  double eps = 0, offset = 0;
};

auto& layer_fwd() {
  using Signature = std::tuple<Tensor, Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
                                                               const OptionalTensor&, c10::SymIntArrayRef, double, const OptionalTensor&,
                                                               double, int64_t, at::IntArrayRef);
  static const auto op = kernel<Signature>("ckpt_ops::dropout_add_layer_norm_fwd");
  return op;
}

auto& layer_bwd() {
  using Signature = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>(
      const Tensor&, const OptionalTensor&, const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, c10::SymIntArrayRef,
      const OptionalTensor&, double, int64_t, at::IntArrayRef, bool, bool, bool);
  static const auto op = kernel<Signature>("ckpt_ops::dropout_add_layer_norm_bwd");
  return op;
}

auto& rms_fwd() {
  using Signature = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
                                                       c10::SymIntArrayRef, double, double, const OptionalTensor&, double, int64_t,
                                                       at::IntArrayRef);
  static const auto op = kernel<Signature>("ckpt_ops::dropout_add_rms_norm_fwd");
  return op;
}

auto& rms_bwd() {
  using Signature = std::tuple<Tensor, Tensor, Tensor, Tensor>(const Tensor&, const OptionalTensor&, const Tensor&, const Tensor&,
                                                               const OptionalTensor&, c10::SymIntArrayRef, double, const OptionalTensor&,
                                                               double, int64_t, at::IntArrayRef, bool, bool);
  static const auto op = kernel<Signature>("ckpt_ops::dropout_add_rms_norm_bwd");
  return op;
}

// (y, r, mean, rstd); no mean for RMS.
template <bool RMS>
std::tuple<Tensor, Tensor, Tensor, Tensor> run(const Tensor& x, const Tensor& residual, const OptionalTensor& input_bias,
                                               const OptionalTensor& weight, const OptionalTensor& bias, const Norm& norm,
                                               const Place& at) {
  const auto shape = c10::fromIntArrayRefSlow(norm.shape);
  if constexpr (RMS) {
    auto [y, r, rstd] = compute(rms_fwd(), x, residual, input_bias, weight, shape, norm.eps, norm.offset, at.seed, at.p, at.stream, at.origin);
    return {y, r, Tensor(), rstd};
  } else {
    return compute(layer_fwd(), x, residual, input_bias, weight, bias, shape, norm.eps, at.seed, at.p, at.stream, at.origin);
  }
}

template <bool RMS>
struct DropoutAddNorm : torch::autograd::Function<DropoutAddNorm<RMS>> {
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& residual, const OptionalTensor& input_bias,
                               const OptionalTensor& weight, const OptionalTensor& bias, const Norm& norm, const Place& at) {
    auto [y, r, mean, rstd] = run<RMS>(x, residual, input_bias, weight, bias, norm, at);
    ctx->save_for_backward({r, mean, rstd, or_undefined(weight), or_undefined(at.seed)});
    ctx->set_materialize_grads(false);
    ctx->saved_data["shape"] = at::IntArrayRef(norm.shape);
    ctx->saved_data["offset"] = norm.offset;
    const std::pair<const char*, const OptionalTensor&> parameters[] = {{"input_bias", input_bias}, {"weight", weight}, {"bias", bias}};
    for (const auto& [name, t] : parameters) ctx->saved_data[name] = t ? c10::IValue(t->scalar_type()) : c10::IValue();
    at.keep(ctx);
    return {y, r};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Tensor& dr = grads[1];
    if (!grads[0].defined() && !dr.defined()) return variable_list(7);
    const auto saved = ctx->get_saved_variables();
    const Tensor &r = saved[0], &weight = saved[3];
    const Tensor dy = grads[0].defined() ? grads[0] : at::zeros_like(r);
    const Place at = Place::of(ctx, saved[4]);
    const auto sizes = ctx->saved_data["shape"].toIntVector();
    const auto shape = c10::fromIntArrayRefSlow(sizes);
    const c10::IValue* dtypes[] = {&ctx->saved_data["input_bias"], &ctx->saved_data["weight"], &ctx->saved_data["bias"]};
    bool need[3];
    size_t edge = 2;  // of tensors that were given
    for (int i = 0; i < 3; ++i) need[i] = !dtypes[i]->isNone() && ctx->needs_input_grad(edge++);
    Tensor dx, dresidual, dw, db, dinput_bias;
    if constexpr (RMS) {
      std::tie(dx, dresidual, dw, dinput_bias) =
          rms_bwd().call(dy, if_defined(dr), r, saved[2], if_defined(weight), shape, ctx->saved_data["offset"].toDouble(), at.seed, at.p,
                         at.stream, at.origin, need[1], need[0]);
    } else {
      std::tie(dx, dresidual, dw, db, dinput_bias) =
          layer_bwd().call(dy, if_defined(dr), r, saved[1], saved[2], if_defined(weight), shape, at.seed, at.p, at.stream, at.origin,
                           need[1], need[2], need[0]);
    }
    variable_list result{at.p == 0 ? dresidual : dx, dresidual, parameter_gradient(dinput_bias, *dtypes[0], need[0]),
                         parameter_gradient(dw, *dtypes[1], need[1]), parameter_gradient(db, *dtypes[2], need[2]), {}, {}};
    first_derivative_only(RMS ? "dropout_add_rms_norm" : "dropout_add_layer_norm", result, {dy, dr, r, weight});
    return result;
  }
};

// DropoutAddLayerNorm(x, residual, input_bias, weight, bias, normalized_shape, eps, *place, namespace) -> (y, r)
// DropoutAddRMSNorm(x, residual, input_bias, weight, normalized_shape, eps, offset, *place, namespace) -> (y, r)
template <bool RMS>
PyObject* call(PyObject*, PyObject* const* values, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Arguments arguments(values, count);
  const Tensor x = arguments.tensor(), residual = arguments.tensor();
  const OptionalTensor input_bias = arguments.optional_tensor(), weight = arguments.optional_tensor();
  const OptionalTensor bias = RMS ? std::nullopt : arguments.optional_tensor();
  Norm norm{arguments.normalized_shape(x)};
  norm.eps = arguments.number();
  if (RMS) norm.offset = arguments.number();
  const Place at = arguments.place();
  arguments.namespace_is_ours();
  if (arguments.declined || !(RMS ? serves(rms_fwd(), x) : serves(layer_fwd(), x))) Py_RETURN_NONE;
  Tensor y, r;
  if (recorded(x, residual, input_bias, weight, bias)) {
    auto outputs = DropoutAddNorm<RMS>::apply(x, residual, input_bias, weight, bias, norm, at);
    y = outputs[0], r = outputs[1];
  } else {
    std::tie(y, r, std::ignore, std::ignore) = run<RMS>(x, residual, input_bias, weight, bias, norm, at);
  }
  return as_tuple({y, r});
  END_HANDLE_TH_ERRORS
}

}  // namespace ckpt::functions::dropout_add_norm
