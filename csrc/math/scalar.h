// What activation.h asks of a number, for one float or double: CUDA threads. Twins for eight lanes: csrc/cpu/vec.h.
#pragma once
#include "normal.h"
#include <cmath>

namespace ckpt {

CKPT_HD float exp_of(float x) { return expf(x); }
CKPT_HD double exp_of(double x) { return exp(x); }

// max(x, 0) that lets NaN through.
CKPT_HD float positive(float x) { return x <= 0.f ? 0.f : x; }
CKPT_HD double positive(double x) { return x <= 0.0 ? 0.0 : x; }
CKPT_HD float step(float x) { return x > 0.f ? 1.f : 0.f; }
CKPT_HD double step(double x) { return x > 0.0 ? 1.0 : 0.0; }

CKPT_HD float normal_pdf(float x) { return exp_of(x * x * -0.5f) * 0.3989422804f; }
CKPT_HD double normal_pdf(double x) { return exp_of(x * x * -0.5) * 0.3989422804014327; }

CKPT_HD float normal_cdf(float x) { return x < -5.65f ? 0.f : x > 5.65f ? 1.f : normal_cdf_fit(x); }
CKPT_HD double normal_cdf(double x) { return 0.5 * erfc(-0.7071067811865476 * x); }

// a * b + c, rounded once.
CKPT_HD float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
CKPT_HD double multiply_add(double a, double b, double c) { return fma(a, b, c); }

// 1 / x for an ordinary x. CUDA's own division is a call, for the sake of the smallest and largest numbers.
CKPT_HD float inverse(float x) {
#ifdef __CUDA_ARCH__
  const float r = __fdividef(1.f, x);
  return fmaf(fmaf(-x, r, 1.f), r, r);
#else
  return 1.f / x;
#endif
}
CKPT_HD double inverse(double x) { return 1.0 / x; }

// 1 / sqrt(sum / n + eps), rounded once: a norm's backward over few columns takes the difference of nearly equal numbers.
// What the division, the addition and the root lost is added back by a Newton step, where that is finite.
CKPT_HD float inverse_root_mean(float sum, int64_t n, float eps) {
  const float count = float(n), q = sum / count, v = q + eps, added = v - q;
  const float lost = fmaf(-q, count, sum) / count + (q - (v - added)) + (eps - added);
  const float r = 1.f / sqrtf(v), t = v * r;
  const float miss = fmaf(-t, r, 1.f) - fmaf(v, r, -t) * r - lost * r * r;
  return fabsf(miss) < 1.f ? r + 0.5f * r * miss : r;
}
CKPT_HD double inverse_root_mean(double sum, int64_t n, double eps) { return 1.0 / sqrt(sum / double(n) + eps); }

}  // namespace ckpt
