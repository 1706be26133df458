// Runs a launch: blocks in turn, the threads of each as fibres. CKPT_CUDA_HOST_ORDER: forward, reverse or random.
// A warp runs as far as it can, to its next barrier, before another one starts: most hostile to a missing barrier.
#include "fibres.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <numeric>
#include <stdexcept>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace cuda_host {

Machine machine;

namespace {

Machine& M = machine;

// --- switching ------------------------------------------------------------------------------------------------------

#if defined(__x86_64__)
// from in rdi, to in rsi: saves what the ABI asks of a callee, and goes on where `to` left.
__attribute__((naked, noinline)) void jump(void** /*from*/, void** /*to*/) {
  asm volatile(
      "push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15; mov %rsp,(%rdi); mov (%rsi),%rsp;"
      "pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp; ret");
}
#else  // a system call each: some ten times slower
void jump(void** from, void** to) {
  if (*from == nullptr) *from = new ucontext_t;  // the scheduler's
  swapcontext(static_cast<ucontext_t*>(*from), static_cast<ucontext_t*>(*to));
}
#endif

void go(void** from, Thread* to) {  // null: to the scheduler
  M.current = to;
  if (to) threadIdx = to->index;
  jump(from, to ? &to->context : &M.scheduler);
}

Thread* next_ready() {
  for (; M.warp_position < int(M.warp_order.size()); ++M.warp_position, M.lane_position = 0) {
    const int w = M.warp_order[size_t(M.warp_position)];
    for (int k = 0; M.warps[w].ready && k < kWarp; ++k) {
      const int position = (M.lane_position + k) % kWarp, lane = M.lane_order[size_t(position)];
      if (!(M.warps[w].ready >> lane & 1)) continue;
      M.lane_position = (position + 1) % kWarp;
      return &M.threads[w * kWarp + lane];
    }
  }
  return nullptr;
}

void yield() {
  Thread *me = M.current, *next = M.error.empty() ? next_ready() : nullptr;
  if (next != me) go(&me->context, next);
}

void stop(Thread& t, Wait wait) {
  t.wait = wait;
  M.warps[t.warp].ready &= ~(1u << t.lane);
}

// Releases the shuffle of the lanes in `mask` once all that live have come.
void try_shuffle(int w, unsigned mask) {
  Warp& warp = M.warps[w];
  const unsigned group = mask & warp.live;
  if (!group || (warp.at_shuffle & group) != group) return;
  Thread* lanes = &M.threads[w * kWarp];
  const Thread& first = lanes[__builtin_ctz(group)];
  for (unsigned rest = group; rest; rest &= rest - 1) {
    const Thread& t = lanes[__builtin_ctz(rest)];
    if (t.mask != mask) return;  // it waits for another group
    if (t.line != first.line) fail(t.line, "lanes of one warp meet in different shuffles (the other: line " + std::to_string(first.line) + ")");
    if (t.source < 0 || t.source >= kWarp || !(group >> t.source & 1))
      fail(t.line, "lane " + std::to_string(t.lane) + " reads lane " + std::to_string(t.source) + ", which takes no part");
  }
  for (unsigned rest = group; rest; rest &= rest - 1) {
    Thread& t = lanes[__builtin_ctz(rest)];
    t.result = lanes[t.source].value;
    t.wait = Wait::kNothing;
  }
  warp.at_shuffle &= ~group;
  warp.ready |= group;
  M.lane_position = 0;
}

[[noreturn]] void thread_main() {
  for (;;) {
    M.body(M.argument);
    Thread& t = *M.current;
    stop(t, Wait::kDone);
    --M.alive;
    M.warps[t.warp].live &= ~(1u << t.lane);
    for (unsigned rest = M.warps[t.warp].at_shuffle; rest; rest &= rest - 1)
      try_shuffle(t.warp, M.threads[t.warp * kWarp + __builtin_ctz(rest)].mask);
    yield();
  }
}

void make_stack(int i) {
  char* base = M.stacks + size_t(i) * (kStack + kGuard);
  mprotect(base, kGuard, PROT_NONE);
#if defined(__x86_64__)
  void** top = reinterpret_cast<void**>(base + kGuard + kStack) - 8;  // six registers, the entry, a null return address
  for (int k = 0; k < 8; ++k) top[k] = k == 6 ? reinterpret_cast<void*>(&thread_main) : nullptr;
  M.threads[i].context = top;
#else
  auto* context = static_cast<ucontext_t*>(M.threads[i].context ? M.threads[i].context : new ucontext_t);
  getcontext(context);
  context->uc_stack.ss_sp = base + kGuard, context->uc_stack.ss_size = kStack, context->uc_link = nullptr;
  makecontext(context, &thread_main, 0);
  M.threads[i].context = context;
#endif
}

// --- order ----------------------------------------------------------------------------------------------------------

enum class Order { kForward, kReverse, kRandom };

Order order() {
  const char* name = getenv("CKPT_CUDA_HOST_ORDER");
  const std::string wanted = name ? name : "forward";
  if (wanted == "forward") return Order::kForward;
  if (wanted == "reverse") return Order::kReverse;
  if (wanted == "random") return Order::kRandom;
  throw std::runtime_error("CKPT_CUDA_HOST_ORDER must be forward, reverse or random, not " + wanted);
}

std::vector<int> permutation(int n, Order order) {
  std::vector<int> v(size_t(n), 0);
  std::iota(v.begin(), v.end(), 0);
  if (order == Order::kReverse) std::reverse(v.begin(), v.end());
  if (order == Order::kRandom) std::shuffle(v.begin(), v.end(), M.random);
  return v;
}

// --- blocks ---------------------------------------------------------------------------------------------------------

void start_block() {
  M.alive = M.count, M.at_barrier = 0, M.epoch = 0;
  for (Warp& w : M.warps) w = Warp{};
  memset(M.shared, 0xFF, M.shared_bytes);  // NaN in every float type
  for (int i = 0; i < M.count; ++i) {
    Thread& t = M.threads[i];
    const unsigned u = unsigned(i);
    t.index = {u % blockDim.x, u / blockDim.x % blockDim.y, u / (blockDim.x * blockDim.y)};
    t.lane = i % kWarp, t.warp = i / kWarp, t.wait = Wait::kNothing;
    M.warps[t.warp].live = M.warps[t.warp].ready |= 1u << t.lane;
  }
}

// Nobody can run. Unless every thread waits at one and the same barrier, that is a bug of the kernel.
void check_barrier() {
  const Thread* first = nullptr;
  for (int i = 0; i < M.count; ++i) {
    const Thread& t = M.threads[i];
    if (t.wait == Wait::kDone) continue;
    if (!first) first = &t;
    threadIdx = t.index;
    if (M.at_barrier != M.alive) fail(t.line, "the block is stuck: not every thread reaches the same barrier or shuffle");
    if (M.alive != M.count) fail(t.line, "threads left the kernel before this barrier");
    if (t.line != first->line) fail(t.line, "threads of one block meet at different barriers");
  }
}

void run_block(Order order) {
  start_block();
  for (;; M.at_barrier = 0, ++M.epoch) {
    M.warp_order = permutation((M.count + kWarp - 1) / kWarp, order);
    M.lane_order = permutation(kWarp, order);
    M.warp_position = M.lane_position = 0;
    if (Thread* next = next_ready()) go(&M.scheduler, next);
    if (!M.error.empty()) throw std::runtime_error(M.error);
    if (M.alive == 0) return;
    check_barrier();
    for (int i = 0; i < M.count; ++i) M.threads[i].wait = Wait::kNothing, M.warps[i / kWarp].ready |= 1u << i % kWarp;
  }
}

void check_launch(dim3 g, dim3 b, size_t shared_bytes) {
  const auto threads = uint64_t(b.x) * b.y * b.z;
  if (threads < 1 || threads > kMaxThreads || b.z > 64) fail(0, "launch: a block of " + std::to_string(threads) + " threads");
  if (!g.x || !g.y || !g.z || g.x > 2147483647u || g.y > 65535 || g.z > 65535) fail(0, "launch: bad grid");
  if (shared_bytes > 48 << 10) fail(0, "launch: " + std::to_string(shared_bytes) + " bytes of shared memory");
}

struct Launch {  // undone whatever happens
  Launch(size_t shared_bytes) {
    // Exactly that size, so that the address sanitizer sees its end.
    if (posix_memalign(&M.shared, 16, shared_bytes ? shared_bytes : 16)) throw std::bad_alloc();
    M.shared_bytes = shared_bytes;
  }
  ~Launch() {
    free(M.shared);
    M.shared = nullptr, M.shared_bytes = 0, M.current = nullptr;
    if (!M.error.empty()) M.stacks_made = 0;  // fibres that stopped midway
  }
};

}  // namespace

