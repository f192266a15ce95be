// CUDA on a processor, for tests: a block of threads as fibers of one thread of the system, one block after the other.
//
// What a kernel may count on is kept and nothing more. A barrier, or an exchange within a warp, is where fibers take turns;
// in which order is chosen by STAND_IN_ORDER, since a kernel must not depend on it: `forward`, `reverse`, `random`, or `skew`,
// which lets one warp run as far as it can before another starts. A block whose fibers all wait, and those that meet in
// different places, end the process with the places' names.
//
// Not here: weak memory between threads, bank conflicts, time, and anything that several blocks do together.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <sys/mman.h>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#define KERNEL(threads) extern "C" void
#define DEVICE static inline
// One block runs at a time: whoever launches holds a lock.
#define SHARED static __attribute__((section("shared_memory")))

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
// Where the memory of all blocks begins and ends.
extern "C" __attribute__((visibility("hidden"))) char __start_shared_memory[], __stop_shared_memory[];

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace fibers {

constexpr unsigned LANES = 32;
constexpr std::size_t STACK_BYTES = 64 << 10;
constexpr std::size_t EXCHANGE_BYTES = 16;

enum class Order { Forward, Reverse, Random, Skew };

inline Order order() {
  const char* name = std::getenv("STAND_IN_ORDER");
  if (!name || !std::strcmp(name, "forward")) return Order::Forward;
  if (!std::strcmp(name, "reverse")) return Order::Reverse;
  if (!std::strcmp(name, "random")) return Order::Random;
  if (!std::strcmp(name, "skew")) return Order::Skew;
  std::fprintf(stderr, "STAND_IN_ORDER: expected forward, reverse, random or skew, got %s\n", name);
  std::abort();
}

// What fibers wait for together. `round` counts how often all have come.
struct Meeting {
  unsigned round = 0;
  unsigned arrived = 0;
  const char* place = nullptr;
};

// A warp's: each lane leaves something and gets what all have left.
struct Exchange : Meeting {
  std::array<std::array<unsigned char, EXCHANGE_BYTES>, LANES> in, out;
};

struct Fiber {
  void* stack_pointer = nullptr;
  char* stack = nullptr;
  dim3 place;
  unsigned index = 0;
  bool done = false;
  // The meeting that it waits for, and the round in which it came.
  const Meeting* waits_for = nullptr;
  unsigned since = 0;
};

struct Block {
  const std::function<void()>* body = nullptr;
  unsigned threads = 0;
  unsigned alive = 0;
  Meeting barrier;
  std::vector<Exchange> warps;
};

inline Block* block;
inline Fiber* current;
inline void* scheduler;
inline std::vector<Fiber> pool;

// Saves the registers that a call must keep on the present stack, and goes on with those of another.
extern "C" void fibers_switch(void** from, void* to);
asm(R"(
.text
.weak fibers_switch
.type fibers_switch,@function
fibers_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.size fibers_switch, .-fibers_switch
)");

[[noreturn]] inline void fail(const std::string& what) {
  std::fprintf(stderr, "stand-in: block (%u, %u, %u): %s\n", blockIdx.x, blockIdx.y, blockIdx.z, what.c_str());
  std::abort();
}

inline void wait_for(const Meeting& meeting) {
  current->waits_for = &meeting;
  current->since = meeting.round;
  fibers_switch(&current->stack_pointer, scheduler);
  current->waits_for = nullptr;
}

// True when this was the last of `expected` to come to that place.
inline bool arrive(Meeting& meeting, unsigned expected, const char* place) {
  if (meeting.arrived > 0 && meeting.place != place && std::strcmp(meeting.place, place)) {
    fail(std::string(place) + " meets " + meeting.place);
  }
  meeting.place = place;
  return ++meeting.arrived >= expected;
}

inline void release(Meeting& meeting) {
  meeting.arrived = 0;
  meeting.round++;
}

inline void barrier() {
  if (arrive(block->barrier, block->alive, "__syncthreads")) {
    release(block->barrier);
  } else {
    wait_for(block->barrier);
  }
}

// Every lane of the warp leaves a value and gets those of all.
template <class T> T exchange(T value, unsigned source, const char* place) {
  static_assert(sizeof(T) <= EXCHANGE_BYTES);
  Exchange& warp = block->warps[current->index / LANES];
  const unsigned first = current->index / LANES * LANES;
  std::memcpy(warp.in[current->index % LANES].data(), &value, sizeof value);
  if (arrive(warp, std::min(LANES, block->threads - first), place)) {
    warp.out = warp.in;
    release(warp);
  } else {
    wait_for(warp);
  }
  T other;
  std::memcpy(&other, warp.out[source % LANES].data(), sizeof other);
  return other;
}

inline void begin() {
  (*block->body)();
  current->done = true;
  // Who has ended is not waited for.
  if (--block->alive > 0 && block->barrier.arrived == block->alive) release(block->barrier);
  fibers_switch(&current->stack_pointer, scheduler);
  std::abort();
}

inline void prepare(Fiber& fiber, unsigned index, dim3 size) {
  if (!fiber.stack) {
    const int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* stack = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, kind, -1, 0);
    if (stack == MAP_FAILED) fail("no memory for a stack");
    fiber.stack = static_cast<char*>(stack);
  }
#if defined(__SANITIZE_ADDRESS__)
  // Frames that a fiber has never returned from.
  __asan_unpoison_memory_region(fiber.stack, STACK_BYTES);
#endif
  fiber.index = index;
  fiber.place = {index % size.x, index / size.x % size.y, index / (size.x * size.y)};
  fiber.done = false;
  fiber.waits_for = nullptr;
  // What the first switch pops: six registers, then where to go on; stacks start at different lines of the cache.
  void** top = reinterpret_cast<void**>(fiber.stack + STACK_BYTES - index % 61 * 64 - 64);
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(&begin);
  for (int i = 0; i < 6; i++) *--top = nullptr;
  fiber.stack_pointer = top;
}

