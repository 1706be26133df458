// All that the kernels need of their compiler. CKPT_CUDA_HOST: a test build, where g++ compiles them (tests/cuda_host).
// Shared memory is always dynamic, accesses of 16 bytes always go through load16 and store16.
#pragma once
#include <cstdint>
#include <cstring>
// The bindings include the launchers' headers too, and their compiler knows nothing of threads: no kernels for it.
#if defined(__CUDACC__) || defined(CKPT_CUDA_HOST)
#define CKPT_KERNELS
#endif
#ifdef CKPT_CUDA_HOST
#include "host_cuda.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define CKPT_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) kernel<<<grid, block, shared_bytes, stream>>>(__VA_ARGS__)
#define CKPT_SHARED(T, name)                                            \
  extern __shared__ __align__(16) unsigned char ckpt_shared_memory[];   \
  T* const name = reinterpret_cast<T*>(ckpt_shared_memory)

namespace ckpt {

__device__ __forceinline__ void load16(const void* from, void* to) {
  const uint4 v = *static_cast<const uint4*>(from);
  memcpy(to, &v, 16);
}
__device__ __forceinline__ void store16(void* to, const void* from) {
  uint4 v;
  memcpy(&v, from, 16);
  *static_cast<uint4*>(to) = v;
}

}  // namespace ckpt
#endif
