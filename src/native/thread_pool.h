// Threads that stay: made when first asked for, asleep between calls, never joined.
// A caller takes part in its own work, so a call makes progress even where no thread can be made, and several callers
// may run at once. After a fork the child starts with an empty pool; at exit the threads die with the process.
#pragma once

#include <functional>

namespace zerostd {

// Calls task(0) ... task(num_tasks - 1), each once, on up to num_tasks threads; returns when all have returned.
// Tasks must not throw. They run in the caller's floating-point environment.
void run_tasks(int num_tasks, const std::function<void(int)>& task);

}  // namespace zerostd
