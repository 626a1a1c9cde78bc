// zs_update: checks a step, chooses the instructions and shares the elements out to threads.
#include "updates.h"

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "number_formats.h"
#include "thread_pool.h"

namespace zerostd {
namespace {

constexpr int64_t kBlock = 256;             // elements; a thread's share begins at a multiple of this
constexpr int64_t kMinPerThread = 1 << 14;  // elements; below this, waking a thread costs more than it brings
constexpr int64_t kStreamFrom = 1 << 20;    // elements; shorter arrays may well be read again out of the cache

int supported() {
#if defined(ZS_X86)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c")) return 0;
  const bool has_512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                       __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return has_512 ? 2 : 1;
#elif defined(ZS_NEON)
  return 1;
#else
  return 0;
#endif
}

std::atomic<int> level{supported()};

UpdateRange* choose() {
  switch (level.load(std::memory_order_relaxed)) {
#if defined(ZS_X86)
    case 2: return update_avx512;
    case 1: return update_avx2;
#elif defined(ZS_NEON)
    case 1: return update_neon;
#endif
    default: return update_baseline;
  }
}

bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 64 == 0; }  // NULL is, too

// Around the cache with AVX-512 only, whose stores fill a line each. Halves of a line, as AVX2 has them, are slower than
// the cache at best, and several times slower where the arrays lie at the same offset in a page (AMD Zen 3).
Stream choose_stream(const zs_step& step) {
  const bool is_long = step.count >= kStreamFrom && level.load(std::memory_order_relaxed) == 2;
  const zs_arrays& target = step.target;
  const bool are_states_aligned = is_aligned(target.states[0]) && is_aligned(target.states[1]);
  const bool is_target_aligned =  // codes of 8 bits never go around the cache
      is_aligned(target.master) && is_aligned(target.low) && (step.codec == ZS_INT8 || are_states_aligned);
  return {is_long && is_target_aligned, is_long && is_aligned(step.weight)};
}

bool is_known(const zs_step& step) {
  return step.rule >= ZS_ADAM && step.rule <= ZS_ADAGRAD && step.decay >= ZS_NO_DECAY &&
         step.decay <= (step.rule == ZS_ADAM ? ZS_DECOUPLED : ZS_COUPLED) && step.momentum >= ZS_NO_MOMENTUM &&
         step.momentum <= (step.rule == ZS_SGD ? ZS_CONTINUED : ZS_NO_MOMENTUM) && is_dtype(step.gradient_dtype) &&
         is_dtype(step.weight_dtype) && !step.source.low == !step.target.low &&
         step.codec >= ZS_NO_CODEC && step.codec <= ZS_BF16 &&
         (step.codec == ZS_NO_CODEC || (step.rule == ZS_ADAM && !step.root));
}

}  // namespace
}  // namespace zerostd

int32_t zs_update(const struct zs_step* step) {
  using namespace zerostd;
  if (!is_known(*step) || step->count < 0 || step->num_threads < 1) return ZS_BAD_ARGUMENT;
  UpdateRange* const update_range = choose();
  const Stream stream = choose_stream(*step);
  run_ranges({step->count, kBlock, kMinPerThread, step->num_threads},
             [&](int64_t begin, int64_t end) {
               const int32_t before = step->root_threads ? step->root_threads(1) : 0;
               update_range(*step, begin, end, stream);
               if (step->root_threads) step->root_threads(before);
             });
  return ZS_OK;
}

int32_t zs_limit_instructions(int32_t most) {
  const int used = std::min<int>(std::max<int32_t>(most, 0), zerostd::supported());
  zerostd::level.store(used, std::memory_order_relaxed);
  return used;
}
