// Data races of the kernels. They are compiled with -fsanitize=thread, which puts a call before every access, and the
// functions below answer it. Two accesses by different threads race, whatever the order was, when no barrier lies between
// them; blocks have none between each other.
#include "fibres.h"

#include <cstdio>
#include <unordered_map>

namespace cuda_host {
namespace {

struct Access {
  unsigned block = 0, epoch = 0;
  int thread = -1;              // -1: none yet
  bool several = false;         // reads: other threads of the block have read in this epoch too
  bool blocks = false;          // reads: another block has read too
  const void* place = nullptr;  // in the code
};

struct Byte {
  uint64_t launch = 0;
  unsigned block = 0;
  Access write, read;
};

constexpr uintptr_t kPage = 4096;

Byte& byte_at(uintptr_t address) {
  static std::unordered_map<uintptr_t, std::vector<Byte>> pages;
  static uintptr_t last = 0;
  static Byte* bytes = nullptr;
  if (address / kPage != last || !bytes) {
    auto& page = pages[address / kPage];
    if (page.empty()) page.resize(kPage);
    last = address / kPage, bytes = page.data();
  }
  return bytes[address % kPage];
}

bool within(const char* p, const void* begin, size_t bytes) {
  return p >= static_cast<const char*>(begin) && p < static_cast<const char*>(begin) + bytes;
}

// `before` happened before what `thread` does now, by a barrier or as its own.
bool ordered(const Access& before, int thread) {
  if (before.thread < 0) return true;
  if (before.block != unsigned(machine.block) || before.blocks) return false;
  return before.epoch < machine.epoch || (before.thread == thread && !before.several);
}

void race(const void* p, bool shared, bool write, const void* place, const Access& other, bool other_wrote) {
  char text[300];
  snprintf(text, sizeof text, "race on %s memory at %p: a %s at %p; thread %d of block %u %s it at %p, no barrier between",
           shared ? "shared" : "global", p, write ? "write" : "read", place, other.thread, other.block, other_wrote ? "wrote" : "read",
           other.place);
  fail(0, text);
}

void access(const void* p, size_t bytes, bool write, const void* place) {
  const char* first = static_cast<const char*>(p);
  if (!machine.current || within(first, machine.stacks, kMaxThreads * (kStack + kGuard)) || within(first, &machine, sizeof machine)) return;
  const bool shared = within(first, machine.shared, machine.shared_bytes);
  const int thread = int(machine.current - machine.threads);
  for (size_t i = 0; i < bytes; ++i) {
    Byte& b = byte_at(reinterpret_cast<uintptr_t>(first) + i);
    const bool stale = b.launch != machine.launch || (shared && b.block != unsigned(machine.block));
    if (stale) b = Byte{machine.launch, unsigned(machine.block), {}, {}};
    if (!ordered(b.write, thread)) race(p, shared, write, place, b.write, true);
    if (write && !ordered(b.read, thread)) race(p, shared, write, place, b.read, false);
    if (shared && !write && b.write.thread < 0) fail(0, "read of shared memory that no thread of the block has written");
    const Access now{unsigned(machine.block), machine.epoch, thread, false, false, place};
    if (write) {
      b.write = now, b.read = Access{};
      continue;
    }
    const Access before = b.read;
    b.read = now;
    if (before.thread < 0) continue;
    b.read.blocks = before.blocks || before.block != now.block;
    const bool same_epoch = before.block == now.block && before.epoch == now.epoch;
    b.read.several = same_epoch && (before.several || before.thread != thread);
  }
}

}  // namespace

void race_access(const void* p, size_t bytes, bool write) { access(p, bytes, write, __builtin_return_address(0)); }

}  // namespace cuda_host

#define CKPT_ACCESS(p, n, write) cuda_host::access(p, size_t(n), write, __builtin_return_address(0))
#define CKPT_SIZE(n)                                                              \
  void __tsan_read##n(void* p) { CKPT_ACCESS(p, n, false); }                      \
  void __tsan_write##n(void* p) { CKPT_ACCESS(p, n, true); }                      \
  void __tsan_unaligned_read##n(void* p) { CKPT_ACCESS(p, n, false); }            \
  void __tsan_unaligned_write##n(void* p) { CKPT_ACCESS(p, n, true); }

extern "C" {
CKPT_SIZE(1)
CKPT_SIZE(2)
CKPT_SIZE(4)
CKPT_SIZE(8)
CKPT_SIZE(16)
void __tsan_read_range(void* p, size_t n) { CKPT_ACCESS(p, n, false); }
void __tsan_write_range(void* p, size_t n) { CKPT_ACCESS(p, n, true); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}
