// What the norms' kernels share: arguments, the layout of rows over threads, and the parameters of a pack of columns.
// A block is (threads of a row, rows); a thread owns the packs tx, tx + TX, .. of its row.
#pragma once
#include "reduce.h"
#include "strips.h"

namespace ckpt::cuda {

// r = residual + m * (x + input_bias) before the norm; data is null where the norm stands alone.
struct AddArg {
  RowsArg residual;
  ColumnsArg input_bias;
  void* r = nullptr;
  DeviceMask mask;
};

struct NormForward {
  Dtype dtype;
  bool rms;
  int64_t M, N;
  double eps, offset;
  RowsArg x;
  ColumnsArg weight, bias;
  void *y, *mean, *rstd;  // mean is null for RMS
  AddArg add;
};

// saved: x (or r) with its statistics, or y where from_output.
struct NormBackward {
  Dtype dtype;
  bool rms, from_output, fused;
  int64_t M, N;
  double offset;
  RowsArg dy, saved, dr;  // dr.data is null where there is none
  const void *mean, *rstd;
  ColumnsArg weight, bias;
  void *dx, *dresidual;  // dx is null where not wanted (or, fused, where it is dresidual)
  void* row_means;       // [M, 2] scratch, where norm_backward_plan asks for it
  DeviceMask mask;
  SumsArg sums;  // 0 dw, 1 db, 2 dinput_bias
};

// How a backward is split, whichever gradients are wanted: the groups of rows that partial sums are made of, and whether
// dinput_bias needs row_means.
struct NormBackwardPlan {
  int64_t groups;
  bool row_means;
};
NormBackwardPlan norm_backward_plan(Dtype dtype, int64_t M, int64_t N, bool need_sums, const Device& device);

void layer_norm_fwd(const NormForward& args, const Device& device);
void layer_norm_bwd(const NormBackward& args, const Device& device);
void rms_norm_fwd(const NormForward& args, const Device& device);
void rms_norm_bwd(const NormBackward& args, const Device& device);
void dropout_add_norm_fwd(const NormForward& args, const Device& device);
void dropout_add_norm_bwd(const NormBackward& args, const Device& device);

constexpr int kRowThreads = 512;  // at most, in a block: 128 registers a thread

struct RowPlan {
  dim3 block;
  int64_t groups;  // of rows, one row each at a time
};

// packs: how many a thread holds. Short rows share a block of 128 threads.
inline RowPlan plan_rows(int64_t M, int64_t N, int packs) {
  const int64_t lanes = ((N + kPack - 1) / kPack + packs - 1) / packs;
  const int64_t tx = std::min<int64_t>(kRowThreads, (lanes + kWarpLanes - 1) / kWarpLanes * kWarpLanes);
  const int64_t ty = std::max<int64_t>(1, 128 / tx);
  return {dim3(unsigned(tx), unsigned(ty)), (M + ty - 1) / ty};
}

inline unsigned grid_of(int64_t groups) { return unsigned(std::min<int64_t>(groups, 2147483647)); }

// The packs a thread holds of a row in the forward; 0 where it is looped over. Doubles always are: they take twice as many.
inline int forward_packs(Dtype dtype, int64_t N) {
  if (dtype == Dtype::kDouble || N > int64_t(kRowThreads) * 4 * kPack) return 0;
  return N <= kWarpLanes * kPack ? 1 : 4;
}

// The same for the backward, which holds two or three tensors and their sums.
inline int backward_packs(Dtype dtype, int64_t N) {
  const int most = dtype == Dtype::kDouble ? 0 : dtype == Dtype::kFloat ? 1 : 2;
  if (N > int64_t(kRowThreads) * most * kPack) return 0;
  return N <= kWarpLanes * kPack ? 1 : most;
}

// Weight (+ offset) and bias of a norm.
template <typename T>
struct Affine {
  using A = compute_t<T>;
  Columns<T> weight, bias;
  A offset;

  __device__ __forceinline__ void load_weight(int64_t c, int64_t n, bool wide, A (&w)[kPack]) const {
    weight.load(c, n, wide, A(1), w);
    if (weight.data == nullptr || offset == A(0)) return;
#pragma unroll
    for (int k = 0; k < kPack; ++k) w[k] += offset;
  }
};

template <bool RMS, typename A> struct PartOf { using type = Welford<A>; };
template <typename A> struct PartOf<true, A> { using type = SumOfSquares<A>; };
template <bool RMS, typename A> using part_of = typename PartOf<RMS, A>::type;

}  // namespace ckpt::cuda
