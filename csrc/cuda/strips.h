// The elementwise kernels' skeleton. A thread owns eight columns and walks down the rows, so that a bias is loaded once
// and sums over rows stay in registers; the block (TX, TY) covers 8 * TX columns, the grid (strips of columns, groups of rows).
#pragma once
#include "launch.h"
#include <algorithm>

namespace ckpt::cuda {

constexpr int kStripThreads = 256;

// Rows that a thread reads before it works on the first: 32 bytes and more in flight.
template <typename T> constexpr int kInFlight = sizeof(T) == 2 ? 2 : 1;

struct StripPlan {
  dim3 grid, block;
};

inline StripPlan plan_strips(int64_t M, int64_t C, int processors) {
  const int64_t packs = (C + 31) / 32 * 4;  // whole groups of 32 columns: draws.h
  int tx = 4;
  while (tx < 32 && tx < packs) tx *= 2;
  while (tx < kStripThreads && tx < packs && kStripThreads / tx > M) tx *= 2;
  const int ty = kStripThreads / tx;
  const int64_t strips = (packs + tx - 1) / tx;
  const int64_t most = std::max<int64_t>(1, 16 * int64_t(processors) / strips);  // two full loads of the machine
  const int64_t groups = std::min({(M + 2 * ty - 1) / (2 * ty), most, int64_t(65535)});
  return {dim3(unsigned(strips), unsigned(groups)), dim3(unsigned(tx), unsigned(ty))};
}

template <typename A>
struct Partials {
  A* of[kMaxSums] = {};
};

#ifdef CKPT_KERNELS
// What a thread of an op with a bias holds for its columns.
template <typename T>
struct Strip {
  Draws draws;
  compute_t<T> bias[kPack];
};

template <typename T>
__device__ __forceinline__ Strip<T> begin_strip(const DeviceMask& mask, const Columns<T>& bias, int64_t c, int64_t n, bool wide) {
  Strip<T> strip{Draws(mask), {}};
  bias.load(c, n, wide, compute_t<T>(0), strip.bias);
  return strip;
}

// Sums over the block's TY rows: partial[i] gets row blockIdx.y.
template <typename A, int SUMS>
__device__ __forceinline__ void store_sums(const A (&sums)[SUMS][kPack], const Partials<A>& partials, int64_t C) {
  CKPT_SHARED(A, tile);  // [TY, 8 * TX]
  const int width = kPack * int(blockDim.x), thread = int(threadIdx.y * blockDim.x + threadIdx.x);
#pragma unroll
  for (int s = 0; s < SUMS; ++s) {
    if (partials.of[s] == nullptr) continue;
#pragma unroll
    for (int k = 0; k < kPack; ++k) tile[int(threadIdx.y) * width + int(threadIdx.x) * kPack + k] = sums[s][k];
    __syncthreads();
    for (int i = thread; i < width; i += kStripThreads) {
      const int64_t c = int64_t(blockIdx.x) * width + i;
      A sum = 0;
      for (int y = 0; y < int(blockDim.y); ++y) sum += tile[y * width + i];
      if (c < C) partials.of[s][int64_t(blockIdx.y) * C + c] = sum;
    }
    __syncthreads();  // the tile is written again for the next sum
  }
}

// Op: types T, Raw, State; `begin` once a thread, `load` and `finish` once a row, kSums sums over rows.
// Lanes without work walk along: a warp's draws are made together.
template <typename Op>
__global__ void __launch_bounds__(kStripThreads, 1) strip_kernel(const Op op, const int64_t M, const int64_t C,
                                                                 const Partials<compute_t<typename Op::T>> partials) {
  using A = compute_t<typename Op::T>;
  constexpr int U = kInFlight<typename Op::T>;
  const int64_t c = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * kPack, n = C - c;
  const int64_t step = int64_t(gridDim.y) * blockDim.y;
  const auto state = op.begin(c, n);
  A sums[Op::kSums > 0 ? Op::kSums : 1][kPack] = {};
  for (int64_t first = int64_t(blockIdx.y) * blockDim.y; first < M; first += U * step) {
    typename Op::Raw raw[U] = {};
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t m = first + u * step + threadIdx.y;
      if (m < M && n > 0) raw[u] = op.load(m, c, n);
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t m = first + u * step + threadIdx.y;
      op.finish(state, raw[u], m, c, m < M ? n : 0, sums);
    }
  }
  if constexpr (Op::kSums > 0) store_sums(sums, partials, C);
}

template <typename Op>
void launch_strips(const Op& op, int64_t M, int64_t C, const SumsArg& sums, const Device& device) {
  using A = compute_t<typename Op::T>;
  const StripPlan plan = plan_strips(M, C, device.processors);
  Partials<A> partials;
  for (int i = 0; i < kMaxSums; ++i) partials.of[i] = static_cast<A*>(sums.partial[i]);
  const size_t shared = Op::kSums > 0 ? kStripThreads * kPack * sizeof(A) : 0;
  CKPT_LAUNCH(strip_kernel<Op>, plan.grid, plan.block, shared, device.stream, op, M, C, partials);
}
#endif

// body(T{}) for the op's storage type.
template <typename Body>
void with_dtype(Dtype dtype, const Body& body) {
  switch (dtype) {
    case Dtype::kFloat: return body(float{});
    case Dtype::kDouble: return body(double{});
    case Dtype::kHalf: return body(half_t{});
    case Dtype::kBFloat16: return body(bfloat_t{});
  }
}

template <typename T>
Rows<const T> rows(const RowsArg& r) {
  return {static_cast<const T*>(r.data), r.stride};
}

template <typename T>
Columns<T> columns(const ColumnsArg& c) {
  return {c.data, c.computed};
}

// Whether every access may take 16 bytes: each pointer given is a multiple of 16, and so is each row's stride.
inline bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }
template <typename T>
bool aligned(const Rows<const T>& r) {
  return aligned(static_cast<const void*>(r.data)) && r.stride * int64_t(sizeof(T)) % 16 == 0;
}
template <typename T>
bool aligned(const Columns<T>& c) {
  return aligned(c.data);
}
template <typename T>
bool aligned_rows(int64_t C, const void* out) {
  return C * int64_t(sizeof(T)) % 16 == 0 && aligned(out);
}

}  // namespace ckpt::cuda
