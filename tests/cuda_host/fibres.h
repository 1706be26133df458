// The threads of a block as fibres: state that fibres.cpp drives and race_check.cpp looks at.
#pragma once
#include "host_cuda.h"
#include <random>
#include <string>
#include <vector>

namespace cuda_host {

constexpr int kWarp = 32, kMaxThreads = 1024;
constexpr size_t kStack = 64 << 10, kGuard = 4 << 10;

enum class Wait { kNothing, kBarrier, kShuffle, kDone };

struct Thread {
  void* context = nullptr;  // a stack pointer, or a ucontext_t
  uint3 index{};
  int lane = 0, warp = 0, line = 0, source = 0;
  Wait wait = Wait::kNothing;
  unsigned mask = 0;  // of the shuffle it waits in
  uint64_t value = 0, result = 0;
};

struct Warp {  // sets of lanes
  unsigned ready = 0, live = 0, at_shuffle = 0;
};

// One launch at a time, by one operating-system thread.
struct Machine {
  Thread threads[kMaxThreads], *current = nullptr;  // null while no kernel runs
  Warp warps[kMaxThreads / kWarp];
  void* scheduler = nullptr;  // its context
  int count = 0, alive = 0, at_barrier = 0;
  std::vector<int> warp_order, lane_order;
  int warp_position = 0, lane_position = 0;
  void (*body)(void*) = nullptr;
  void *argument = nullptr, *shared = nullptr;
  size_t shared_bytes = 0;
  char* stacks = nullptr;
  int stacks_made = 0;
  uint64_t launch = 0, block = 0;
  unsigned epoch = 0;  // barriers passed by the block
  std::mt19937 random;
  std::string error;
};
extern Machine machine;

// The race checker's part of an access that its compiler does not see (race_check.cpp).
void race_access(const void* p, size_t bytes, bool write);

// Ends the launch with a std::runtime_error that names the place.
void fail(int line, const std::string& what);

}  // namespace cuda_host
