// Argument checks of the raw ops: what keeps a kernel inside its memory. The public functions check earlier and say more.
#pragma once
#include <ATen/core/Tensor.h>
#include <optional>

namespace ckpt {

using OptionalTensor = std::optional<at::Tensor>;

inline bool given(const OptionalTensor& t) { return t.has_value() && t->defined(); }

inline void check_like(const char* op, const at::Tensor& x, const at::Tensor& other, const char* name) {
  TORCH_CHECK_VALUE(other.sizes() == x.sizes() && other.dtype() == x.dtype() && other.device() == x.device(), op, ": ", name,
                    " must have shape ", x.sizes(), ", dtype ", x.dtype(), " and device ", x.device(), ", got ", other.sizes(), ", ",
                    other.dtype(), ", ", other.device());
}

inline void check_param(const char* op, const OptionalTensor& t, int64_t numel, const char* name) {
  TORCH_CHECK_VALUE(!given(t) || t->numel() == numel, op, ": ", name, " must have ", numel, " elements");
}

inline void check_seed(const char* op, const OptionalTensor& seed, double p, c10::Device device) {
  TORCH_CHECK_VALUE(p >= 0 && p <= 1, op, ": the drop probability must be between 0 and 1, got ", p);
  if (p == 0 || p == 1) return;
  TORCH_CHECK_VALUE(given(seed), op, ": a seed is needed at p = ", p);
  TORCH_CHECK_VALUE(seed->scalar_type() == at::kLong && seed->numel() == 1 && seed->device() == device, op,
                    ": the seed must be an int64 tensor of one element on ", device);
}

}  // namespace ckpt
