// Threads that stay: made when first asked for, asleep between calls, never joined.
// A caller takes part in its own work, so a call makes progress even where no thread can be made, and several callers
// may run at once. After a fork the child starts with an empty pool; at exit the threads die with the process.
#pragma once

#include <cstdint>
#include <functional>

namespace zerostd {

// Calls task(0) ... task(num_tasks - 1), each once, on up to num_tasks threads; returns when all have returned.
// Tasks must not throw. They run in the caller's floating-point environment.
void run_tasks(int num_tasks, const std::function<void(int)>& task);

struct Ranges {
  int64_t count;           // elements in all
  int64_t block;           // every range but the last ends at a multiple of this
  int64_t min_per_thread;  // below this, waking a thread costs more than it brings
  int num_threads;
};

// Calls task(begin, end) for ranges that cover 0 ... count, as run_tasks does. Not at all when count is 0.
void run_ranges(const Ranges& ranges, const std::function<void(int64_t, int64_t)>& task);

}  // namespace zerostd
