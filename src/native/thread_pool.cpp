#include "thread_pool.h"

#include <pthread.h>

#include <cfenv>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

namespace zerostd {
namespace {

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

}  // namespace zerostd
