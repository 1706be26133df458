// The mask contract: which Philox bits decide an element, and what a kept element is multiplied by.
//   counter  (4 * (col / 32) + (col % 8) / 2, row, plane, stream)
//   draw     16 bits: word (col % 32) / 8, half col % 2
//   keep     draw >= threshold
// Fixed: a change here changes every run. Twins: ckpt_ops/reference.py, triton_kernels/_math.py.
#pragma once
#include "philox.h"
#include <cmath>

namespace ckpt {

// Everything about a mask but the element's place in its tensor.
struct Mask {
  uint32_t key0 = 0, key1 = 0, stream = 0, threshold = 0;
  int64_t plane0 = 0, row0 = 0, col0 = 0;
  double scale = 1;
};

// The share of 65536 that is dropped. nearbyint rounds half to even, as the contract asks.
inline uint32_t mask_threshold(double p) {
  double t = std::nearbyint(p * 65536);
  return uint32_t(t < 1 ? 1 : t > 65535 ? 65535 : t);
}

// 1 / P(keep), of the probability really used, so that E[mask * scale] is 1.
inline double mask_scale(uint32_t threshold) { return 65536.0 / (65536.0 - threshold); }

CKPT_HD uint32_t mask_call(uint64_t col) { return uint32_t(4 * (col / 32) + (col % 8) / 2); }

// One element by itself: a call for one of its eight draws.
CKPT_HD bool mask_keeps(const Mask& m, uint32_t plane, uint32_t row, uint64_t col) {
  uint32_t w[4] = {mask_call(col), row, plane, m.stream};
  philox4x32_7(w, m.key0, m.key1);
  const uint32_t block = uint32_t(col % 32) / 8;
  const uint32_t word = block == 0 ? w[0] : block == 1 ? w[1] : block == 2 ? w[2] : w[3];
  return (col % 2 ? word >> 16 : word & 0xFFFFu) >= m.threshold;
}

}  // namespace ckpt
