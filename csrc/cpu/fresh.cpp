// New memory.
#include "rows.h"
#include <ATen/ops/empty.h>
#include <sys/mman.h>

namespace ckpt {

// Page faults on a large fresh tensor cost more than its arithmetic: ask for huge pages before the first write.
at::Tensor fresh(at::IntArrayRef sizes, const at::TensorOptions& options) {
  at::Tensor t = at::empty(sizes, options);
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t page = 4096;
  if (t.nbytes() >= (size_t(4) << 20)) {
    uintptr_t begin = (reinterpret_cast<uintptr_t>(t.data_ptr()) + page - 1) & ~(page - 1);
    uintptr_t end = (reinterpret_cast<uintptr_t>(t.data_ptr()) + t.nbytes()) & ~(page - 1);
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
  }
#endif
  return t;
}

}  // namespace ckpt
