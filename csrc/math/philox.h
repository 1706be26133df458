// Philox4x32-7.  Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
// U is uint32_t (CUDA, tests) or a vector of them (one call a lane). Twin: triton_kernels/_math.py.
#pragma once
#include "host_device.h"
#include <cstdint>

namespace ckpt {

CKPT_HD uint32_t mulhi(uint32_t a, uint32_t b) { return uint32_t((uint64_t(a) * b) >> 32); }

// 7 rounds: the least that passes BigCrush (table 2 of the paper).
template <typename U>
CKPT_HD void philox4x32_7(U (&c)[4], uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 7; ++round) {
    U low0 = c[0] * 0xD2511F53u, high0 = mulhi(c[0], 0xD2511F53u);
    U low1 = c[2] * 0xCD9E8D57u, high1 = mulhi(c[2], 0xCD9E8D57u);
    c[0] = high1 ^ c[1] ^ key0;
    c[1] = low1;
    c[2] = high0 ^ c[3] ^ key1;
    c[3] = low0;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
}

}  // namespace ckpt
