// The norms for torch, alone and after dropout and addition: checks, allocation, device and stream.
#include "norm.h"
#include "tensors.h"
#include <torch/library.h>

namespace ckpt::cuda {
namespace {

struct Outputs {
  at::Tensor y, r, mean, rstd;
};

// The place of what is normalised and its parameters; tensors are null where an op has none.
struct ForwardCall {
  const char* op;
  bool rms;
  const at::Tensor& x;
  const OptionalTensor &residual, &input_bias, &weight, &bias;
  at::IntArrayRef normalized_shape;
  double eps, offset;
  DeviceMask mask;
};

int64_t pieces_of(int64_t N, const at::Tensor& x) { return columns_of(x) ? N / columns_of(x) : 1; }

Outputs forward(const ForwardCall& call) {
  const char* op = call.op;
  const at::Tensor& x = call.x;
  const int64_t N = norm_columns(op, x, call.normalized_shape), M = norm_rows(x, call.normalized_shape);
  const int64_t inner = int64_t(call.normalized_shape.size());
  const bool fused = given(call.residual);
  if (fused) check_like(op, x, *call.residual, "residual");
  const OnDevice on(x);
  const ColumnsOf weights(op, call.weight, x, N, "weight"), biases(op, call.bias, x, N, "bias");
  const ColumnsOf input_biases(op, call.input_bias, x, columns_of(x), "input_bias");
  const auto rows = leading(x, call.normalized_shape);
  Outputs out{fresh_like(x), fused ? fresh_like(x) : at::Tensor(), {}, fresh(rows, statistics_options(x))};
  if (!call.rms) out.mean = fresh(rows, statistics_options(x));
  if (x.numel() == 0) {
    out.rstd.zero_();
    if (!call.rms) out.mean.zero_();
    return out;
  }
  const RowsOf xs(x, inner), residuals(fused ? *call.residual : x, inner);
  NormForward args{dtype_of(op, x), call.rms, M, N, call.eps, call.offset, xs.arg, weights.arg, biases.arg, out.y.mutable_data_ptr(),
                   call.rms ? nullptr : out.mean.mutable_data_ptr(), out.rstd.mutable_data_ptr(), {}};
  if (fused) {
    args.add = {residuals.arg, input_biases.arg, out.r.mutable_data_ptr(), call.mask};
    dropout_add_norm_fwd(args, on.device());
  } else {
    (call.rms ? rms_norm_fwd : layer_norm_fwd)(args, on.device());
  }
  on.check();
  return out;
}

struct Grads {
  at::Tensor dx, dresidual, dw, db, dinput_bias;
};

struct BackwardCall {
  const char* op;
  bool rms, from_output, fused;
  const at::Tensor &dy, &saved;
  const OptionalTensor &dr, &mean, &rstd, &weight, &bias;
  at::IntArrayRef normalized_shape;
  double offset;
  DeviceMask mask;
  bool need_dx, need_dw, need_db, need_dinput_bias;
};

const void* statistic(const BackwardCall& call, const OptionalTensor& t, int64_t M, const char* name) {
  check_param(call.op, t, M, name);
  if (!given(t)) return nullptr;
  TORCH_CHECK_VALUE(t->dtype() == statistics_options(call.dy).dtype() && t->device() == call.dy.device() && t->is_contiguous(), call.op,
                    ": ", name, " must be contiguous, of the statistics' dtype and on ", call.dy.device());
  return t->const_data_ptr();
}

Grads backward(const BackwardCall& call) {
  const char* op = call.op;
  const at::Tensor &dy = call.dy, &saved = call.saved;
  const int64_t N = norm_columns(op, saved, call.normalized_shape), M = norm_rows(saved, call.normalized_shape);
  const int64_t C = columns_of(saved), pieces = pieces_of(N, saved), inner = int64_t(call.normalized_shape.size());
  check_like(op, saved, dy, "dy");
  if (given(call.dr)) check_like(op, saved, *call.dr, "dr");
  const OnDevice on(dy);
  const ColumnsOf weights(op, call.weight, dy, N, "weight"), biases(op, call.bias, dy, N, "bias");
  const void *mean = statistic(call, call.mean, M, "mean"), *rstd = statistic(call, call.rstd, M, "rstd");
  const bool statistics_needed = call.need_dx || (call.need_dw && !call.from_output);
  TORCH_CHECK_VALUE(!statistics_needed || M == 0 || (given(call.rstd) && (call.rms || call.from_output || given(call.mean))), op,
                    ": statistics are missing");
  const bool own_dx = call.fused ? call.mask.seed != nullptr || call.mask.zero : call.need_dx;  // else dx is dresidual, or not wanted
  const bool sums_wanted = call.need_dw || call.need_db || call.need_dinput_bias, nothing = dy.numel() == 0;
  Grads grads{own_dx ? fresh_like(dy) : fresh({0}, dy.options()), call.fused ? fresh_like(dy) : at::Tensor(), {}, {}, {}};
  const Dtype dtype = dtype_of(op, dy);
  const auto plan = nothing ? NormBackwardPlan{0, false} : norm_backward_plan(dtype, M, N, sums_wanted, on.device());
  Sums sums(dy, plan.groups);
  sums.want(0, call.need_dw, call.normalized_shape, nothing ? 0 : N);
  sums.want(1, call.need_db, call.normalized_shape, nothing ? 0 : N);
  sums.want(2, call.need_dinput_bias, {C}, nothing ? 0 : N, pieces);
  grads.dw = sums.results[0], grads.db = sums.results[1], grads.dinput_bias = sums.results[2];
  if (nothing) {
    sums.zero();
    return grads;
  }
  const RowsOf dys(dy, inner), saveds(saved, inner), drs(given(call.dr) ? *call.dr : dy, inner);
  const at::Tensor row_means = plan.row_means && call.need_dinput_bias ? fresh({M, 2}, statistics_options(dy)) : at::Tensor();
  const NormBackward args{dtype, call.rms, call.from_output, call.fused, M, N, call.offset, dys.arg, saveds.arg,
                          given(call.dr) ? drs.arg : RowsArg{}, mean, rstd, weights.arg, biases.arg,
                          own_dx ? grads.dx.mutable_data_ptr() : nullptr, call.fused ? grads.dresidual.mutable_data_ptr() : nullptr,
                          row_means.defined() ? row_means.mutable_data_ptr() : nullptr, call.mask, sums.arg()};
  (call.fused ? dropout_add_norm_bwd : call.rms ? rms_norm_bwd : layer_norm_bwd)(args, on.device());
  if (sums_wanted) sums.finish(on.device());
  on.check();
  return grads;
}

const OptionalTensor kNone;

std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_forward(const at::Tensor& x, const OptionalTensor& weight,
                                                                  const OptionalTensor& bias, at::IntArrayRef normalized_shape,
                                                                  double eps) {
  auto out = forward({"layer_norm_fwd", false, x, kNone, kNone, weight, bias, normalized_shape, eps, 0, {}});
  return {out.y, out.mean, out.rstd};
}

std::tuple<at::Tensor, at::Tensor> rms_norm_forward(const at::Tensor& x, const OptionalTensor& weight, at::IntArrayRef normalized_shape,
                                                    double eps, double offset) {
  auto out = forward({"rms_norm_fwd", true, x, kNone, kNone, weight, kNone, normalized_shape, eps, offset, {}});
  return {out.y, out.rstd};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_backward(const at::Tensor& dy, const at::Tensor& saved,
                                                                   const OptionalTensor& mean, const OptionalTensor& rstd,
                                                                   const OptionalTensor& weight, const OptionalTensor& bias,
                                                                   at::IntArrayRef normalized_shape, bool from_output, bool need_dx,
                                                                   bool need_dw, bool need_db) {
  auto g = backward({"layer_norm_bwd", false, from_output, false, dy, saved, kNone, mean, rstd, weight, bias, normalized_shape, 0, {},
                     need_dx, need_dw, need_db, false});
  return {g.dx, g.dw, g.db};
}

std::tuple<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& dy, const at::Tensor& saved, const at::Tensor& rstd,
                                                     const OptionalTensor& weight, at::IntArrayRef normalized_shape, double offset,
                                                     bool from_output, bool need_dx, bool need_dw) {
  auto g = backward({"rms_norm_bwd", true, from_output, false, dy, saved, kNone, kNone, rstd, weight, kNone, normalized_shape, offset, {},
                     need_dx, need_dw, false, false});
  return {g.dx, g.dw};
}

DeviceMask mask_for(const char* op, const at::Tensor& x, at::IntArrayRef normalized_shape, const OptionalTensor& seed, double p,
                    int64_t stream, at::IntArrayRef origin) {
  return device_mask(op, seed, p, stream, origin, x, pieces_of(norm_columns(op, x, normalized_shape), x));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> add_layer_norm_forward(
    const at::Tensor& x, const at::Tensor& residual, const OptionalTensor& input_bias, const OptionalTensor& weight,
    const OptionalTensor& bias, at::IntArrayRef normalized_shape, double eps, const OptionalTensor& seed, double p, int64_t stream,
    at::IntArrayRef origin) {
  const char* op = "dropout_add_layer_norm_fwd";
  auto out = forward({op, false, x, residual, input_bias, weight, bias, normalized_shape, eps, 0,
                      mask_for(op, x, normalized_shape, seed, p, stream, origin)});
  return {out.y, out.r, out.mean, out.rstd};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> add_layer_norm_backward(
    const at::Tensor& dy, const OptionalTensor& dr, const at::Tensor& r, const at::Tensor& mean, const at::Tensor& rstd,
    const OptionalTensor& weight, at::IntArrayRef normalized_shape, const OptionalTensor& seed, double p, int64_t stream,
    at::IntArrayRef origin, bool need_dw, bool need_db, bool need_dinput_bias) {
  const char* op = "dropout_add_layer_norm_bwd";
  auto g = backward({op, false, false, true, dy, r, dr, mean, rstd, weight, kNone, normalized_shape, 0,
                     mask_for(op, r, normalized_shape, seed, p, stream, origin), true, need_dw, need_db, need_dinput_bias});
  return {g.dx, g.dresidual, g.dw, g.db, g.dinput_bias};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> add_rms_norm_forward(const at::Tensor& x, const at::Tensor& residual,
                                                                    const OptionalTensor& input_bias, const OptionalTensor& weight,
                                                                    at::IntArrayRef normalized_shape, double eps, double offset,
                                                                    const OptionalTensor& seed, double p, int64_t stream,
                                                                    at::IntArrayRef origin) {
  const char* op = "dropout_add_rms_norm_fwd";
  auto out = forward({op, true, x, residual, input_bias, weight, kNone, normalized_shape, eps, offset,
                      mask_for(op, x, normalized_shape, seed, p, stream, origin)});
  return {out.y, out.r, out.rstd};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> add_rms_norm_backward(
    const at::Tensor& dy, const OptionalTensor& dr, const at::Tensor& r, const at::Tensor& rstd, const OptionalTensor& weight,
    at::IntArrayRef normalized_shape, double offset, const OptionalTensor& seed, double p, int64_t stream, at::IntArrayRef origin,
    bool need_dw, bool need_dinput_bias) {
  const char* op = "dropout_add_rms_norm_bwd";
  auto g = backward({op, true, false, true, dy, r, dr, kNone, rstd, weight, kNone, normalized_shape, offset,
                     mask_for(op, r, normalized_shape, seed, p, stream, origin), true, need_dw, false, need_dinput_bias});
  return {g.dx, g.dresidual, g.dw, g.dinput_bias};
}

}  // namespace
}  // namespace ckpt::cuda

CKPT_CUDA_LIBRARY(m) {
  m.impl("layer_norm_fwd", &ckpt::cuda::layer_norm_forward);
  m.impl("layer_norm_bwd", &ckpt::cuda::layer_norm_backward);
  m.impl("rms_norm_fwd", &ckpt::cuda::rms_norm_forward);
  m.impl("rms_norm_bwd", &ckpt::cuda::rms_norm_backward);
  m.impl("dropout_add_layer_norm_fwd", &ckpt::cuda::add_layer_norm_forward);
  m.impl("dropout_add_layer_norm_bwd", &ckpt::cuda::add_layer_norm_backward);
  m.impl("dropout_add_rms_norm_fwd", &ckpt::cuda::add_rms_norm_forward);
  m.impl("dropout_add_rms_norm_bwd", &ckpt::cuda::add_rms_norm_backward);
}
