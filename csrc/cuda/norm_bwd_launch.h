// Which kernels a norm's backward takes, and their launches.
#pragma once
#include "norm_bwd.h"

namespace ckpt::cuda {

template <typename T, bool RMS, bool FUSED, int PACKS>
void launch_norm_bwd(const BackwardRow<T, FUSED>& row, const NormBackward& args, const Partials<compute_t<T>>& partials,
                     const Device& device) {
  const RowPlan plan = plan_rows(args.M, args.N, PACKS);
  const bool sums = args.sums.groups > 0;
  const int64_t blocks = sums ? args.sums.groups / plan.block.y : plan.groups;
  const size_t third = FUSED ? size_t(plan.block.x) * plan.block.y * PACKS * kPack * sizeof(float) : 0;
  CKPT_LAUNCH((norm_bwd_kernel<T, RMS, FUSED, PACKS>), grid_of(blocks), plan.block, kMaxWarps * sizeof(TwoSums<float>) + third,
              device.stream, row, args.M, args.N, partials);
}

template <bool RMS, bool FUSED, typename T>
void norm_backward_of(T, const NormBackward& args, const Device& device) {
  using A = compute_t<T>;
  BackwardRow<T, FUSED> row{rows<T>(args.dy),
                            rows<T>(args.saved),
                            rows<T>(args.dr),
                            static_cast<const A*>(args.mean),
                            static_cast<const A*>(args.rstd),
                            {columns<T>(args.weight), columns<T>(args.bias), A(args.offset)},
                            {static_cast<T*>(args.dx), args.N},
                            {static_cast<T*>(args.dresidual), args.N},
                            static_cast<A*>(args.row_means),
                            args.mask,
                            RMS,
                            args.from_output,
                            false};
  row.wide = aligned(row.dy) && aligned(row.saved) && aligned(row.dr) && aligned(row.affine.weight) && aligned(row.affine.bias) &&
             aligned(args.dresidual) && aligned_rows<T>(args.N, args.dx);
  Partials<A> partials;
  for (int i = 0; i < kMaxSums; ++i) partials.of[i] = static_cast<A*>(args.sums.partial[i]);
  if constexpr (sizeof(T) < sizeof(double)) {
    switch (backward_packs(args.dtype, args.N)) {
      case 1: return launch_norm_bwd<T, RMS, FUSED, 1>(row, args, partials, device);
      case 2:
        if constexpr (sizeof(T) == 2) return launch_norm_bwd<T, RMS, FUSED, 2>(row, args, partials, device);
    }
  }
  if (args.dx || args.dresidual) {
    const RowPlan plan = plan_rows(args.M, args.N, 1);
    CKPT_LAUNCH((norm_bwd_looped_kernel<T, FUSED>), grid_of(plan.groups), plan.block, kMaxWarps * sizeof(TwoSums<A>), device.stream,
                row, args.M, args.N);
  }
  if (args.sums.groups > 0) launch_strips(BackwardColumns<T, FUSED>{row}, args.M, args.N, args.sums, device);
}

template <bool RMS, bool FUSED>
void norm_bwd_of(const NormBackward& args, const Device& device) {
  with_dtype(args.dtype, [&](auto zero) { norm_backward_of<RMS, FUSED>(zero, args, device); });
}

}  // namespace ckpt::cuda
