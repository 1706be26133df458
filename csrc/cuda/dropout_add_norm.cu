// r = residual + m * (x + input_bias), y = norm(r), and its backward, for both norms: the row kernels of norm_fwd.h and
// norm_bwd.h.
#include "norm_bwd_launch.h"
#include "norm_fwd.h"

namespace ckpt::cuda {

void dropout_add_norm_fwd(const NormForward& args, const Device& device) {
  args.rms ? dropout_add_norm_fwd_of<true>(args, device) : dropout_add_norm_fwd_of<false>(args, device);
}

void dropout_add_norm_bwd(const NormBackward& args, const Device& device) {
  args.rms ? norm_bwd_of<true, true>(args, device) : norm_bwd_of<false, true>(args, device);
}

}  // namespace ckpt::cuda
