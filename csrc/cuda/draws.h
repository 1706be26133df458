// The mask's bits for the eight columns of a thread. A Philox call gives two draws to each of four neighbouring blocks of
// eight columns (csrc/math/mask.h), so four neighbouring lanes share four calls: one call a thread, then four shuffles.
#pragma once
#include "../math/mask.h"
#include "platform.h"

namespace ckpt {

constexpr unsigned kWholeWarp = 0xFFFFFFFFu;

// A mask as a kernel gets it: the seed stays on the device, the key is made from it there.
struct DeviceMask : Mask {
  const int64_t* seed = nullptr;  // null where nothing is drawn
  bool zero = false;              // p = 1: nothing is kept
  int64_t rows = 1, columns = 1;  // of a plane
  int64_t pieces = 1;             // rows of the mask in one row of the kernel (a norm over several dimensions)
};

#ifdef CKPT_KERNELS
// Row j of a 4 x 4 matrix of words becomes column j; row j lies in the lane with lane % 4 == j.
__device__ __forceinline__ void transpose_quad(uint32_t (&w)[4], int lane) {
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
    const bool upper = lane & bit;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const uint32_t received = __shfl_xor_sync(kWholeWarp, upper ? w[i] : w[i + bit], bit);
      if (upper) w[i] = received;
      else w[i + bit] = received;
    }
  }
}

class Draws {
 public:
  __device__ __forceinline__ explicit Draws(const DeviceMask& mask) : mask_(mask) {
    if (mask.seed == nullptr) return;
    const uint64_t seed = uint64_t(*mask.seed);
    mask_.key0 = uint32_t(seed), mask_.key1 = uint32_t(seed >> 32);
  }

  // Bit k: column c + k of row m is kept; c % 8 == 0. All lanes of a warp call it together; lane % 4 == c / 8 % 4.
  __device__ __forceinline__ uint32_t kept(int64_t m, int64_t c) const {
    if (mask_.seed == nullptr) return mask_.zero ? 0u : 0xFFu;
    return mask_.pieces == 1 && mask_.col0 % 32 == 0 ? together(m, c) : one_by_one(m, c);
  }

 private:
  DeviceMask mask_;

  struct Place {
    uint32_t plane, row;
  };

  __device__ __forceinline__ Place place(int64_t row) const {
    uint64_t plane = 0;
    if (row >= mask_.rows)  // 64-bit division is slow
      plane = uint64_t(row | mask_.rows) >> 32 ? uint64_t(row) / uint64_t(mask_.rows) : uint32_t(row) / uint32_t(mask_.rows);
    return {uint32_t(mask_.plane0 + int64_t(plane)), uint32_t(mask_.row0 + row - int64_t(plane) * mask_.rows)};
  }

  __device__ __forceinline__ uint32_t together(int64_t m, int64_t c) const {
    const Place at = place(m);
    const int lane = int(threadIdx.x) % 4;
    uint32_t w[4] = {mask_call(uint64_t(mask_.col0 + c) / 32 * 32) + uint32_t(lane), at.row, at.plane, mask_.stream};
    philox4x32_7(w, mask_.key0, mask_.key1);
    transpose_quad(w, lane);  // word i is now call i's word for the columns of this lane
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      bits |= uint32_t((w[i] & 0xFFFFu) >= mask_.threshold) << (2 * i);
      bits |= uint32_t((w[i] >> 16) >= mask_.threshold) << (2 * i + 1);
    }
    return bits;
  }

  // Where the eight columns are not a block of the mask: eight calls, in a loop that is left rolled.
  __device__ __forceinline__ uint32_t one_by_one(int64_t m, int64_t c) const {
    uint32_t bits = 0;
#pragma unroll 1
    for (int k = 0; k < 8; ++k) {
      const int64_t piece = mask_.pieces == 1 ? 0 : (c + k) / mask_.columns;
      const Place at = place(m * mask_.pieces + piece);
      bits |= uint32_t(mask_keeps(mask_, at.plane, at.row, uint64_t(mask_.col0 + c + k - piece * mask_.columns))) << k;
    }
    return bits;
  }
};

__device__ __forceinline__ bool is_kept(uint32_t bits, int k) { return bits >> k & 1u; }
#endif

}  // namespace ckpt
