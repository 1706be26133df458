// Mean and sum of squared deviations, merged pairwise: no difference of large sums, so no negative variance.
// Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979.
#pragma once
#include "philox.h"

namespace ckpt {

template <typename A>
struct Moments {
  A count = 0, mean = 0, m2 = 0;
};

template <typename A>
CKPT_HD Moments<A> merge(const Moments<A>& a, const Moments<A>& b) {
  Moments<A> r;
  r.count = a.count + b.count;
  if (r.count == A(0)) return r;
  A delta = b.mean - a.mean, share = b.count / r.count;
  r.mean = a.mean + delta * share;
  r.m2 = a.m2 + b.m2 + delta * delta * a.count * share;
  return r;
}

}  // namespace ckpt
