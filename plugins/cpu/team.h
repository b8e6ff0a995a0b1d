// Threads that share small jobs with their caller.
//
// A token is some two hundred jobs, a few us apart. onnxruntime's ParallelFor takes about 1 us longer for
// each, and its threads do nothing in between; a worker here watches a few words of memory for as long as the
// next job is likely to come, fetches what that job will read (forecast.h), and sleeps after that.
#pragma once
#include "forecast.h"
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace moec {

class Team {
public:
  using Body = void (*)(void *user, size_t index);

  // The team of the sessions with so many threads (the caller is one of them); null where one is enough.
  static std::shared_ptr<Team> of(int threads);

  explicit Team(int threads);
  ~Team();

  // Calls body(user, i) for every i in [0, count), low ones first; body must not throw. Returns false, and
  // has called nothing, while the team works for someone else and in a process forked from the team's.
  bool run(uint32_t count, Body body, void *user);
  // What the threads may fetch while they wait, from the next job on.
  void expect(const Forecast &next) { expected_.copy_from(next); }

private:
  // The pieces that are one member's to begin with, [first, last) in one word: whoever takes one learns in
  // the same step that the job is not over, so that its body stays where it is.
  struct alignas(64) Share {
    std::atomic<uint64_t> pieces{0};
    bool take_first(uint32_t &index);
    bool take_last(uint32_t &index);
  };

  void work(size_t member);
  void take_all(size_t member);
  bool take(size_t member, uint32_t &index);
  bool has_work() const;
  void wake_sleepers();
  bool wait_for_job(size_t member);
  static void dismiss(Team *team);

  std::atomic<bool> busy_{false}; // with some caller's job
  std::vector<Share> shares_;
  alignas(64) std::atomic<uint32_t> finished_{0};
  Forecast expected_;
  Body body_ = nullptr;
  void *user_ = nullptr;
  alignas(64) std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  int born_;
  std::vector<std::thread> workers_;
};

} // namespace moec
