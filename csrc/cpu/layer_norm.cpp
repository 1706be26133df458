// layer_norm_fwd, layer_norm_bwd: the row functions of norm.h, with a mean.
#include "norm.h"
#include <torch/library.h>

namespace ckpt {
namespace {

std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_fwd(const at::Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                                                              at::IntArrayRef normalized_shape, double eps) {
  auto out = norm_forward<false>("layer_norm_fwd", x, weight, bias, normalized_shape, eps, 0);
  return {out.y, out.mean, out.rstd};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_bwd(const at::Tensor& dy, const at::Tensor& saved, const OptionalTensor& mean,
                                                              const OptionalTensor& rstd, const OptionalTensor& weight,
                                                              const OptionalTensor& bias, at::IntArrayRef normalized_shape,
                                                              bool from_output, bool need_dx, bool need_dw, bool need_db) {
  auto grads = norm_backward<false>("layer_norm_bwd", dy, saved, mean, rstd, weight, bias, normalized_shape, 0, from_output,
                                    {need_dx, need_dw, need_db});
  return {grads.dx, grads.dw, grads.db};
}

}  // namespace
}  // namespace ckpt

TORCH_LIBRARY_IMPL(ckpt_ops, CPU, m) {
  m.impl("layer_norm_fwd", &ckpt::layer_norm_fwd);
  m.impl("layer_norm_bwd", &ckpt::layer_norm_bwd);
}
