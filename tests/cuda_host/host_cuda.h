// The CUDA kernels' platform under g++: what csrc/cuda/platform.h gives them under nvcc. Blocks run one after another,
// the threads of a block are fibres, and the order is chosen and repeatable (fibres.cpp).
// Not seen here: memory-model bugs, waits between blocks, inline PTX, cp.async, TMA, mma, clusters.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <tuple>
#include <utility>

#undef __shared__  // it would silently be a local of each thread: shared memory is dynamic
#define __launch_bounds__(...)
#define CKPT_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  ((void)(stream), cuda_host::launch(grid, block, shared_bytes, kernel, __VA_ARGS__))
#define CKPT_SHARED(T, name) T* const name = static_cast<T*>(cuda_host::shared_memory())

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

namespace cuda_host {

void run(dim3 grid, dim3 block, size_t shared_bytes, void (*body)(void*), void* argument);
void* shared_memory();
void barrier(int line);
uint64_t shuffle(unsigned mask, uint64_t value, int source_lane, int line);
int lane();
// Stops the launch where p is not a multiple of 16; tells the race checker.
void check_access_of_16(const void* p, bool write, int line);

template <typename... P, typename... A>
void launch(dim3 grid, dim3 block, size_t shared_bytes, void (*kernel)(P...), A&&... arguments) {
  std::tuple<std::remove_const_t<P>...> values(std::forward<A>(arguments)...);
  auto body = [&] { std::apply(kernel, values); };
  run(grid, block, shared_bytes, [](void* f) { (*static_cast<decltype(body)*>(f))(); }, &body);
}

}  // namespace cuda_host

inline void __syncthreads(int line = __builtin_LINE()) { cuda_host::barrier(line); }

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int line = __builtin_LINE()) {
  static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  bits = cuda_host::shuffle(mask, bits, cuda_host::lane() ^ lanes, line);
  memcpy(&value, &bits, sizeof value);
  return value;
}

namespace ckpt {

// Bytes are copied, as strict aliasing holds here.
inline void load16(const void* from, void* to, int line = __builtin_LINE()) {
  cuda_host::check_access_of_16(from, false, line);
  memcpy(to, from, 16);
}
inline void store16(void* to, const void* from, int line = __builtin_LINE()) {
  cuda_host::check_access_of_16(to, true, line);
  memcpy(to, from, 16);
}

}  // namespace ckpt
