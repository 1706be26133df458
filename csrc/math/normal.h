// The normal distribution in float32, for one number or eight at once.  Twin: triton_kernels/_math.py.
#pragma once
#include "host_device.h"

namespace ckpt {

// Phi(x) = 1/2 + x P(x^2) / Q(x^2) for |x| < 5.65; outside, 1 - Phi(|x|) < 1e-8. P and Q: a minimax fit of erf(x / sqrt 2) / 2
// with error 1.2e-8. All coefficients are positive, so nothing cancels.
template <typename T> CKPT_HD T normal_cdf_fit(T x) {
  const T u = x * x, u2 = u * u, u4 = u2 * u2;
  const T p = (u * 0.0349411610599356f + 0.39894220586721124f) + u2 * (u * 0.0001793941234016932f + 0.004740829529080862f) +
              u4 * (u * 2.1580294743288474e-8f + 6.37419046151421e-6f);
  const T q = (u * 0.2542499711757732f + 1.f) + u2 * (u * 0.0019445540594104453f + 0.029260690812638927f) +
              u4 * (u * 1.1649627623059937e-6f + 7.676796937126462e-5f);
  return x * p / q + 0.5f;
}

}  // namespace ckpt
