// The mask's draws for a stretch of one row, and how kernels apply them.
#pragma once
#include "vec.h"
// The math comes second: templates find the vector overloads only among what is declared before them.
#include "../math/mask.h"

namespace ckpt {

constexpr int64_t kStretch = 256;                   // columns drawn at a time: the draws stay in L1
constexpr int64_t kDrawBuffer = kStretch + 32 + 64; // a start within a group, an end within a pair of groups

// 16-bit draws of columns [col, col + n), n <= kStretch, of mask row (plane, row). Returns where the first one lies.
// Word w of the calls of a 32-column group, stored in order, is the group's columns 8w .. 8w + 7.
inline const uint16_t* draw_row(const Mask& m, uint32_t plane, uint32_t row, uint64_t col, int64_t n, uint16_t* buffer) {
  const uint64_t first = col / 32 * 32;
  const U8 calls = {0, 1, 2, 3, 4, 5, 6, 7};
  uint16_t* out = buffer;
  for (uint64_t c = first; c < col + uint64_t(n); c += 64, out += 64) {
    U8 w[4] = {calls + mask_call(c), U8{} + row, U8{} + plane, U8{} + m.stream};
    philox4x32_7(w, m.key0, m.key1);
    for (int i = 0; i < 4; ++i) {
      std::memcpy(out + 8 * i, &w[i], 16);
      std::memcpy(out + 32 + 8 * i, reinterpret_cast<const char*>(&w[i]) + 16, 16);
    }
  }
  return buffer + (col - first);
}

}  // namespace ckpt
