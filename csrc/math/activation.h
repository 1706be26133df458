// Activations as pairs f, df. T is float or double (CUDA, one element) or a vector of them (CPU, eight).
// What T must have: + - * /, exp_of(T), normal_cdf(T), normal_pdf(T), positive(T).  Twin: triton_kernels/_math.py.
#pragma once
#include "host_device.h"

namespace ckpt {

template <typename T> struct ScalarOf { using type = decltype(T{}[0] + T{}[0]); };
template <> struct ScalarOf<float> { using type = float; };
template <> struct ScalarOf<double> { using type = double; };
template <typename T> using scalar_of = typename ScalarOf<T>::type;

template <typename T> CKPT_HD T sigmoid(T x) { return scalar_of<T>(1) / (scalar_of<T>(1) + exp_of(-x)); }

// GELU(x) = x * Phi(x).  Hendrycks & Gimpel, arXiv:1606.08415.
struct Gelu {
  template <typename T> static CKPT_HD T f(T x) { return x * normal_cdf(x); }
  template <typename T> static CKPT_HD T df(T x) { return normal_cdf(x) + x * normal_pdf(x); }
};

// Its tanh form: x/2 * (1 + tanh(u)) = x * sigmoid(2u), u = sqrt(2/pi) * (x + 0.044715 x^3).  Same source.
struct GeluTanh {
  template <typename T> static CKPT_HD T twice_u(T x) {
    using S = scalar_of<T>;
    return x * (S(1.5957691216057308) + S(0.07135481627260025) * x * x);
  }
  template <typename T> static CKPT_HD T f(T x) { return x * sigmoid(twice_u(x)); }
  template <typename T> static CKPT_HD T df(T x) {
    using S = scalar_of<T>;
    T s = sigmoid(twice_u(x));
    T slope = S(1.5957691216057308) + S(0.21406444881780076) * x * x;  // d(2u)/dx
    return s + s * (S(1) - s) * (x * slope);
  }
};

struct Relu {
  template <typename T> static CKPT_HD T f(T x) { return positive(x); }
  template <typename T> static CKPT_HD T df(T x) { return step(x); }
};

// SiLU(x) = x * sigmoid(x).  Elfwing, Uchibe, Doya, arXiv:1702.03118.
struct Silu {
  template <typename T> static CKPT_HD T f(T x) { return x * sigmoid(x); }
  template <typename T> static CKPT_HD T df(T x) {
    using S = scalar_of<T>;
    T s = sigmoid(x);
    return s * (S(1) + x * (S(1) - s));
  }
};

// Squared ReLU.  So et al., "Primer", arXiv:2109.08668.
struct Relu2 {
  template <typename T> static CKPT_HD T f(T x) { return positive(x) * positive(x); }
  template <typename T> static CKPT_HD T df(T x) { return scalar_of<T>(2) * positive(x); }
};

}  // namespace ckpt
