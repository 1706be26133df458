// attention_fwd, attention_bwd (FlashAttention-2's recurrences, arXiv:2307.08691). Every output element is summed in an
// order that the shape fixes, so the bits do not depend on the number of threads.
#include "attention_tile.h"
#include <torch/library.h>

namespace ckpt {
namespace {

constexpr int64_t kQueries = 64, kKeys = 512;          // forward tile
constexpr int64_t kQueriesBackward = 64, kKeysBackward = 256;

// body(item) for items in parallel. At least two, so that even a single one runs inside a parallel region, where torch's
// matrix products keep to one thread and to one order of summation.
template <typename F>
void for_each_item(int64_t items, const F& body) {
  at::parallel_for(0, std::max<int64_t>(items, 2), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < std::min(end, items); ++i) body(i);
  });
}

// Tile `t` of `count`, so that a stretch of t has long and short causal rows alike.
int64_t balanced(int64_t t, int64_t count) { return t % 2 ? count - 1 - t / 2 : t / 2; }

// [B, H, N, D], laid out as [B, N, H, D]: what a projection writes and reads.
at::Tensor heads_inside(int64_t B, int64_t H, int64_t N, int64_t D, const at::TensorOptions& options) {
  return fresh({B, N, H, D}, options).transpose(1, 2);
}

int64_t tiles(int64_t n, int64_t size) { return (n + size - 1) / size; }

// The running softmax of a tile of queries.
template <typename A>
struct Softmax {
  std::vector<A> max, sum;
  explicit Softmax(int64_t rows) : max(size_t(rows)), sum(size_t(rows)) {}
  void reset() {
    std::fill(max.begin(), max.end(), -std::numeric_limits<A>::infinity());
    std::fill(sum.begin(), sum.end(), A(0));
  }
};

// Scores of one query become (dropped) weights; the row of o so far is rescaled to the new maximum.
template <typename A>
void forward_row(const Attend& at_, Softmax<A>& softmax, int64_t b, int64_t h, int64_t i, int64_t r, int64_t j0, int64_t bk, A* s, A* o) {
  const int64_t n = at_.visible(i, j0, bk);
  at_.add_mask(s, b, h, i, j0, n);
  const A before = softmax.max[r], now = std::max(before, row_max(s, n));
  if (now == -std::numeric_limits<A>::infinity()) {  // nothing seen yet
    std::fill(s, s + bk, A(0));
    return;
  }
  const A shrink = std::exp(before - now);
  softmax.max[r] = now;
  softmax.sum[r] = softmax.sum[r] * shrink + exp_row(s, n, bk, now);
  if (shrink != 1)
    for_each_step(0, at_.Dv, [&](int64_t c, auto k) { store_some(o + c, load_some(o + c, k) * shrink, k); });
  if (!at_.mask.draws) return;
  uint16_t buffer[kDrawBuffer];
  const I8 threshold = I8{} + int32_t(at_.mask.threshold);
  for (int64_t c0 = 0; c0 < n; c0 += kStretch) {
    const int64_t width = std::min(kStretch, n - c0);
    const uint16_t* d = at_.draw(b, h, i, j0 + c0, width, buffer);
    for_each_step(0, width, [&](int64_t c, auto k) {
      store_some(s + c0 + c, keep_lanes(load_some(s + c0 + c, k), at_least(d + c, threshold)), k);
    });
  }
}

