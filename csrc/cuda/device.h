// Where a call's kernels run: its tensors' device, made current, and that device's current stream.
#pragma once
#include "launch.h"
#ifdef CKPT_CUDA_HOST
#include "host_device.h"
#else
#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

#define CKPT_CUDA_LIBRARY(m) TORCH_LIBRARY_IMPL(ckpt_ops, CUDA, m)

namespace ckpt::cuda {

class OnDevice {
 public:
  explicit OnDevice(const at::Tensor& x) : guard_(x.device()) {}

  Device device() const {
    return {at::cuda::getCurrentCUDAStream().stream(), at::cuda::getCurrentDeviceProperties()->multiProcessorCount};
  }

  // An error of the launches so far: a wrong configuration, or one left over from before.
  void check() const { C10_CUDA_KERNEL_LAUNCH_CHECK(); }

 private:
  c10::cuda::CUDAGuard guard_;
};

}  // namespace ckpt::cuda
#endif
