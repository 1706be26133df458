// New memory. Page faults on a large fresh tensor cost more than its arithmetic, and several times more again on a
// virtual machine that has to ask its host for the page. So large outputs come from huge pages, and a freed one waits
// for the next of its size. Meanwhile its pages are marked as free: the system takes them when it needs them.
#include "rows.h"
#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <ATen/native/TensorFactories.h>
#include <c10/core/CPUAllocator.h>
#include <deque>
#include <mutex>
#include <sys/mman.h>

// The sanitizer watches the borders of what malloc gives.
#if defined(MADV_HUGEPAGE) && defined(MADV_FREE) && !defined(__SANITIZE_ADDRESS__)
#define CKPT_POOL
#endif

namespace ckpt {
#ifdef CKPT_POOL
namespace {

constexpr size_t LARGE = size_t(4) << 20;  // bytes of a tensor that is worth it
constexpr size_t MOST = size_t(256) << 20;  // bytes that wait, at most
constexpr uintptr_t PAGE = 4096, HUGE = uintptr_t(2) << 20;

struct Block {
  void* data;
  size_t bytes;
};

class Pool final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    bytes = (bytes + PAGE - 1) / PAGE * PAGE;
    auto* block = new Block{take(bytes), bytes};
    if (!block->data) block->data = map(bytes);
    c10::profiledCPUMemoryReporter().New(block->data, bytes);
    return {block->data, block, &release, at::kCPU};
  }

  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }

 private:
  std::mutex mutex_;
  std::deque<Block> waiting_;  // the longest first
  size_t waits_ = 0;           // bytes

  // A waiting block of this size, the one freed last: it is the likeliest to be in a cache.
  void* take(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = std::find_if(waiting_.rbegin(), waiting_.rend(), [&](const Block& b) { return b.bytes == bytes; });
    if (found == waiting_.rend()) return nullptr;
    void* data = found->data;
    waiting_.erase(std::next(found).base());
    waits_ -= bytes;
    return data;
  }

  // Address space that starts where a huge page does.
  static void* map(size_t bytes) {
    void* all = mmap(nullptr, bytes + HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK_WITH(OutOfMemoryError, all != MAP_FAILED, "ckpt_ops: no memory for ", bytes, " bytes");
    auto begin = reinterpret_cast<uintptr_t>(all), data = (begin + HUGE - 1) / HUGE * HUGE;
    if (data != begin) munmap(all, data - begin);
    if (begin + HUGE != data) munmap(reinterpret_cast<void*>(data + bytes), begin + HUGE - data);
    madvise(reinterpret_cast<void*>(data), bytes, MADV_HUGEPAGE);
    return reinterpret_cast<void*>(data);
  }

  static void release(void* context);

  void put(Block block) {
    if (block.bytes > MOST) {
      munmap(block.data, block.bytes);
      return;
    }
    madvise(block.data, block.bytes, MADV_FREE);
    std::lock_guard<std::mutex> lock(mutex_);
    waiting_.push_back(block);
    waits_ += block.bytes;
    for (; waits_ > MOST; waiting_.pop_front()) {
      munmap(waiting_.front().data, waiting_.front().bytes);
      waits_ -= waiting_.front().bytes;
    }
  }
};

Pool& pool() {
  static Pool* pool = new Pool;  // never destroyed: tensors may outlive every static object
  return *pool;
}

void Pool::release(void* context) {
  auto* block = static_cast<Block*>(context);
  c10::profiledCPUMemoryReporter().Delete(block->data);
  pool().put(*block);
  delete block;
}

}  // namespace

at::Tensor fresh(at::IntArrayRef sizes, const at::TensorOptions& options) {
  at::ScalarType dtype = at::typeMetaToScalarType(options.dtype());
  size_t bytes = c10::elementSize(dtype) * c10::multiply_integers(sizes);
  c10::Allocator* from = bytes < LARGE ? c10::GetCPUAllocator() : &pool();
  at::Tensor t = at::detail::empty_generic(sizes, from, c10::DispatchKeySet(c10::DispatchKey::CPU), dtype, std::nullopt);
  const at::Context& context = at::globalContext();
  if (context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory()) at::native::fill_empty_deterministic_(t);
  return t;
}

#else

at::Tensor fresh(at::IntArrayRef sizes, const at::TensorOptions& options) { return at::empty(sizes, options); }

#endif
}  // namespace ckpt
