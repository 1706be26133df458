// csrc/cuda/device.h for CPU tensors: the shared bindings register for a namespace of the tests.
#pragma once
#include <ATen/core/Tensor.h>

#define CKPT_CUDA_LIBRARY(m) TORCH_LIBRARY_IMPL(ckpt_ops_cuda_host, CPU, m)

namespace ckpt::cuda {

struct OnDevice {
  explicit OnDevice(const at::Tensor&) {}
  Device device() const { return {nullptr, 2}; }  // so few that small tensors keep every thread in its loops
  void check() const {}
};

}  // namespace ckpt::cuda
