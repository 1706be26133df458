// Eight lanes at a time, whatever the instruction set: GCC and clang vector types, so one source serves
// AVX2 (one register), SSE and NEON (two). Lanes are eight since one word of four Philox calls holds eight draws.
#pragma once
#include "../math/normal.h"
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace ckpt {

typedef float F8 __attribute__((vector_size(32)));
typedef double D8 __attribute__((vector_size(64)));
typedef int32_t I8 __attribute__((vector_size(32)));
typedef int64_t L8 __attribute__((vector_size(64)));
typedef uint32_t U8 __attribute__((vector_size(32)));
typedef uint16_t H8 __attribute__((vector_size(16)));

constexpr int kLanes = 8;

// What a storage type is computed in: float32 for 16 bits, itself otherwise.
template <typename T> struct Compute { using type = float; };
template <> struct Compute<double> { using type = double; };
template <typename T> using compute_t = typename Compute<T>::type;

template <typename A> struct LanesOf;
template <> struct LanesOf<float> { using type = F8; };
template <> struct LanesOf<double> { using type = D8; };
template <typename T> using lanes_t = typename LanesOf<compute_t<T>>::type;

inline F8 splat(float x) { return F8{} + x; }
inline D8 splat(double x) { return D8{} + x; }

// --- bits of the mask --------------------------------------------------------------------------------------

inline U8 mulhi(U8 a, uint32_t b) {
#ifdef __AVX2__
  __m256i v = (__m256i)a, m = _mm256_set1_epi32(int(b));
  __m256i even = _mm256_mul_epu32(v, m), odd = _mm256_mul_epu32(_mm256_srli_epi64(v, 32), m);
  return (U8)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
#else
  U8 high;
  for (int i = 0; i < kLanes; ++i) high[i] = uint32_t((uint64_t(a[i]) * b) >> 32);
  return high;
#endif
}

// All ones where the draw is kept.
inline I8 at_least(const uint16_t* draws, I8 threshold) {
  H8 d;
  std::memcpy(&d, draws, sizeof d);
  return __builtin_convertvector(d, I8) >= threshold;
}

inline F8 keep_lanes(F8 x, I8 keep) { return (F8)((I8)x & keep); }
inline D8 keep_lanes(D8 x, I8 keep) { return (D8)((L8)x & __builtin_convertvector(keep, L8)); }

// --- memory ------------------------------------------------------------------------------------------------

inline F8 load8(const float* p) { F8 v; std::memcpy(&v, p, sizeof v); return v; }
inline D8 load8(const double* p) { D8 v; std::memcpy(&v, p, sizeof v); return v; }

inline F8 load8(const c10::BFloat16* p) {
  H8 h;
  std::memcpy(&h, p, sizeof h);
  return (F8)(__builtin_convertvector(h, U8) << 16);
}

inline F8 load8(const c10::Half* p) {
#ifdef __F16C__
  return (F8)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  F8 v;
  for (int i = 0; i < kLanes; ++i) v[i] = float(p[i]);
  return v;
#endif
}

inline void store8(float* p, F8 v) { std::memcpy(p, &v, sizeof v); }
inline void store8(double* p, D8 v) { std::memcpy(p, &v, sizeof v); }

inline void store8(c10::BFloat16* p, F8 v) {
  U8 bits = (U8)v;
  U8 nearest_even = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  I8 is_nan = v != v;
  U8 rounded = ((U8)is_nan & 0x7fc0u) | (~(U8)is_nan & nearest_even);
  H8 h = __builtin_convertvector(rounded, H8);
  std::memcpy(p, &h, sizeof h);
}

inline void store8(c10::Half* p, F8 v) {
#ifdef __F16C__
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < kLanes; ++i) p[i] = c10::Half(v[i]);
#endif
}

// Eight lanes, known when compiling: the body of a loop. A row's tail has n < 8, zeros behind them, and the same arithmetic.
using Full = std::integral_constant<int64_t, kLanes>;

template <typename T> inline lanes_t<T> load_some(const T* p, Full) { return load8(p); }
template <typename T> inline void store_some(T* p, lanes_t<T> v, Full) { store8(p, v); }

template <typename T> inline lanes_t<T> load_some(const T* p, int64_t n) {
  T buffer[kLanes] = {};
  std::memcpy(static_cast<void*>(buffer), p, size_t(n) * sizeof(T));
  return load8(buffer);
}

template <typename T> inline void store_some(T* p, lanes_t<T> v, int64_t n) {
  T buffer[kLanes];
  store8(buffer, v);
  std::memcpy(static_cast<void*>(p), buffer, size_t(n) * sizeof(T));
}

// step(c, n) for the columns [c, c + n) of [begin, end), eight at a time.
template <typename F> inline void for_each_step(int64_t begin, int64_t end, const F& step) {
  int64_t c = begin;
  for (; c + kLanes <= end; c += kLanes) step(c, Full{});
  if (c < end) step(c, end - c);
}

// --- math --------------------------------------------------------------------------------------------------

inline float sum_lanes(F8 v) { return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7])); }
inline double sum_lanes(D8 v) { return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7])); }

// max(x, 0) that lets NaN through.
inline F8 positive(F8 x) { return (F8)((I8)x & ~(x <= 0.f)); }
inline D8 positive(D8 x) { return (D8)((L8)x & ~(x <= 0.0)); }
inline F8 step(F8 x) { return (F8)((I8)splat(1.f) & (x > 0.f)); }
inline D8 step(D8 x) { return (D8)((L8)splat(1.0) & (x > 0.0)); }

inline F8 larger(F8 a, F8 b) { return a > b ? a : b; }
inline D8 larger(D8 a, D8 b) { return a > b ? a : b; }

// e^x to about 1 ulp: x = n ln 2 + r, a Taylor polynomial in r (short chains, not Horner's long one), n added to the
// exponent. Results below 2^-126 are 0, those above 2^127.5 infinite; NaN passes through the polynomial.
inline F8 exp_of(F8 x) {
  const float magic = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer, which then sits in the low bits
  I8 under = x < -87.33654f, over = x > 88.37627f;
  F8 shifted = x * 1.44269504f + magic;
  F8 n = shifted - magic;
  F8 r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  F8 r2 = r * r;
  F8 p = (r * 1.6666667e-1f + 0.5f) + r2 * (r * 8.3333333e-3f + 4.1666667e-2f) + (r2 * r2) * (r * 1.9841270e-4f + 1.3888889e-3f);
  p = p * r2 + (r + 1.f);
  F8 power = (F8)(((I8)shifted - (I8)splat(magic) + 127) << 23);
  F8 y = (F8)((I8)(p * power) & ~under);
  return over ? splat(INFINITY) : y;
}

inline D8 exp_of(D8 x) {
  D8 y;
  for (int i = 0; i < kLanes; ++i) y[i] = std::exp(x[i]);
  return y;
}

inline F8 normal_pdf(F8 x) { return exp_of(x * x * -0.5f) * 0.3989422804f; }
inline D8 normal_pdf(D8 x) { return exp_of(x * x * -0.5) * 0.3989422804014327; }

// Phi(x), 0 or 1 outside of the fit.
inline F8 normal_cdf(F8 x) {
  F8 cdf = (F8)((I8)normal_cdf_fit(x) & ~(x < -5.65f));
  return x > 5.65f ? splat(1.f) : cdf;
}

inline D8 normal_cdf(D8 x) {
  D8 y;
  for (int i = 0; i < kLanes; ++i) y[i] = 0.5 * std::erfc(-0.7071067811865476 * x[i]);
  return y;
}

}  // namespace ckpt
