#include "thread_pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

namespace zerostd {
namespace {

constexpr int64_t kPiecesPerThread = 8;

struct Job {
  const std::function<void(int)>& task;
  const int num_tasks;
  std::fenv_t environment;  // the caller's: flush-to-zero must not depend on the thread that does the work
  int num_taken = 0;
  int num_finished = 0;
};

class ThreadPool {
 public:
  void run(Job& job) {
    std::unique_lock<std::mutex> lock(mutex_);
    add_threads(job.num_tasks - 1);
    jobs_.push_back(&job);
    work_.notify_all();
    while (job.num_taken < job.num_tasks) take_task(job, lock);
    finished_.wait(lock, [&] { return job.num_finished == job.num_tasks; });
  }

 private:
  void add_threads(int num_wanted) {
    try {
      for (; num_threads_ < num_wanted; ++num_threads_) std::thread([this] { serve(); }).detach();
    } catch (const std::system_error&) {
      // The system gives no more threads: those there are, and the caller, do the work.
    }
  }

  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      work_.wait(lock, [this] { return !jobs_.empty(); });
      Job& job = *jobs_.front();
      std::fesetenv(&job.environment);
      take_task(job, lock);
    }
  }

  // Runs one task of a job with the lock released. A job leaves the queue with its last task, before that task runs.
  void take_task(Job& job, std::unique_lock<std::mutex>& lock) {
    const int index = job.num_taken++;
    if (job.num_taken == job.num_tasks) {
      for (auto it = jobs_.begin(); it != jobs_.end(); ++it) {
        if (*it == &job) {
          jobs_.erase(it);
          break;
        }
      }
    }
    lock.unlock();
    job.task(index);
    lock.lock();
    if (++job.num_finished == job.num_tasks) finished_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable finished_;
  std::deque<Job*> jobs_;
  int num_threads_ = 0;
};

// Leaked on purpose: threads may still sleep on it while static objects are destroyed at exit. A forked child has none
// of the parent's threads, and its copy of the mutex may be locked for ever; it leaves that pool behind for a new one.
ThreadPool* pool = [] {
  pthread_atfork(nullptr, nullptr, [] { pool = new ThreadPool; });
  return new ThreadPool;
}();

}  // namespace

void run_tasks(int num_tasks, const std::function<void(int)>& task) {
  if (num_tasks == 1) return task(0);
  Job job{task, num_tasks, {}};
  std::fegetenv(&job.environment);
  pool->run(job);
}

void run_ranges(const Ranges& ranges, const std::function<void(int64_t, int64_t)>& task) {
  if (ranges.count == 0) return;
  const int64_t num_blocks = (ranges.count + ranges.block - 1) / ranges.block;
  const int64_t most = std::min<int64_t>(ranges.num_threads, num_blocks);
  const int64_t num_tasks = std::clamp<int64_t>(ranges.count / ranges.min_per_thread, 1, most);
  // Several pieces for each thread, taken as threads get to them: one whose core is wanted by somebody else for a while
  // does not hold up all others.
  const int64_t finest = std::max(num_tasks, ranges.count / ranges.min_per_thread);
  const int64_t num_pieces = std::min({num_blocks, num_tasks == 1 ? 1 : num_tasks * kPiecesPerThread, finest});
  std::atomic<int64_t> next{0};
  run_tasks(static_cast<int>(num_tasks), [&](int) {
    for (int64_t index = next++; index < num_pieces; index = next++) {
      const int64_t begin = num_blocks * index / num_pieces * ranges.block;
      const int64_t end = std::min(num_blocks * (index + 1) / num_pieces * ranges.block, ranges.count);
      task(begin, end);
    }
  });
}

}  // namespace zerostd
