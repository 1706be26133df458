// rms_norm_fwd, rms_norm_bwd: the row functions of norm.h, without a mean.
#include "norm.h"
#include <torch/library.h>

namespace ckpt {
namespace {

std::tuple<at::Tensor, at::Tensor> rms_norm_fwd(const at::Tensor& x, const OptionalTensor& weight, at::IntArrayRef normalized_shape,
                                                double eps, double offset) {
  auto out = norm_forward<true>("rms_norm_fwd", x, weight, std::nullopt, normalized_shape, eps, offset);
  return {out.y, out.rstd};
}

std::tuple<at::Tensor, at::Tensor> rms_norm_bwd(const at::Tensor& dy, const at::Tensor& saved, const at::Tensor& rstd,
                                                const OptionalTensor& weight, at::IntArrayRef normalized_shape, double offset,
                                                bool from_output, bool need_dx, bool need_dw) {
  auto grads = norm_backward<true>("rms_norm_bwd", dy, saved, std::nullopt, rstd, weight, std::nullopt, normalized_shape, offset,
                                   from_output, {need_dx, need_dw, false});
  return {grads.dx, grads.dw};
}

}  // namespace
}  // namespace ckpt

TORCH_LIBRARY_IMPL(ckpt_ops, CPU, m) {
  m.impl("rms_norm_fwd", &ckpt::rms_norm_fwd);
  m.impl("rms_norm_bwd", &ckpt::rms_norm_bwd);
}
