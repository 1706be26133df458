// What bindings and launchers share: the arguments of every op, without types of torch. Launchers allocate nothing.
#pragma once
#include "draws.h"
#include "element.h"

namespace ckpt::cuda {

enum class Dtype { kFloat, kDouble, kHalf, kBFloat16 };
enum class Act { kGelu, kGeluTanh, kRelu, kSilu, kRelu2 };

// Where a kernel runs. Sums over rows are split by `processors` (its multiprocessors), never by timing.
struct Device {
  cudaStream_t stream;
  int processors;
};

struct RowsArg {
  const void* data = nullptr;
  int64_t stride = 0;  // elements
};

struct ColumnsArg {
  const void* data = nullptr;
  bool computed = false;  // in the compute type instead of the op's
};

// Elementwise ops: M rows of C columns. Outputs are contiguous.
struct Elementwise {
  Dtype dtype;
  int64_t M, C;
  DeviceMask mask;
};

constexpr int kMaxSums = 3;

// Column sums in two stages: partial[i] is [groups, columns], summed to out[i], [columns]. Null where not wanted.
struct SumsArg {
  void* partial[kMaxSums] = {};
  void* out[kMaxSums] = {};
  int64_t groups = 0;
};

int64_t elementwise_groups(int64_t M, int64_t C, const Device& device);

void dropout_fwd(const Elementwise& shape, RowsArg x, void* y, const Device& device);
void dropout_mask(int64_t M, int64_t C, const DeviceMask& mask, bool* keep, const Device& device);
void act_dropout_fwd(const Elementwise& shape, Act act, RowsArg x, ColumnsArg bias, void* y, const Device& device);
void act_dropout_bwd(const Elementwise& shape, Act act, RowsArg dy, RowsArg x, ColumnsArg bias, void* dx, const SumsArg& dbias,
                     const Device& device);
void dropout_add_fwd(const Elementwise& shape, RowsArg x, RowsArg residual, ColumnsArg bias, void* y, const Device& device);
void dropout_add_bwd(const Elementwise& shape, RowsArg dy, void* dx, const SumsArg& dbias, const Device& device);

// out[i][c] = sum of partial[i][., c], for i < kMaxSums; rows and columns of each.
struct ColumnSums {
  const void* partial[kMaxSums] = {};
  void* out[kMaxSums] = {};
  int64_t rows[kMaxSums] = {}, columns[kMaxSums] = {};
  bool doubles = false;
};
void column_sums(const ColumnSums& sums, const Device& device);

}  // namespace ckpt::cuda