// Goes on with a fiber if it has something to do.
inline bool go_on(Fiber& fiber) {
  if (fiber.done || (fiber.waits_for && fiber.waits_for->round == fiber.since)) return false;
  current = &fiber;
  threadIdx = fiber.place;
  fibers_switch(&scheduler, fiber.stack_pointer);
  return true;
}

[[noreturn]] inline void deadlock() {
  std::string waiting;
  for (unsigned i = 0; i < block->threads; i++) {
    const Fiber& fiber = pool[i];
    if (!fiber.done && fiber.waits_for && (i % LANES == 0)) {
      waiting += " thread " + std::to_string(i) + " at " + fiber.waits_for->place + ";";
    }
  }
  fail("no thread can go on:" + waiting);
}

inline void run_block(dim3 grid, dim3 size, dim3 place, const std::function<void()>& body, Order order, unsigned seed) {
  const unsigned threads = size.x * size.y * size.z;
  Block here;
  here.body = &body;
  here.threads = here.alive = threads;
  here.warps.resize((threads + LANES - 1) / LANES);
  block = &here;
  blockIdx = place, blockDim = size, gridDim = grid;
  if (pool.size() < threads) pool.resize(threads);
  for (unsigned i = 0; i < threads; i++) prepare(pool[i], i, size);
  std::vector<unsigned> turns(threads);
  // What no thread of this block has written is no number.
  std::memset(__start_shared_memory, 0xff, __stop_shared_memory - __start_shared_memory);
  std::iota(turns.begin(), turns.end(), 0u);
  if (order == Order::Reverse) std::reverse(turns.begin(), turns.end());
  std::minstd_rand random(seed);
  while (here.alive > 0) {
    bool any = false;
    if (order == Order::Random) std::shuffle(turns.begin(), turns.end(), random);
    if (order == Order::Skew) {
      const unsigned warps = here.warps.size(), start = random() % warps;
      for (unsigned i = 0; i < warps; i++) {
        const unsigned first = (start + i) % warps * LANES, end = std::min(threads, first + LANES);
        for (bool more = true; more; any |= more) {
          more = false;
          for (unsigned thread = first; thread < end; thread++) more |= go_on(pool[thread]);
        }
      }
    } else {
      for (unsigned thread : turns) any |= go_on(pool[thread]);
    }
    if (!any && here.alive > 0) deadlock();
  }
  block = nullptr;
}

// Runs a kernel's body for every thread of a grid.
inline void launch(dim3 grid, dim3 size, const std::function<void()>& body) {
  const Order order = fibers::order();
  unsigned seed = 1;
  for (unsigned z = 0; z < grid.z; z++)
    for (unsigned y = 0; y < grid.y; y++)
      for (unsigned x = 0; x < grid.x; x++) run_block(grid, size, {x, y, z}, body, order, seed++);
}

}  // namespace fibers

inline void __syncthreads() { fibers::barrier(); }

template <class T> T __shfl_xor_sync(unsigned, T value, unsigned mask) {
  return fibers::exchange(value, fibers::current->index % fibers::LANES ^ mask, "__shfl_xor_sync");
}

inline float from_bits(unsigned bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline float from_half(unsigned short bits) {
  _Float16 half;
  std::memcpy(&half, &bits, sizeof half);
  return static_cast<float>(half);
}

inline unsigned short to_half(float x) {
  const _Float16 half = static_cast<_Float16>(x);
  unsigned short bits;
  std::memcpy(&bits, &half, sizeof bits);
  return bits;
}
