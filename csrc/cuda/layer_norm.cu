// layer_norm_fwd, layer_norm_bwd: the row kernels of norm_fwd.h and norm_bwd.h, with a mean.
#include "norm_bwd_launch.h"
#include "norm_fwd.h"

namespace ckpt::cuda {

void layer_norm_fwd(const NormForward& args, const Device& device) { plain_norm_fwd<false>(args, device); }
void layer_norm_bwd(const NormBackward& args, const Device& device) { norm_bwd_of<false, false>(args, device); }

NormBackwardPlan norm_backward_plan(Dtype dtype, int64_t M, int64_t N, bool need_sums, const Device& device) {
  const int packs = backward_packs(dtype, N);
  if (!need_sums) return {0, false};
  if (packs == 0) return {elementwise_groups(M, N, device), true};
  const RowPlan plan = plan_rows(M, N, packs);
  const int64_t ty = plan.block.y, threads = int64_t(plan.block.x) * ty;
  // 512 threads a multiprocessor, or 32 rows a group: few partial sums, and short ones.
  const int64_t wanted = std::max<int64_t>(device.processors * std::max<int64_t>(1, 512 / threads), std::min<int64_t>(1024, M / (32 * ty)));
  return {std::min(plan.groups, wanted) * ty, false};
}

}  // namespace ckpt::cuda