template <typename T>
void forward(const Attend& at_, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, at::Tensor& o, at::Tensor& lse) {
  using A = compute_t<T>;
  const Heads<T> Q(q), K(k), V(v);
  T* out = o.data_ptr<T>();
  A* stats = lse.data_ptr<A>();
  const int64_t count = tiles(at_.Nq, kQueries);
  for_each_item(at_.B * at_.Hq * count, [&](int64_t item) {
    const int64_t head = item / count, b = head / at_.Hq, h = head % at_.Hq, hk = h / at_.group;
    const int64_t i0 = balanced(item % count, count) * kQueries, bq = std::min(kQueries, at_.Nq - i0);
    const int64_t widest = std::min(kKeys, at_.Nk);
    std::vector<A> qs(bq * at_.D), ks(widest * at_.D), vs(widest * at_.Dv), scores(bq * widest), acc(bq * at_.Dv);
    Softmax<A> softmax(bq);
    softmax.reset();
    const at::Tensor q_tile = Q.scaled_tile(b, h, i0, bq, A(at_.scale), qs.data());
    at::Tensor o_tile = matrix(acc.data(), bq, at_.Dv, at_.Dv);
    for (int64_t j0 = 0; j0 < at_.Nk && at_.tile_visible(i0, bq, j0); j0 += kKeys) {
      // The keys that no query of the tile sees are left out of the products.
      const int64_t bk = at_.visible(i0 + bq - 1, j0, std::min(kKeys, at_.Nk - j0));
      at::Tensor s = matrix(scores.data(), bq, bk, bk);
      at::cpu::mm_out(s, q_tile, K.tile(b, hk, j0, bk, ks.data()).t());
      for (int64_t r = 0; r < bq; ++r) forward_row(at_, softmax, b, h, i0 + r, r, j0, bk, scores.data() + r * bk, acc.data() + r * at_.Dv);
      at::cpu::addmm_out(o_tile, o_tile, s, V.tile(b, hk, j0, bk, vs.data()));
    }
    for (int64_t r = 0; r < bq; ++r) {
      const int64_t row = head * at_.Nq + i0 + r;
      const bool seen = softmax.sum[r] != 0;  // a row that sees no key is 0, and its statistic finite
      const A factor = seen ? A(at_.mask.scale) / softmax.sum[r] : A(0);
      stats[row] = seen ? softmax.max[r] + std::log(softmax.sum[r]) : A(0);
      T* o_row = out + ((b * at_.Nq + i0 + r) * at_.Hq + h) * at_.Dv;
      const A* sum = acc.data() + r * at_.Dv;
      for_each_step(0, at_.Dv, [&](int64_t c, auto k) { store_some(o_row + c, load_some(sum + c, k) * factor, k); });
    }
  });
}

// The backward of one tile: from the scores and do v^T to the (dropped) weights and to dS, row by row.
template <typename T>
class Backward {
  using A = compute_t<T>;

