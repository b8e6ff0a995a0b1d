#include "team.h"
#include <chrono>
#include <map>
#include <pthread.h>
#include <system_error>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moec {
namespace {

constexpr auto kPatience = std::chrono::microseconds(50); // between a job and sleep
constexpr size_t kLine = 64;                              // of a cache
constexpr int kLooks = 64;                                // between two looks at the clock

std::atomic<int> forks{0}; // of this process's ancestors: a child has none of its parent's threads

void count_forks() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { ++forks; });
  (void)registered;
}

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

uint64_t range(uint64_t first, uint64_t last) {
  return first << 32 | last;
}
uint32_t first_of(uint64_t pieces) {
  return static_cast<uint32_t>(pieces >> 32);
}
uint32_t last_of(uint64_t pieces) {
  return static_cast<uint32_t>(pieces);
}
bool is_empty(uint64_t pieces) {
  return first_of(pieces) >= last_of(pieces);
}

} // namespace

std::shared_ptr<Team> Team::of(int threads) {
  static std::mutex mutex;
  static std::map<int, std::weak_ptr<Team>> teams;
  if (threads < 2)
    return nullptr;
  std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<Team> team = teams[threads].lock();
  if (!team || team->born_ != forks)
    teams[threads] = team = std::shared_ptr<Team>(new Team(threads), dismiss);
  return team;
}

Team::Team(int threads) : shares_(static_cast<size_t>(threads)) {
  count_forks();
  born_ = forks;
  try {
    for (size_t member = 1; member < shares_.size(); ++member)
      workers_.emplace_back([this, member] { work(member); });
  } catch (const std::system_error &) { // the system's limit: those who are there do the others' pieces
  }
}

// In a child the threads are not there, and what they wait on cannot be taken down: it is left alone.
void Team::dismiss(Team *team) {
  if (team->born_ == forks)
    delete team;
}

Team::~Team() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread &worker : workers_)
    worker.join();
}

bool Team::run(uint32_t count, Body body, void *user) {
  if (born_ != forks || busy_.exchange(true, std::memory_order_acquire))
    return false;
  body_ = body;
  user_ = user;
  finished_.store(0, std::memory_order_relaxed);
  const uint64_t members = shares_.size();
  for (uint64_t member = members; member-- > 0;) // in order with the look for sleepers
    shares_[member].pieces.store(range(member * count / members, (member + 1) * count / members));
  if (sleepers_.load() > 0)
    wake_sleepers();
  take_all(0);
  for (int look = 0; finished_.load(std::memory_order_acquire) != count; ++look)
    if (look % kLooks == kLooks - 1)
      std::this_thread::yield(); // a worker with a piece may be waiting for this very core
    else
      pause();
  busy_.store(false, std::memory_order_release);
  return true;
}

void Team::wake_sleepers() {
  {
    const std::lock_guard<std::mutex> nobody_is_between_its_last_look_and_its_sleep(mutex_);
  }
  wake_.notify_all();
}

void Team::work(size_t member) {
  while (wait_for_job(member))
    take_all(member);
}

void Team::take_all(size_t member) {
  uint32_t finished = 0; // counted here first: the word is in another core's cache
  for (uint32_t index; take(member, index); ++finished)
    body_(user_, index);
  if (finished)
    finished_.fetch_add(finished, std::memory_order_release);
}

// One's own pieces in order, then the others' from their ends.
bool Team::take(size_t member, uint32_t &index) {
  if (shares_[member].take_first(index))
    return true;
  for (size_t i = 1; i < shares_.size(); ++i)
    if (shares_[(member + i) % shares_.size()].take_last(index))
      return true;
  return false;
}

bool Team::Share::take_first(uint32_t &index) {
  uint64_t now = pieces.load(std::memory_order_relaxed);
  while (!is_empty(now))
    if (pieces.compare_exchange_weak(now, range(first_of(now) + 1, last_of(now)), std::memory_order_acq_rel))
      return index = first_of(now), true;
  return false;
}

bool Team::Share::take_last(uint32_t &index) {
  uint64_t now = pieces.load(std::memory_order_relaxed);
  while (!is_empty(now))
    if (pieces.compare_exchange_weak(now, range(first_of(now), last_of(now) - 1), std::memory_order_acq_rel))
      return index = last_of(now) - 1, true;
  return false;
}

bool Team::has_work() const {
  for (const Share &share : shares_)
    if (!is_empty(share.pieces.load()))
      return true;
  return false;
}

// False when the team is being dissolved.
bool Team::wait_for_job(size_t member) {
  const auto end = std::chrono::steady_clock::now() + kPatience;
  Forecast::Walk walk;
  while (std::chrono::steady_clock::now() < end)
    for (int look = 0; look < kLooks; ++look) {
      if (has_work())
        return true;
      const Forecast::Lines lines = expected_.lines(walk, member, shares_.size());
      for (size_t at = 0; at < lines.bytes; at += kLine)
        __builtin_prefetch(lines.data + at, 0, 2);
      if (lines.bytes == 0)
        pause();
    }
  ++sleepers_;
  std::unique_lock<std::mutex> lock(mutex_);
  wake_.wait(lock, [this] { return stop_.load() || has_work(); });
  --sleepers_;
  return !stop_;
}

} // namespace moec
