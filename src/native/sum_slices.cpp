// The fixed-order sum of received slices. The slices are read block by block into an fp32 total that stays in the L1
// cache, so every element crosses the memory bus once, whatever num_slices is.
#include <algorithm>
#include <cstdint>

#include "clones.h"
#include "number_formats.h"
#include "thread_pool.h"
#include "zerostd_native.h"

namespace zerostd {
namespace {

constexpr int64_t kBlock = 2048;            // elements; 8 KiB of totals
constexpr int64_t kMinPerThread = 1 << 15;  // elements; below this, waking a thread costs more than it brings

struct Sum {
  const void* received;
  int32_t received_dtype;
  int64_t num_slices;
  int64_t slice_len;
  float factor;
  void* out;
  int32_t out_dtype;
  bool accumulate;
};

template <typename T>
ZS_INLINE void sum_block_as(const Sum& sum, int64_t begin, int64_t count, float* total) {
  const T* slice = static_cast<const T*>(sum.received) + begin;
  for (int64_t i = 0; i < count; ++i) total[i] = to_float(slice[i]);
  for (int64_t s = 1; s < sum.num_slices; ++s) {
    slice += sum.slice_len;
    for (int64_t i = 0; i < count; ++i) total[i] += to_float(slice[i]);
  }
  for (int64_t i = 0; i < count; ++i) total[i] *= sum.factor;
}

template <typename T>
ZS_INLINE void write_block_as(const Sum& sum, int64_t begin, int64_t count, const float* total) {
  T* out = static_cast<T*>(sum.out) + begin;
  for (int64_t i = 0; i < count; ++i) from_float(total[i], out + i);
}

ZS_INLINE void add_block(const Sum& sum, int64_t begin, int64_t count, const float* total) {
  float* out = static_cast<float*>(sum.out) + begin;
  for (int64_t i = 0; i < count; ++i) out[i] += total[i];
}

ZS_CLONES void sum_range(const Sum& sum, int64_t begin, int64_t end) {
  alignas(64) float total[kBlock];
  for (int64_t at = begin; at < end; at += kBlock) {
    const int64_t count = std::min(kBlock, end - at);
    switch (sum.received_dtype) {
      case ZS_FLOAT32: sum_block_as<float>(sum, at, count, total); break;
      case ZS_BFLOAT16: sum_block_as<BFloat16>(sum, at, count, total); break;
      case ZS_FLOAT16: sum_block_as<Float16>(sum, at, count, total); break;
    }
    if (sum.accumulate) {
      add_block(sum, at, count, total);
      continue;
    }
    switch (sum.out_dtype) {
      case ZS_FLOAT32: write_block_as<float>(sum, at, count, total); break;
      case ZS_BFLOAT16: write_block_as<BFloat16>(sum, at, count, total); break;
      case ZS_FLOAT16: write_block_as<Float16>(sum, at, count, total); break;
    }
  }
}

}  // namespace
}  // namespace zerostd

int32_t zs_abi_version(void) { return ZS_ABI_VERSION; }

int32_t zs_sum_slices(const void* received, int32_t received_dtype, int64_t num_slices, int64_t slice_len, float factor,
                      void* out, int32_t out_dtype, int32_t accumulate, int32_t num_threads) {
  using namespace zerostd;
  if (!is_dtype(received_dtype) || !is_dtype(out_dtype) || num_slices < 1 || slice_len < 0 || num_threads < 1 ||
      (accumulate && out_dtype != ZS_FLOAT32)) {
    return ZS_BAD_ARGUMENT;
  }
  const Sum sum{received, received_dtype, num_slices, slice_len, factor, out, out_dtype, accumulate != 0};
  run_ranges({slice_len, kBlock, kMinPerThread, num_threads},
             [&](int64_t begin, int64_t end) { sum_range(sum, begin, end); });
  return ZS_OK;
}
