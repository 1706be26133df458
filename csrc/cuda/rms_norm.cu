// rms_norm_fwd, rms_norm_bwd: the row kernels of norm_fwd.h and norm_bwd.h, without a mean.
#include "norm_bwd_launch.h"
#include "norm_fwd.h"

namespace ckpt::cuda {

void rms_norm_fwd(const NormForward& args, const Device& device) { plain_norm_fwd<true>(args, device); }
void rms_norm_bwd(const NormBackward& args, const Device& device) { norm_bwd_of<true, false>(args, device); }

}  // namespace ckpt::cuda
