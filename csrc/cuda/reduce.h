// Reductions over the threads of one row: warps by shuffles, then across warps through shared memory. The order of merges
// depends on the block's shape alone.
#pragma once
#include "draws.h"
#include "../math/welford.h"

namespace ckpt::cuda {

constexpr int kWarpLanes = 32, kMaxWarps = 32;

#ifdef CKPT_KERNELS
template <typename Part>
__device__ __forceinline__ Part shuffle_part(const Part& part, int lanes) {
  static_assert(sizeof(Part) % sizeof(uint32_t) == 0, "a part moves word by word");
  constexpr int words = sizeof(Part) / sizeof(uint32_t);
  uint32_t w[words];
  memcpy(w, &part, sizeof part);
#pragma unroll
  for (int i = 0; i < words; ++i) w[i] = __shfl_xor_sync(kWholeWarp, w[i], lanes);
  Part other;
  memcpy(&other, w, sizeof other);
  return other;
}

// Every thread of the row (threadIdx.y) gets the merge of its row's parts; blockDim.x is a multiple of a warp. All threads
// of the block call it together. parts: shared memory for one part a warp.
template <typename Part>
__device__ __forceinline__ Part merge_over_row(Part part, Part* parts) {
#pragma unroll
  for (int lanes = kWarpLanes / 2; lanes > 0; lanes /= 2) part.merge(shuffle_part(part, lanes));
  const int warps = int(blockDim.x) / kWarpLanes;  // of a row
  if (warps == 1) return part;
  const int first = int(threadIdx.y) * warps;
  if (threadIdx.x % kWarpLanes == 0) parts[first + int(threadIdx.x) / kWarpLanes] = part;
  __syncthreads();
  part = parts[first];
  for (int w = 1; w < warps; ++w) part.merge(parts[first + w]);
  __syncthreads();  // parts are written again by the next call
  return part;
}
#endif

}  // namespace ckpt::cuda
