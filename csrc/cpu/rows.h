// Tensors as rows, work as stretches of rows over all threads. Nothing here depends on the number of threads.
#pragma once
#include "draws.h"
#include "../common/check.h"
#include "../common/shapes.h"
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <algorithm>
#include <vector>

#define CKPT_DISPATCH(x, name, ...) \
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, (x).scalar_type(), name, [&] { __VA_ARGS__ })

namespace ckpt {

// at::empty, with memory of our own for a large one.
at::Tensor fresh(at::IntArrayRef sizes, const at::TensorOptions& options);

inline at::Tensor fresh_like(const at::Tensor& x) {
  return fresh(x.sizes(), at::TensorOptions().dtype(x.scalar_type()).device(x.device()));
}

// A tensor as M rows of N elements: unit stride within a row, one stride between rows; a copy where that needs one.
template <typename T>
struct Rows {
  at::Tensor owner;
  const T* data;
  int64_t stride;
  const T* operator[](int64_t row) const { return data + row * stride; }
};

template <typename T>
Rows<T> rows_of(const at::Tensor& x, int64_t inner = 1) {
  int64_t stride = 1;
  at::Tensor owner = rows_in_place(x, inner, &stride) ? x : x.contiguous();
  if (!owner.is_same(x)) rows_in_place(owner, inner, &stride);
  return {owner, owner.const_data_ptr<T>(), stride};
}

// The mask of a call on a tensor of these sizes: its constants, and the two dimensions that a row index falls into.
struct RowMask : Mask {
  int64_t rows = 1;  // rows a plane
  bool draws = false, zero = false;

  RowMask(const OptionalTensor& seed, double p, int64_t stream_, at::IntArrayRef origin, at::IntArrayRef sizes) {
    rows = sizes.size() > 1 ? sizes[sizes.size() - 2] : 1;
    zero = p == 1;
    draws = p > 0 && p < 1;
    if (!draws) return;
    uint64_t s = uint64_t(*seed->const_data_ptr<int64_t>());
    key0 = uint32_t(s), key1 = uint32_t(s >> 32), stream = uint32_t(stream_);
    threshold = mask_threshold(p), scale = mask_scale(threshold);
    plane0 = origin[0], row0 = origin[1], col0 = origin[2];
  }

  // Draws of columns [col, col + n) of flat row m.
  const uint16_t* draw(int64_t m, int64_t col, int64_t n, uint16_t* buffer) const {
    return draw_row(*this, uint32_t(plane0 + m / rows), uint32_t(row0 + m % rows), uint64_t(col0 + col), n, buffer);
  }
};

// step(c, n, keep) for columns [c, c + n) of row m, n <= 8, over [c0, c1); keep is all ones where nothing is drawn.
template <typename F>
inline void masked_steps(const RowMask& mask, int64_t m, int64_t c0, int64_t c1, const F& step) {
  uint16_t buffer[kDrawBuffer];
  const I8 threshold = I8{} + int32_t(mask.threshold), all = ~I8{};
  for (int64_t s = c0; s < c1; s += kStretch) {
    const int64_t n = std::min(kStretch, c1 - s);
    const uint16_t* d = mask.draws ? mask.draw(m, s, n, buffer) : nullptr;
    if (d) for_each_step(0, n, [&](int64_t c, auto k) { step(s + c, k, at_least(d + c, threshold)); });
    else for_each_step(0, n, [&](int64_t c, auto k) { step(s + c, k, all); });
  }
}

// body(m, c0, c1) for every row m and every piece [c0, c1) of its columns.
template <typename F>
void for_each_piece(int64_t M, int64_t C, const F& body) {
  constexpr int64_t piece = 8 * kStretch, grain = 32768;  // elements
  if (M == 0 || C == 0) return;
  int64_t pieces = (C + piece - 1) / piece;
  at::parallel_for(0, M * pieces, std::max<int64_t>(1, grain / std::min(C, piece)), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      int64_t c0 = i % pieces * piece;
      body(i / pieces, c0, std::min(C, c0 + piece));
    }
  });
}

// Sums over rows are a tree of arity 32 that depends on the shape alone: blocks of 32 rows, then blocks of blocks. Short
// sums keep rounding small, and a partial sum a block costs 1/32 of the input.
constexpr int64_t kArity = 32;

struct RowBlocks {
  int64_t M, rows = kArity, count;
  explicit RowBlocks(int64_t M_) : M(M_), count((M_ + kArity - 1) / kArity) {}

  // body(block, m0, m1)
  template <typename F>
  void for_each(const F& body) const {
    at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) body(b, b * rows, std::min(M, (b + 1) * rows));
    });
  }
};

// Column sums: one partial row a block, or nothing where they are not wanted.
template <typename A>
struct ColumnSums {
  bool wanted;
  int64_t width, blocks;
  std::vector<A> partial;
  ColumnSums(bool wanted_, int64_t blocks_, int64_t width_)
      : wanted(wanted_), width(width_), blocks(blocks_), partial(wanted_ ? size_t(width_ * blocks_) : 0, A(0)) {}
  A* of(int64_t block) { return wanted ? partial.data() + block * width : nullptr; }

  // Consumes the partial sums.
  at::Tensor total(at::IntArrayRef sizes, const at::TensorOptions& options) {
    if (!wanted) return fresh({0}, options);
    at::Tensor sum = fresh(sizes, options).zero_();
    if (blocks == 0) return sum;
    at::parallel_for(0, width, 256, [&](int64_t begin, int64_t end) {
      for (int64_t count = blocks; count > 1; count = (count + kArity - 1) / kArity)
        for (int64_t b = 0; b < count; ++b) add(b / kArity, b, b % kArity == 0, begin, end);
      std::copy(partial.begin() + begin, partial.begin() + end, sum.data_ptr<A>() + begin);
    });
    return sum;
  }

 private:
  void add(int64_t to, int64_t from, bool first, int64_t begin, int64_t end) {
    A *t = partial.data() + to * width, *f = partial.data() + from * width;
    for (int64_t c = begin; c < end; ++c) t[c] = first ? f[c] : t[c] + f[c];
  }
};

// A parameter as the type that kernels compute in; an empty vector where there is none.
template <typename A>
std::vector<A> widened(const OptionalTensor& t, double offset = 0) {
  if (!given(t)) return {};
  at::Tensor wide = t->to(c10::CppTypeToScalarType<A>::value).contiguous();
  std::vector<A> v(wide.const_data_ptr<A>(), wide.const_data_ptr<A>() + wide.numel());
  if (offset != 0)
    for (A& e : v) e += A(offset);
  return v;
}

}  // namespace ckpt