 public:
  Backward(const Attend& at_, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& o, const at::Tensor& dout,
           const at::Tensor& lse)
      : at_(at_), Q(q), K(k), V(v), O(o), DO(dout), lse_(lse.const_data_ptr<A>()), delta_(size_t(at_.B * at_.Hq * at_.Nq)) {
    at::parallel_for(0, int64_t(delta_.size()), 512, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) delta_[row] = dot(row);
    });
  }

  // dq is a zeroed buffer in the compute type; dk and dv are outputs. All lie as [B, N, H, D].
  void run(A* dq, T* dk, T* dv) {
    const int64_t heads = at_.B * at_.Hkv, key_tiles = tiles(at_.Nk, kKeysBackward), query_tiles = tiles(at_.Nq, kQueriesBackward);
    if (heads >= at::get_num_threads()) {
      for_each_item(heads, [&](int64_t head) {
        Scratch s(at_);
        for (int64_t j = 0; j < key_tiles; ++j) keys(head, j * kKeysBackward, s, dq, dk, dv);
      });
    } else {  // too few heads for the threads: tiles in parallel, the tile's products made twice
      for_each_item(heads * key_tiles, [&](int64_t item) {
        Scratch s(at_);
        keys(item / key_tiles, balanced(item % key_tiles, key_tiles) * kKeysBackward, s, nullptr, dk, dv);
      });
      for_each_item(at_.B * at_.Hq * query_tiles, [&](int64_t item) {
        Scratch s(at_);
        queries(item / query_tiles, balanced(item % query_tiles, query_tiles) * kQueriesBackward, s, dq);
      });
    }
  }

 private:
  struct Scratch {
    std::vector<A> q, k, v, dout, scores, dp, dk, dv;
    explicit Scratch(const Attend& at_) {
      const int64_t bq = std::min(kQueriesBackward, at_.Nq), bk = std::min(kKeysBackward, at_.Nk);
      q.resize(bq * at_.D), dout.resize(bq * at_.Dv), scores.resize(bq * bk), dp.resize(bq * bk);
      k.resize(bk * at_.D), v.resize(bk * at_.Dv), dk.resize(bk * at_.D), dv.resize(bk * at_.Dv);
    }
  };

  struct Tile {
    int64_t b, h, i0, bq, j0, bk;
    at::Tensor q, k, v, dout, weights, ds;
  };

  A dot(int64_t row) const {
    const int64_t b = row / (at_.Hq * at_.Nq), h = row / at_.Nq % at_.Hq, i = row % at_.Nq;
    const T *x = O.at(b, h, i), *y = DO.at(b, h, i);
    typename LanesOf<A>::type sum = {};
    for_each_step(0, at_.Dv, [&](int64_t c, auto k) { sum += load_some(x + c, k) * load_some(y + c, k); });
    return sum_lanes(sum);
  }

  // Fills weights = m * P and ds = P * (m * dP - delta), [bq, bk].
  void compute(Tile& t, Scratch& s) const {
    t.q = Q.scaled_tile(t.b, t.h, t.i0, t.bq, A(at_.scale), s.q.data());
    t.dout = DO.tile(t.b, t.h, t.i0, t.bq, s.dout.data());
    t.weights = matrix(s.scores.data(), t.bq, t.bk, t.bk);
    t.ds = matrix(s.dp.data(), t.bq, t.bk, t.bk);
    at::cpu::mm_out(t.weights, t.q, t.k.t());
    at::cpu::mm_out(t.ds, t.dout, t.v.t());
    for (int64_t r = 0; r < t.bq; ++r) row(t, t.i0 + r, s.scores.data() + r * t.bk, s.dp.data() + r * t.bk);
  }

  void row(const Tile& t, int64_t i, A* p, A* ds) const {
    const int64_t n = at_.visible(i, t.j0, t.bk), flat = (t.b * at_.Hq + t.h) * at_.Nq + i;
    at_.add_mask(p, t.b, t.h, i, t.j0, n);
    const A lse = lse_[flat], delta = delta_[flat], scale = A(at_.mask.scale);
    uint16_t buffer[kDrawBuffer];
    const I8 threshold = I8{} + int32_t(at_.mask.threshold), all = ~I8{};
    for (int64_t c0 = 0; c0 < n; c0 += kStretch) {
      const int64_t width = std::min(kStretch, n - c0);
      const uint16_t* d = at_.mask.draws ? at_.draw(t.b, t.h, i, t.j0 + c0, width, buffer) : nullptr;
      auto step = [&](int64_t c, auto lanes, I8 keep) {
        A *pc = p + c0 + c, *dc = ds + c0 + c;
        auto weight = exp_of(load_some(pc, lanes) - lse);
        store_some(dc, weight * (keep_lanes(load_some(dc, lanes) * scale, keep) - delta), lanes);
        store_some(pc, keep_lanes(weight * scale, keep), lanes);
      };
      if (d) for_each_step(0, width, [&](int64_t c, auto k) { step(c, k, at_least(d + c, threshold)); });
      else for_each_step(0, width, [&](int64_t c, auto k) { step(c, k, all); });
    }
    std::fill(p + n, p + t.bk, A(0));
    std::fill(ds + n, ds + t.bk, A(0));
  }

  // Of a tile of keys, those that some query of the tile sees (causality hides the last ones); false if none is left.
  bool seen_keys(Tile& t, const at::Tensor& k, const at::Tensor& v, int64_t bk) const {
    t.bk = at_.visible(t.i0 + t.bq - 1, t.j0, bk);
    t.k = t.bk < bk ? k.narrow(0, 0, t.bk) : k;
    t.v = t.bk < bk ? v.narrow(0, 0, t.bk) : v;
    return t.bk > 0;
  }

  // dk and dv of one tile of keys, over all queries that see it; dq too, if given.
  void keys(int64_t head, int64_t j0, Scratch& s, A* dq, T* dk, T* dv) const {
    const int64_t b = head / at_.Hkv, hk = head % at_.Hkv, bk = std::min(kKeysBackward, at_.Nk - j0);
    const at::Tensor k_tile = K.tile(b, hk, j0, bk, s.k.data()), v_tile = V.tile(b, hk, j0, bk, s.v.data());
    Tile t{b, 0, 0, 0, j0, 0, {}, {}, {}, {}, {}, {}};
    std::fill(s.dk.begin(), s.dk.end(), A(0));
    std::fill(s.dv.begin(), s.dv.end(), A(0));
    for (t.h = hk * at_.group; t.h < (hk + 1) * at_.group; ++t.h)
      for (t.i0 = 0; t.i0 < at_.Nq; t.i0 += kQueriesBackward) {
        t.bq = std::min(kQueriesBackward, at_.Nq - t.i0);
        if (!seen_keys(t, k_tile, v_tile, bk)) continue;
        compute(t, s);
        at::Tensor dk_seen = matrix(s.dk.data(), t.bk, at_.D, at_.D), dv_seen = matrix(s.dv.data(), t.bk, at_.Dv, at_.Dv);
        at::cpu::addmm_out(dv_seen, dv_seen, t.weights.t(), t.dout);
        at::cpu::addmm_out(dk_seen, dk_seen, t.ds.t(), t.q);
        if (dq) add_dq(t, dq);
      }
    for (int64_t r = 0; r < bk; ++r) {
      const int64_t row = (b * at_.Nk + j0 + r) * at_.Hkv + hk;
      store(s.dk.data() + r * at_.D, dk + row * at_.D, at_.D);
      store(s.dv.data() + r * at_.Dv, dv + row * at_.Dv, at_.Dv);
    }
  }

  // dq of one tile of queries, over all keys it sees, in the order that `keys` adds them.
  void queries(int64_t head, int64_t i0, Scratch& s, A* dq) const {
    const int64_t b = head / at_.Hq, h = head % at_.Hq, hk = h / at_.group;
    for (int64_t j0 = 0; j0 < at_.Nk; j0 += kKeysBackward) {
      const int64_t bk = std::min(kKeysBackward, at_.Nk - j0);
      Tile t{b, h, i0, std::min(kQueriesBackward, at_.Nq - i0), j0, 0, {}, {}, {}, {}, {}, {}};
      if (!at_.tile_visible(i0, t.bq, j0)) break;
      seen_keys(t, K.tile(b, hk, j0, bk, s.k.data()), V.tile(b, hk, j0, bk, s.v.data()), bk);
      compute(t, s);
      add_dq(t, dq);
    }
  }

  void add_dq(const Tile& t, A* dq) const {
    at::Tensor tile = matrix(dq + ((t.b * at_.Nq + t.i0) * at_.Hq + t.h) * at_.D, t.bq, at_.D, at_.Hq * at_.D);
    at::cpu::addmm_out(tile, tile, t.ds, t.k);
  }

  static void store(const A* from, T* to, int64_t n) {
    for_each_step(0, n, [&](int64_t c, auto k) { store_some(to + c, load_some(from + c, k), k); });
  }

  const Attend& at_;
  Heads<T> Q, K, V, O, DO;
  const A* lse_;
  std::vector<A> delta_;  // rowsum(do * o)
};

