// From torch's tensors to the launchers' arguments, for the bindings.
#pragma once
#include "../common/check.h"
#include "../common/shapes.h"
#include "device.h"
#include <ATen/Functions.h>
#include <array>

namespace ckpt::cuda {

inline Dtype dtype_of(const char* op, const at::Tensor& x) {
  switch (x.scalar_type()) {
    case at::kFloat: return Dtype::kFloat;
    case at::kDouble: return Dtype::kDouble;
    case at::kHalf: return Dtype::kHalf;
    case at::kBFloat16: return Dtype::kBFloat16;
    default: TORCH_CHECK_VALUE(false, op, ": no kernel for dtype ", x.dtype());
  }
}

inline at::Tensor fresh(at::IntArrayRef sizes, const at::TensorOptions& options) { return at::empty(sizes, options); }
inline at::Tensor fresh_like(const at::Tensor& x) { return at::empty(x.sizes(), x.options()); }

// A tensor as rows, or a copy where its strides are none of rows; it must outlive the launch.
struct RowsOf {
  at::Tensor owner;
  RowsArg arg;

  explicit RowsOf(const at::Tensor& x, int64_t inner = 1) : owner(x) {
    if (!rows_in_place(x, inner, &arg.stride)) {
      owner = x.contiguous();
      rows_in_place(owner, inner, &arg.stride);
    }
    arg.data = owner.const_data_ptr();
  }
};

// A parameter in x's dtype or in its compute type; another dtype is converted.
struct ColumnsOf {
  at::Tensor owner;
  ColumnsArg arg;

  ColumnsOf(const char* op, const OptionalTensor& t, const at::Tensor& x, int64_t numel, const char* name) {
    check_param(op, t, numel, name);
    if (!given(t)) return;
    TORCH_CHECK_VALUE(t->device() == x.device(), op, ": ", name, " must be on ", x.device(), ", got ", t->device());
    const auto compute = statistics_options(x).dtype();
    arg.computed = t->dtype() == compute;
    owner = (t->dtype() == x.dtype() || arg.computed ? *t : t->to(statistics_options(x))).contiguous();
    arg.computed = owner.dtype() == compute;
    arg.data = owner.const_data_ptr();
  }
};

// The mask of a tensor of these sizes. pieces: rows of it in one row of the kernel.
inline DeviceMask device_mask(const char* op, const OptionalTensor& seed, double p, int64_t stream, at::IntArrayRef origin,
                              const at::Tensor& x, int64_t pieces = 1) {
  check_seed(op, seed, p, x.device());
  TORCH_CHECK_VALUE(origin.size() == 3, op, ": origin is (plane, row, col)");
  DeviceMask mask;
  mask.zero = p == 1;
  mask.columns = columns_of(x), mask.pieces = pieces;
  if (x.dim() > 1) mask.rows = x.size(-2);
  if (p == 0 || p == 1) return mask;
  mask.seed = seed->const_data_ptr<int64_t>();
  mask.stream = uint32_t(stream);
  mask.threshold = mask_threshold(p), mask.scale = mask_scale(mask.threshold);
  mask.plane0 = origin[0], mask.row0 = origin[1], mask.col0 = origin[2];
  return mask;
}

inline Elementwise elementwise(const char* op, const at::Tensor& x, const DeviceMask& mask) {
  return {dtype_of(op, x), rows_in(x), columns_of(x), mask};
}

// Sums over rows: `want` each by its number, hand `arg` to a launcher, `finish`, and take the results.
class Sums {
 public:
  Sums(const at::Tensor& x, int64_t groups) : options_(statistics_options(x)) { arg_.groups = groups; }

  // The partial sums have N columns; the result, of these sizes, takes each `pieces` of them as rows.
  void want(int i, bool wanted, at::IntArrayRef sizes, int64_t N, int64_t pieces = 1) {
    results[size_t(i)] = wanted ? fresh(sizes, options_) : fresh({0}, options_);
    if (!wanted || N == 0) return;
    partial_[size_t(i)] = fresh({arg_.groups, N}, options_);
    arg_.partial[i] = partial_[size_t(i)].mutable_data_ptr();
    sums_.partial[i] = arg_.partial[i], sums_.out[i] = results[size_t(i)].mutable_data_ptr();
    sums_.rows[i] = arg_.groups * pieces, sums_.columns[i] = N / pieces;
  }

  const SumsArg& arg() const { return arg_; }

  void finish(const Device& device) {
    sums_.doubles = options_.dtype() == at::kDouble;
    column_sums(sums_, device);
  }

  // Where there is nothing to sum.
  void zero() {
    for (at::Tensor& t : results)
      if (t.defined()) t.zero_();
  }

  std::array<at::Tensor, kMaxSums> results;

 private:
  at::TensorOptions options_;
  SumsArg arg_;
  ColumnSums sums_;
  std::array<at::Tensor, kMaxSums> partial_;
};

}  // namespace ckpt::cuda
