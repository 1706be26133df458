// The second stage of every sum over rows: a block sums 32 columns, in an order that the shape alone decides.
#include "launch.h"
#include <algorithm>

namespace ckpt::cuda {
namespace {

constexpr int kWidth = 32, kHeight = 32;

template <typename A>
__global__ void __launch_bounds__(kWidth* kHeight) column_sums_kernel(const ColumnSums sums) {
  CKPT_SHARED(A, tile);  // [kHeight, kWidth]
  const int which = int(blockIdx.y), tx = int(threadIdx.x), ty = int(threadIdx.y);
  const A* partial = static_cast<const A*>(sums.partial[which]);
  const int64_t c = int64_t(blockIdx.x) * kWidth + tx, C = sums.columns[which];
  A sum = 0;
  if (partial != nullptr && c < C)
    for (int64_t m = ty; m < sums.rows[which]; m += kHeight) sum += partial[m * C + c];
  tile[ty * kWidth + tx] = sum;
  for (int half = kHeight / 2; half > 0; half /= 2) {
    __syncthreads();
    if (ty < half) tile[ty * kWidth + tx] += tile[(ty + half) * kWidth + tx];
  }
  if (ty == 0 && partial != nullptr && c < C) static_cast<A*>(sums.out[which])[c] = tile[tx];
}

template <typename A>
void launch(const ColumnSums& sums, const Device& device) {
  const int64_t widest = *std::max_element(sums.columns, sums.columns + kMaxSums);
  if (widest == 0) return;
  const dim3 grid(unsigned((widest + kWidth - 1) / kWidth), kMaxSums), block(kWidth, kHeight);
  CKPT_LAUNCH(column_sums_kernel<A>, grid, block, kWidth * kHeight * sizeof(A), device.stream, sums);
}

}  // namespace

void column_sums(const ColumnSums& sums, const Device& device) {
  sums.doubles ? launch<double>(sums, device) : launch<float>(sums, device);
}

}  // namespace ckpt::cuda