// An expanded mask in the dtype that kernels add, without materialising what it repeats.
at::Tensor widened_mask(const at::Tensor& mask, at::ScalarType wide) {
  if (mask.scalar_type() == at::kBool || mask.scalar_type() == wide) return mask;
  at::Tensor own = mask;
  for (int64_t d = 0; d < mask.dim(); ++d)
    if (mask.stride(d) == 0 && mask.size(d) > 1) own = own.narrow(d, 0, 1);
  return own.to(wide).expand(mask.sizes());
}

Attend describe(const char* op, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& attn_mask,
                int64_t causal, double scale, const OptionalTensor& seed, double p, int64_t stream, at::IntArrayRef origin,
                int64_t heads_total) {
  TORCH_CHECK_VALUE(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, op, ": q, k, v must be [B, H, N, D]");
  TORCH_CHECK_VALUE(q.dtype() == k.dtype() && q.dtype() == v.dtype(), op, ": q, k, v must share a dtype");
  TORCH_CHECK_VALUE(k.size(0) == q.size(0) && v.size(0) == q.size(0) && k.size(1) == v.size(1) && k.size(2) == v.size(2) &&
                        k.size(3) == q.size(3) && k.size(1) > 0 && q.size(1) % k.size(1) == 0,
                    op, ": shapes do not fit: ", q.sizes(), ", ", k.sizes(), ", ", v.sizes());
  check_seed(op, seed, p, q.device());
  const int64_t sizes[] = {q.size(0), q.size(1), q.size(2), k.size(2)};
  Attend at_{q.size(0), q.size(1), k.size(1), q.size(2), k.size(2), q.size(3), v.size(3), q.size(1) / k.size(1),
             causal, scale, RowMask(seed, p, stream, origin, sizes), heads_total, {}, 0};
  if (given(attn_mask)) {
    TORCH_CHECK_VALUE(attn_mask->sizes() == at::IntArrayRef(sizes, 4), op, ": attn_mask must be [B, Hq, Nq, Nk]");
    const auto dtype = attn_mask->scalar_type();
    at_.masked_below = dtype == at::kHalf ? -65504.0 : -3.3895313892515355e38;  // finfo(float16).min, finfo(bfloat16).min
    at_.attn_mask = widened_mask(*attn_mask, q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  }
  return at_;
}

std::tuple<at::Tensor, at::Tensor> attention_fwd(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                 const OptionalTensor& attn_mask, int64_t causal, double scale, const OptionalTensor& seed,
                                                 double p, int64_t stream, at::IntArrayRef origin, int64_t heads_total) {
  const Attend at_ = describe("attention_fwd", q, k, v, attn_mask, causal, scale, seed, p, stream, origin, heads_total);
  at::Tensor o = heads_inside(at_.B, at_.Hq, at_.Nq, at_.Dv, q.options());
  at::Tensor lse = fresh({at_.B, at_.Hq, at_.Nq}, statistics_options(q));
  CKPT_DISPATCH(q, "attention_fwd", { forward<scalar_t>(at_, q, k, v, o, lse); });
  if (at_.mask.zero) o.zero_();
  return {o, lse};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_bwd(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                                                             const at::Tensor& v, const at::Tensor& o, const at::Tensor& lse,
                                                             const OptionalTensor& attn_mask, int64_t causal, double scale,
                                                             const OptionalTensor& seed, double p, int64_t stream, at::IntArrayRef origin,
                                                             int64_t heads_total) {
  const Attend at_ = describe("attention_bwd", q, k, v, attn_mask, causal, scale, seed, p, stream, origin, heads_total);
  check_like("attention_bwd", o, dout, "do");
  TORCH_CHECK_VALUE(lse.numel() == at_.B * at_.Hq * at_.Nq, "attention_bwd: lse does not fit q");
  at::Tensor dq = heads_inside(at_.B, at_.Hq, at_.Nq, at_.D, q.options());
  at::Tensor dk = heads_inside(at_.B, at_.Hkv, at_.Nk, at_.D, q.options());
  at::Tensor dv = heads_inside(at_.B, at_.Hkv, at_.Nk, at_.Dv, q.options());
  if (at_.mask.zero) return {dq.zero_(), dk.zero_(), dv.zero_()};
  CKPT_DISPATCH(q, "attention_bwd", {
    using A = compute_t<scalar_t>;
    at::Tensor sum = std::is_same_v<A, scalar_t> ? dq.zero_() : fresh({q.numel()}, statistics_options(q)).zero_();
    Backward<scalar_t>(at_, q, k, v, o, dout, lse).run(sum.data_ptr<A>(), dk.data_ptr<scalar_t>(), dv.data_ptr<scalar_t>());
    const A* from = sum.const_data_ptr<A>();
    scalar_t* to = dq.data_ptr<scalar_t>();
    for_each_piece(1, q.numel(), [&](int64_t, int64_t c0, int64_t c1) {
      for_each_step(c0, c1, [&](int64_t c, auto k) { store_some(to + c, load_some(from + c, k) * A(at_.scale), k); });
    });
  });
  return {dq, dk, dv};
}

}  // namespace
}  // namespace ckpt

TORCH_LIBRARY_IMPL(ckpt_ops, CPU, m) {
  m.impl("attention_fwd", &ckpt::attention_fwd);
  m.impl("attention_bwd", &ckpt::attention_bwd);
}
