// The machine under the SIMT emulator: one fiber a thread, one block at a time.
//
// A fiber runs until it reaches a barrier or a warp collective, so every ordering that a kernel does not
// enforce is up to the schedule: run a kernel under all three, and a missing barrier shows as a wrong result.
// Dynamic shared memory starts as 0xFF bytes (NaN in every float format). Static __shared__ is not supported
// on purpose: g++ cannot gather such variables in templates, so they could not be poisoned.
#pragma once
#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <sys/mman.h>
#include <vector>

#include "fiber.h"
#include "types.h"

namespace simt {

enum class Schedule : int { kForward = 0, kReverse = 1, kRandom = 2 };

struct AsyncCopy {
  void *destination;
  unsigned char bytes[16];
  size_t size;
};

struct Thread {
  Fiber fiber;
  uint3 index;
  int warp, lane;
  std::vector<AsyncCopy> open_copies;
  std::vector<std::vector<AsyncCopy>> copy_groups;
};

// Lanes that wait for each other. Slots are double-buffered: a fast lane may enter the next collective while
// slow ones still read this one, but nobody can enter the one after that.
struct Rendezvous {
  unsigned mask = 0, arrived = 0;
  int generation = 0;
  const char *operation = nullptr;
  unsigned char slot[2][32][16];
  std::vector<int> waiting;
};

struct Warp {
  unsigned alive = 0;
  Rendezvous by_lowest_lane[32];
};

struct Barrier {
  int arrived = 0, generation = 0, sum[2] = {0, 0};
  std::vector<int> waiting;
};

constexpr int kMaxThreads = 1024;
constexpr size_t kMaxSharedBytes = 227 * 1024; // what sm_90 and sm_100 offer a block
constexpr size_t kCanaryBytes = 64;
constexpr int kNumBarriers = 16;

struct Machine {
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  Barrier barriers[kNumBarriers];
  unsigned ready[kMaxThreads / 32] = {}; // a mask a warp
  int current = -1, alive = 0;
  dim3 grid, block;
  uint3 block_index{};
  std::vector<unsigned char> shared_storage;
  unsigned char *shared = nullptr;
  size_t shared_bytes = 0;
  const std::function<void()> *kernel = nullptr;
  Fiber host;
  std::string error;
  // settings, kept between launches
  Schedule schedule = Schedule::kForward;
  uint64_t random_state = 1;
  long switches = 0;
  long launches = 0;
};

inline Machine machine;
inline Thread *self = nullptr;

inline void set_schedule(Schedule schedule, uint64_t seed) {
  machine.schedule = schedule;
  machine.random_state = seed * 2 + 1; // xorshift must not start at zero
}

inline unsigned random_bits() {
  uint64_t &s = machine.random_state;
  s ^= s << 13;
  s ^= s >> 7;
  s ^= s << 17;
  return static_cast<unsigned>(s >> 32);
}

// Ends the launch from inside a thread; launch() throws the message on the host.
[[noreturn]] inline void fail(const char *format, ...) {
  char what[400], where[100];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(what, sizeof what, format, arguments);
  va_end(arguments);
  const uint3 b = machine.block_index;
  snprintf(where, sizeof where, "block (%u,%u,%u) thread %d: ", b.x, b.y, b.z, machine.current);
  machine.error = std::string(where) + what;
  Fiber abandoned;
  switch_fiber(abandoned, machine.host);
  abort();
}

inline int lowest_bit(unsigned mask) {
  return __builtin_ctz(mask);
}
inline int highest_bit(unsigned mask) {
  return 31 - __builtin_clz(mask);
}
inline int random_bit(unsigned mask) {
  const unsigned turn = random_bits() % 32, turned = turn ? mask >> turn | mask << (32 - turn) : mask;
  return static_cast<int>((lowest_bit(turned) + turn) % 32);
}

// The warp whose turn it is, or -1 if no thread can run.
inline int pick_warp() {
  const int count = static_cast<int>(machine.warps.size());
  int first = machine.schedule == Schedule::kReverse ? count - 1 : 0;
  if (machine.schedule ==
      Schedule::kRandom) // mostly the same warp again, so that it gets ahead of the others
    first = random_bits() % 8 && self ? self->warp
                                      : static_cast<int>(random_bits() % static_cast<unsigned>(count));
  const int step = machine.schedule == Schedule::kReverse ? count - 1 : 1;
  for (int i = 0; i < count; i++)
    if (machine.ready[(first + i * step) % count])
      return (first + i * step) % count;
  return -1;
}

inline bool anyone_ready() {
  for (const unsigned mask : machine.ready)
    if (mask)
      return true;
  return false;
}

inline int next_ready(const char *waiting_at) {
  const int warp = pick_warp();
  if (warp < 0)
    fail("deadlock: no thread can run while this one waits at %s", waiting_at);
  unsigned &mask = machine.ready[warp];
  const int lane = machine.schedule == Schedule::kForward   ? lowest_bit(mask)
                   : machine.schedule == Schedule::kReverse ? highest_bit(mask)
                                                            : random_bit(mask);
  mask &= ~(1u << lane);
  return warp * 32 + lane;
}

// Leaves the current thread (which somebody must have queued or will queue) and runs the next ready one.
inline void yield_at(const char *waiting_at) {
  const int thread = next_ready(waiting_at);
  if (thread == machine.current)
    return;
  Thread *from = self;
  machine.current = thread;
  self = &machine.threads[thread];
  machine.switches++;
  switch_fiber(from->fiber, self->fiber);
}

inline void wake(std::vector<int> &waiting) {
  for (const int thread : waiting)
    machine.ready[thread / 32] |= 1u << thread % 32;
  waiting.clear();
}

inline void release(Barrier &barrier) {
  barrier.arrived = 0;
  barrier.generation++;
  barrier.sum[barrier.generation & 1] = 0;
  wake(barrier.waiting);
}

// Block barrier `id` for `count` threads (0: all that are alive); returns the sum of `value` over them.
inline int wait_barrier(int id, int count, int value, const char *operation) {
  if (id < 0 || id >= kNumBarriers)
    fail("%s: there is no barrier %d", operation, id);
  Barrier &barrier = machine.barriers[id];
  const int generation = barrier.generation & 1;
  barrier.sum[generation] += value;
  barrier.waiting.push_back(machine.current);
  if (++barrier.arrived == (count ? count : machine.alive))
    release(barrier);
  yield_at(operation);
  return barrier.sum[generation];
}

using Slots = unsigned char (*)[16];

// Every lane of `mask` brings a value; returns all of them, valid until the lane's next collective.
template <class V> inline Slots exchange(unsigned mask, const V &value, const char *operation) {
  static_assert(sizeof(V) <= 16, "a lane exchanges at most 16 bytes");
  Warp &warp = machine.warps[self->warp];
  if (!(mask >> self->lane & 1))
    fail("%s: own lane %d is not in mask %08x", operation, self->lane, mask);
  if (mask & ~warp.alive)
    fail("%s: mask %08x names lanes %08x, which have exited", operation, mask, mask & ~warp.alive);
  Rendezvous &r = warp.by_lowest_lane[__builtin_ctz(mask)];
  if (!r.arrived) {
    r.mask = mask;
    r.operation = operation;
  } else if (r.mask != mask || strcmp(r.operation, operation) != 0) {
    fail("divergent warp collective: %s(mask %08x) meets %s(mask %08x)", operation, mask, r.operation,
         r.mask);
  }
  const int generation = r.generation & 1;
  memcpy(r.slot[generation][self->lane], &value, sizeof value);
  r.arrived |= 1u << self->lane;
  r.waiting.push_back(machine.current);
  if (r.arrived == mask) {
    r.arrived = 0;
    r.generation++;
    wake(r.waiting);
  }
  yield_at(operation);
  return r.slot[generation];
}

// A collective that names this lane and that it never joined would hang or read garbage on a GPU.
inline void check_abandoned_collectives() {
  for (const Rendezvous &r : machine.warps[self->warp].by_lowest_lane)
    if (r.arrived && (r.mask >> self->lane & 1) && !(r.arrived >> self->lane & 1))
      fail("lane %d exited but is named in a pending %s", self->lane, r.operation);
}

inline void finish_copies(std::vector<AsyncCopy> &group) {
  for (const AsyncCopy &copy : group)
    memcpy(copy.destination, copy.bytes, copy.size);
  group.clear();
}

// What the last instruction of a thread does: committed copies land, barriers stop waiting for it.
inline void leave_block() {
  for (auto &group : self->copy_groups)
    finish_copies(group);
  self->copy_groups.clear();
  self->open_copies.clear();
  check_abandoned_collectives();
  machine.warps[self->warp].alive &= ~(1u << self->lane);
  machine.alive--;
  Barrier &all = machine.barriers[0];
  if (machine.alive && all.arrived == machine.alive)
    release(all);
}

inline void thread_main() {
  (*machine.kernel)();
  leave_block();
  if (!machine.alive) {
    Fiber finished;
    switch_fiber(finished, machine.host);
  }
  if (!anyone_ready())
    fail("deadlock: threads still wait for ones that have exited");
  yield_at("exit");
  abort();
}

inline void reset_thread(int i) {
  Thread &t = machine.threads[i];
  const dim3 b = machine.block;
  const unsigned u = static_cast<unsigned>(i);
  t.index = {u % b.x, u / b.x % b.y, u / (b.x * b.y)};
  t.warp = i / 32;
  t.lane = i % 32;
  t.open_copies.clear();
  t.copy_groups.clear();
  machine.warps[t.warp].alive |= 1u << t.lane;
  machine.ready[t.warp] |= 1u << t.lane;
  t.fiber.start(&thread_main);
}

inline void reset_warp(Warp &warp) { // in place: the slots are large and need no clearing
  warp.alive = 0;
  for (Rendezvous &r : warp.by_lowest_lane) {
    r.arrived = 0;
    r.waiting.clear();
  }
}

inline void reset_block(int num_threads) {
  memset(machine.shared, 0xFF, machine.shared_bytes + kCanaryBytes);
  machine.alive = num_threads;
  self = nullptr;
  memset(machine.ready, 0, sizeof machine.ready);
  for (Barrier &barrier : machine.barriers)
    barrier = Barrier();
  machine.warps.resize((num_threads + 31) / 32);
  for (Warp &warp : machine.warps)
    reset_warp(warp);
  for (int i = 0; i < num_threads; i++)
    reset_thread(i);
}

inline void check_canary() {
  for (size_t i = 0; i < kCanaryBytes; i++)
    if (machine.shared[machine.shared_bytes + i] != 0xFF)
      throw std::runtime_error("write past the end of dynamic shared memory (" +
                               std::to_string(machine.shared_bytes) + " bytes)");
}

inline void run_block(unsigned linear, int num_threads) {
  const dim3 g = machine.grid;
  machine.block_index = {linear % g.x, linear / g.x % g.y, linear / (g.x * g.y)};
  reset_block(num_threads);
  machine.current = next_ready("start");
  self = &machine.threads[machine.current];
  switch_fiber(machine.host, self->fiber);
  if (!machine.error.empty())
    throw std::runtime_error(machine.error);
  check_canary();
}

inline void check_launch(dim3 grid, int num_threads, size_t shared_bytes) {
  if (num_threads < 1 || num_threads > kMaxThreads || shared_bytes > kMaxSharedBytes)
    throw std::runtime_error("launch limits exceeded: " + std::to_string(num_threads) + " threads, " +
                             std::to_string(shared_bytes) + " bytes of shared memory");
  if (!grid.x || !grid.y || !grid.z || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535)
    throw std::runtime_error("invalid grid");
}

// The order in which the blocks run.
inline void arrange(std::vector<int> &order) {
  if (machine.schedule == Schedule::kReverse)
    std::reverse(order.begin(), order.end());
  if (machine.schedule == Schedule::kRandom)
    for (size_t i = order.size(); i > 1; i--)
      std::swap(order[i - 1], order[random_bits() % i]);
}

// Runs `kernel` for every thread of the grid. Throws std::runtime_error for what a GPU would hang on or
// corrupt.
inline void launch(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()> &kernel) {
  const int num_threads = static_cast<int>(block.x * block.y * block.z);
  check_launch(grid, num_threads, shared_bytes);
  machine.grid = grid;
  machine.block = block;
  machine.kernel = &kernel;
  machine.error.clear();
  machine.launches++;
  if (machine.threads.size() < static_cast<size_t>(num_threads))
    machine.threads.resize(num_threads);
  machine.shared_storage.resize(shared_bytes + kCanaryBytes + 128);
  const uintptr_t base = reinterpret_cast<uintptr_t>(machine.shared_storage.data());
  machine.shared = reinterpret_cast<unsigned char *>((base + 127) & ~uintptr_t{127});
  machine.shared_bytes = shared_bytes;
  std::vector<int> order(static_cast<size_t>(grid.x) * grid.y * grid.z);
  for (size_t i = 0; i < order.size(); i++)
    order[i] = static_cast<int>(i);
  arrange(order); // blocks may run in any order too
  for (int linear : order)
    run_block(static_cast<unsigned>(linear), num_threads);
}

} // namespace simt