void run(dim3 grid, dim3 block, size_t shared_bytes, void (*body)(void*), void* argument) {
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  M.error.clear(), M.current = nullptr, M.count = int(block.x * block.y * block.z), ++M.launch;
  gridDim = grid, blockDim = block, blockIdx = threadIdx = {0, 0, 0};
  check_launch(grid, block, shared_bytes);
  if (!M.stacks)
    M.stacks = static_cast<char*>(
        mmap(nullptr, kMaxThreads * (kStack + kGuard), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  M.body = body, M.argument = argument;
  const Launch launch(shared_bytes);
  for (; M.stacks_made < M.count; ++M.stacks_made) make_stack(M.stacks_made);
  const Order how = order();
  M.random.seed(unsigned(M.launch));
  for (int i : permutation(int(grid.x * grid.y * grid.z), how)) {
    const unsigned u = unsigned(i);
    blockIdx = {u % grid.x, u / grid.x % grid.y, u / (grid.x * grid.y)};
    M.block = u;
    run_block(how);
  }
}

void* shared_memory() { return M.shared; }
int lane() { return M.current->lane; }

void check_access_of_16(const void* p, bool write, int line) {
  if (reinterpret_cast<uintptr_t>(p) % 16) fail(line, "an access of 16 bytes at an address that is no multiple of 16");
#ifdef CKPT_CUDA_HOST_RACE
  race_access(p, 16, write);
#else
  (void)write;
#endif
}

void barrier(int line) {
  Thread& t = *M.current;
  t.line = line;
  stop(t, Wait::kBarrier);
  ++M.at_barrier;
  yield();
}

uint64_t shuffle(unsigned mask, uint64_t value, int source_lane, int line) {
  Thread& t = *M.current;
  if (!(mask >> t.lane & 1)) fail(line, "lane " + std::to_string(t.lane) + " is not in its own mask");
  t.mask = mask, t.value = value, t.source = source_lane, t.line = line;
  stop(t, Wait::kShuffle);
  M.warps[t.warp].at_shuffle |= 1u << t.lane;
  try_shuffle(t.warp, mask);
  yield();
  return t.result;
}

void fail(int line, const std::string& what) {
  const auto place = [](uint3 i) { return "(" + std::to_string(i.x) + "," + std::to_string(i.y) + "," + std::to_string(i.z) + ")"; };
  M.error = "line " + std::to_string(line) + ", block " + place(blockIdx) + ", thread " + place(threadIdx) + ": " + what;
  if (M.current) go(&M.current->context, nullptr);  // the scheduler throws
  throw std::runtime_error(M.error);
}

}  // namespace cuda_host
