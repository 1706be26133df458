// The elementwise ops for torch: checks, allocation, device and stream. The kernels are in <op>.cu.
#include "tensors.h"
#include <torch/library.h>

namespace ckpt::cuda {
namespace {

Act activation(c10::string_view act) {
  if (act == "gelu") return Act::kGelu;
  if (act == "gelu_tanh") return Act::kGeluTanh;
  if (act == "relu") return Act::kRelu;
  if (act == "silu") return Act::kSilu;
  if (act == "relu2") return Act::kRelu2;
  TORCH_CHECK_VALUE(false, "act_dropout: unknown activation ", act);
}

at::Tensor dropout_forward(const at::Tensor& x, const OptionalTensor& seed, double p, int64_t stream, at::IntArrayRef origin) {
  const char* op = "dropout_fwd";
  const DeviceMask mask = device_mask(op, seed, p, stream, origin, x);
  const OnDevice on(x);
  at::Tensor y = fresh_like(x);
  if (mask.zero) return y.zero_();
  if (x.numel() == 0) return y;
  const RowsOf xs(x);
  dropout_fwd(elementwise(op, x, mask), xs.arg, y.mutable_data_ptr(), on.device());
  on.check();
  return y;
}

at::Tensor keep_mask(const at::Tensor& seed, at::IntArrayRef shape, double p, int64_t stream, at::IntArrayRef origin) {
  const OnDevice on(seed);
  at::Tensor keep = fresh(shape, seed.options().dtype(at::kBool));
  const DeviceMask mask = device_mask("dropout_mask", seed, p, stream, origin, keep);
  if (mask.seed == nullptr) return keep.fill_(!mask.zero);
  if (keep.numel() == 0) return keep;
  dropout_mask(rows_in(keep), columns_of(keep), mask, keep.mutable_data_ptr<bool>(), on.device());
  on.check();
  return keep;
}

at::Tensor act_forward(const at::Tensor& x, const OptionalTensor& bias, c10::string_view act, const OptionalTensor& seed, double p,
                       int64_t stream, at::IntArrayRef origin) {
  const char* op = "act_dropout_fwd";
  const Act f = activation(act);
  const DeviceMask mask = device_mask(op, seed, p, stream, origin, x);
  const OnDevice on(x);
  const ColumnsOf biases(op, bias, x, columns_of(x), "bias");
  at::Tensor y = fresh_like(x);
  if (mask.zero) return y.zero_();
  if (x.numel() == 0) return y;
  const RowsOf xs(x);
  act_dropout_fwd(elementwise(op, x, mask), f, xs.arg, biases.arg, y.mutable_data_ptr(), on.device());
  on.check();
  return y;
}

std::tuple<at::Tensor, at::Tensor> act_backward(const at::Tensor& dy, const at::Tensor& x, const OptionalTensor& bias,
                                                c10::string_view act, const OptionalTensor& seed, double p, int64_t stream,
                                                at::IntArrayRef origin, bool need_dbias) {
  const char* op = "act_dropout_bwd";
  const Act f = activation(act);
  const DeviceMask mask = device_mask(op, seed, p, stream, origin, x);
  check_like(op, x, dy, "dy");
  const OnDevice on(x);
  const int64_t C = columns_of(x);
  const ColumnsOf biases(op, bias, x, C, "bias");
  at::Tensor dx = fresh_like(x);
  const bool nothing = mask.zero || x.numel() == 0;
  Sums sums(x, nothing ? 0 : elementwise_groups(rows_in(x), C, on.device()));
  sums.want(0, need_dbias, {C}, C);
  if (nothing) {
    sums.zero();
    return {dx.zero_(), sums.results[0]};
  }
  const RowsOf xs(x), dys(dy);
  act_dropout_bwd(elementwise(op, x, mask), f, dys.arg, xs.arg, biases.arg, dx.mutable_data_ptr(), sums.arg(), on.device());
  sums.finish(on.device());
  on.check();
  return {dx, sums.results[0]};
}

at::Tensor add_forward(const at::Tensor& x, const at::Tensor& residual, const OptionalTensor& bias, const OptionalTensor& seed, double p,
                       int64_t stream, at::IntArrayRef origin) {
  const char* op = "dropout_add_fwd";
  const DeviceMask mask = device_mask(op, seed, p, stream, origin, x);
  check_like(op, x, residual, "residual");
  const OnDevice on(x);
  const ColumnsOf biases(op, bias, x, columns_of(x), "bias");
  at::Tensor y = fresh_like(x);
  if (mask.zero) return y.copy_(residual);
  if (x.numel() == 0) return y;
  const RowsOf xs(x), residuals(residual);
  dropout_add_fwd(elementwise(op, x, mask), xs.arg, residuals.arg, biases.arg, y.mutable_data_ptr(), on.device());
  on.check();
  return y;
}

std::tuple<at::Tensor, at::Tensor> add_backward(const at::Tensor& dy, const OptionalTensor& seed, double p, int64_t stream,
                                                at::IntArrayRef origin, bool need_dbias) {
  const char* op = "dropout_add_bwd";
  const DeviceMask mask = device_mask(op, seed, p, stream, origin, dy);
  const OnDevice on(dy);
  const int64_t C = columns_of(dy);
  at::Tensor dx = fresh_like(dy);
  const bool nothing = mask.zero || dy.numel() == 0;
  Sums sums(dy, nothing ? 0 : elementwise_groups(rows_in(dy), C, on.device()));
  sums.want(0, need_dbias, {C}, C);
  if (nothing) {
    sums.zero();
    return {dx.zero_(), sums.results[0]};
  }
  const RowsOf dys(dy);
  dropout_add_bwd(elementwise(op, dy, mask), dys.arg, dx.mutable_data_ptr(), sums.arg(), on.device());
  sums.finish(on.device());
  on.check();
  return {dx, sums.results[0]};
}

}  // namespace
}  // namespace ckpt::cuda

CKPT_CUDA_LIBRARY(m) {
  m.impl("dropout_fwd", &ckpt::cuda::dropout_forward);
  m.impl("dropout_mask", &ckpt::cuda::keep_mask);
  m.impl("act_dropout_fwd", &ckpt::cuda::act_forward);
  m.impl("act_dropout_bwd", &ckpt::cuda::act_backward);
  m.impl("dropout_add_fwd", &ckpt::cuda::add_forward);
  m.impl("dropout_add_bwd", &ckpt::cuda::add_backward);
}
