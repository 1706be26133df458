// Elements in memory and in registers: storage types, their compute types, and packs of eight.
#pragma once
#include "platform.h"

namespace ckpt {

using half_t = __half;
using bfloat_t = __nv_bfloat16;

// What a storage type is computed in: float for 16 bits, itself otherwise.
template <typename T> struct Compute { using type = float; };
template <> struct Compute<double> { using type = double; };
template <typename T> using compute_t = typename Compute<T>::type;

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ float widen(half_t x) { return __half2float(x); }
__device__ __forceinline__ float widen(bfloat_t x) { return __bfloat162float(x); }

// Eight columns: what one thread handles at a time, since eight columns are a block of the mask (draws.h).
constexpr int kPack = 8;

template <typename T>
struct alignas(16) Pack {
  T v[kPack];
};

// The pack at p, of a row with n more elements; n may be <= 0. wide: p is a multiple of 16 bytes.
template <typename T>
__device__ __forceinline__ Pack<T> load_pack(const T* p, int64_t n, bool wide) {
  constexpr int step = 16 / int(sizeof(T));
  Pack<T> pack;
  if (wide && n >= kPack) {
#pragma unroll
    for (int k = 0; k < kPack; k += step) load16(p + k, pack.v + k);
  } else {
#pragma unroll
    for (int k = 0; k < kPack; ++k) pack.v[k] = k < n ? p[k] : T(0.f);
  }
  return pack;
}

template <typename T>
__device__ __forceinline__ void store_pack(T* p, const Pack<T>& pack, int64_t n, bool wide) {
  constexpr int step = 16 / int(sizeof(T));
  if (wide && n >= kPack) {
#pragma unroll
    for (int k = 0; k < kPack; k += step) store16(p + k, pack.v + k);
  } else {
#pragma unroll
    for (int k = 0; k < kPack; ++k)
      if (k < n) p[k] = pack.v[k];
  }
}

template <typename T>
__device__ __forceinline__ void widen_pack(const Pack<T>& pack, compute_t<T> (&values)[kPack]) {
#pragma unroll
  for (int k = 0; k < kPack; ++k) values[k] = widen(pack.v[k]);
}

// A bfloat16 is the upper half of a float: two come out of a word, which stays one register.
__device__ __forceinline__ void widen_pack(const Pack<bfloat_t>& pack, float (&values)[kPack]) {
  uint32_t words[kPack / 2];
  memcpy(words, &pack, sizeof words);
#pragma unroll
  for (int k = 0; k < kPack; ++k) {
    const uint32_t bits = k % 2 ? words[k / 2] & 0xFFFF0000u : words[k / 2] << 16;
    memcpy(&values[k], &bits, sizeof bits);
  }
}

__device__ __forceinline__ void narrow_two(float a, float b, __half2& to) { to = __floats2half2_rn(a, b); }
__device__ __forceinline__ void narrow_two(float a, float b, __nv_bfloat162& to) { to = __floats2bfloat162_rn(a, b); }

template <typename T> struct TwoOf { using type = void; };
template <> struct TwoOf<half_t> { using type = __half2; };
template <> struct TwoOf<bfloat_t> { using type = __nv_bfloat162; };

template <typename T>
__device__ __forceinline__ Pack<T> narrow_pack(const compute_t<T> (&values)[kPack]) {
  Pack<T> pack;
  if constexpr (sizeof(T) == 2) {  // one instruction rounds two
    typename TwoOf<T>::type two[kPack / 2];
#pragma unroll
    for (int k = 0; k < kPack; k += 2) narrow_two(values[k], values[k + 1], two[k / 2]);
    memcpy(static_cast<void*>(&pack), two, sizeof pack);
  } else {
#pragma unroll
    for (int k = 0; k < kPack; ++k) pack.v[k] = values[k];
  }
  return pack;
}

// Nothing made of a 16-bit pack is carried over this point: the compiler would hold eight floats where 16 bytes do.
template <typename T>
__device__ __forceinline__ void stay_packed(Pack<T>& pack) {
  if constexpr (sizeof(Pack<T>) == 16) {
    uint32_t w[4];
    memcpy(w, &pack, sizeof w);
    asm volatile("" : "+r"(w[0]), "+r"(w[1]), "+r"(w[2]), "+r"(w[3]));
    memcpy(static_cast<void*>(&pack), w, sizeof w);
  }
}

// A tensor's rows: unit stride within a row.
template <typename T>
struct Rows {
  T* data;
  int64_t stride;
  __device__ __forceinline__ T* at(int64_t row, int64_t col) const { return data + row * stride + col; }
};

// A parameter of the columns, in the storage type or in the compute type; data is null where there is none.
template <typename T>
struct Columns {
  const void* data;
  bool computed;  // in the compute type

  // The value at column c, where there are any.
  __device__ __forceinline__ compute_t<T> at(int64_t c) const {
    return computed ? static_cast<const compute_t<T>*>(data)[c] : widen(static_cast<const T*>(data)[c]);
  }

  // Values at columns [c, c + 8), n of them there; `absent` and 0 stand for what is not there.
  __device__ __forceinline__ void load(int64_t c, int64_t n, bool wide, compute_t<T> absent, compute_t<T> (&values)[kPack]) const {
    using A = compute_t<T>;
    if (data == nullptr) {
#pragma unroll
      for (int k = 0; k < kPack; ++k) values[k] = absent;
    } else if (computed) {
      widen_pack(load_pack(static_cast<const A*>(data) + c, n, wide), values);
    } else {
      widen_pack(load_pack(static_cast<const T*>(data) + c, n, wide), values);
    }
  }
};

}  // namespace ckpt
