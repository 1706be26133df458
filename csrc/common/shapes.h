// Tensors as rows: what the kernels of every device see of a shape.
#pragma once
#include <ATen/core/Tensor.h>
#include <algorithm>

namespace ckpt {

inline int64_t columns_of(const at::Tensor& x) { return x.dim() ? x.size(-1) : 1; }
inline int64_t rows_in(const at::Tensor& x) { return x.numel() ? x.numel() / columns_of(x) : 0; }

// Whether x is rows of unit stride, one stride between rows, where a row is the last `inner` dimensions.
inline bool rows_in_place(const at::Tensor& x, int64_t inner, int64_t* stride) {
  int64_t next = 1;  // the last `inner` dimensions must be contiguous
  int64_t d = x.dim() - 1;
  for (; d >= std::max<int64_t>(0, x.dim() - inner); --d) {
    if (x.size(d) != 1 && x.stride(d) != next) return false;
    next *= x.size(d);
  }
  *stride = next;
  bool first = true;  // the leading ones must step evenly
  for (; d >= 0; --d) {
    if (x.size(d) == 1) continue;
    if (first) *stride = next = x.stride(d);
    else if (x.stride(d) != next) return false;
    first = false;
    next *= x.size(d);
  }
  return true;
}

inline at::TensorOptions statistics_options(const at::Tensor& x) {
  return at::TensorOptions().dtype(x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat).device(x.device());
}

// A norm's row is the last dimensions, of these sizes.
inline int64_t norm_columns(const char* op, const at::Tensor& x, at::IntArrayRef normalized_shape) {
  const size_t k = normalized_shape.size();
  TORCH_CHECK_VALUE(k > 0 && k <= size_t(x.dim()) && x.sizes().slice(x.dim() - k) == normalized_shape, op, ": normalized_shape ",
                    normalized_shape, " must end the input's shape ", x.sizes());
  int64_t N = 1;
  for (int64_t n : normalized_shape) N *= n;
  return N;
}

inline at::IntArrayRef leading(const at::Tensor& x, at::IntArrayRef normalized_shape) {
  return x.sizes().slice(0, x.dim() - normalized_shape.size());
}

inline int64_t norm_rows(const at::Tensor& x, at::IntArrayRef normalized_shape) {
  int64_t M = 1;
  for (int64_t n : leading(x, normalized_shape)) M *= n;
  return M;
}

}  // namespace ckpt
