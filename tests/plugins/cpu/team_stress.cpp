// Uses a Team as operators do, and worse. Prints what is wrong and exits with 1.
#include "forecast.h"
#include "team.h"
#include <cstdio>
#include <cstdlib>
#include <random>
#include <sys/wait.h>
#include <unistd.h>

using moec::Forecast;
using moec::Team;

namespace {

void require(bool ok, const char *what) {
  if (ok)
    return;
  std::printf("wrong: %s\n", what);
  std::exit(1);
}

// Plain counters: two threads on one piece, or one that is still at work when run() returns, is a data race.
struct Job {
  std::vector<int> calls;
  static void body(void *user, size_t i) { ++static_cast<Job *>(user)->calls[i]; }
};

void every_piece_once(Team &team, std::mt19937 &random, int jobs) {
  for (int round = 0; round < jobs; ++round) {
    Job job{std::vector<int>(random() % 40)};
    if (round % 50 == 0)
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 300)); // some find the others asleep
    require(team.run(static_cast<uint32_t>(job.calls.size()), Job::body, &job), "the team is busy");
    for (int calls : job.calls)
      require(calls == 1, "a piece was not called once");
  }
}

void many_callers(int threads, int jobs) {
  const std::shared_ptr<Team> team = Team::of(threads);
  require(team == Team::of(threads), "two teams of one size");
  std::atomic<int> served{0};
  std::vector<std::thread> callers;
  for (int c = 0; c < 3; ++c)
    callers.emplace_back([&, c] {
      for (int round = 0; round < jobs; ++round) {
        Job job{std::vector<int>(1 + (round + c) % 17)};
        const bool ran = team->run(static_cast<uint32_t>(job.calls.size()), Job::body, &job);
        served += ran;
        for (int calls : job.calls)
          require(calls == (ran ? 1 : 0), "a refused job was called, or a piece was not called once");
      }
    });
  for (std::thread &caller : callers)
    caller.join();
  require(served > 0, "nobody was served");
}

void a_child_has_no_team() {
  const std::shared_ptr<Team> team = Team::of(2);
  std::this_thread::sleep_for(std::chrono::milliseconds(2)); // its worker sleeps
  const pid_t child = fork();
  if (child == 0) {
    Job job{std::vector<int>(4)};
    const bool ran = team->run(4, Job::body, &job);
    const_cast<std::shared_ptr<Team> &>(team).reset(); // must not wait for threads that are not there
    _exit(ran ? 1 : 0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  require(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a forked process used its parent's threads");
}

void members_share_the_lines() {
  static const char memory[100 * 640] = {};
  Forecast reads, copy;
  reads.add(memory, 640, 0, 10); // pieces 0 to 9
  reads.add(memory + 6400, 96, 0, 10);
  reads.add(memory + 20000, 1000, 10, 3);
  reads.set_pieces(13);
  copy.copy_from(reads);
  std::vector<int> seen(sizeof memory);
  for (size_t member = 0; member < 3; ++member) {
    Forecast::Walk walk;
    for (Forecast::Lines l; (l = copy.lines(walk, member, 3)).bytes != 0;)
      for (size_t i = 0; i < l.bytes; ++i)
        ++seen[static_cast<size_t>(l.data - memory) + i];
  }
  for (size_t i = 0; i < seen.size(); ++i)
    require(seen[i] == (i < 7360 || (i >= 20000 && i < 23000)), "a byte is not fetched by one member");
}

} // namespace

int main(int, char **argv) {
  std::mt19937 random(static_cast<uint32_t>(std::atoi(argv[1])));
  const int jobs = std::atoi(argv[2]);
  members_share_the_lines();
  for (int threads = 2; threads <= 5; ++threads) {
    Team team(threads);
    Forecast next;
    next.add(&random, sizeof random, 0, 1);
    next.set_pieces(1);
    team.expect(next);
    every_piece_once(team, random, jobs);
  }
  for (int i = 0; i < 50; ++i)
    Team dissolved_at_once(3);
  many_callers(2, jobs);
  many_callers(3, jobs);
  if (argv[3][0] == 'f')
    a_child_has_no_team();
  require(Team::of(1) == nullptr, "one thread is no team");
  return 0;
}
