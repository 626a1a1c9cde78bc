// Operations over whole arrays that read or write every element once: norm, cast, copy, first touch.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "clones.h"
#include "number_formats.h"
#include "thread_pool.h"
#include "zerostd_native.h"

namespace zerostd {
namespace {

constexpr int64_t kNormBlock = 4096;        // elements; part of what zs_square_norm promises, as is kNumLanes
constexpr int64_t kNumLanes = 16;           // running sums
constexpr int64_t kCastBlock = 2048;        // elements
constexpr int64_t kPage = 4096;             // bytes
constexpr int64_t kMinPerThread = 1 << 15;  // elements; below this, waking a thread costs more than it brings
constexpr int64_t kMinBytesPerThread = 1 << 18;
constexpr int64_t kMinTouchedPerThread = 1 << 22;  // bytes

template <typename T>
ZS_INLINE void read_as(const void* from, int64_t begin, int64_t count, float* block) {
  const T* numbers = static_cast<const T*>(from) + begin;
  for (int64_t i = 0; i < count; ++i) block[i] = to_float(numbers[i]);
}

ZS_INLINE void read(const void* from, int32_t dtype, int64_t begin, int64_t count, float* block) {
  switch (dtype) {
    case ZS_FLOAT32: return read_as<float>(from, begin, count, block);
    case ZS_BFLOAT16: return read_as<BFloat16>(from, begin, count, block);
    case ZS_FLOAT16: return read_as<Float16>(from, begin, count, block);
  }
}

template <typename T>
ZS_INLINE void write_as(const float* block, int64_t begin, int64_t count, void* to) {
  T* numbers = static_cast<T*>(to) + begin;
  for (int64_t i = 0; i < count; ++i) from_float(block[i], numbers + i);
}

ZS_CLONES double square_block(const void* data, int32_t dtype, int64_t begin, int64_t count) {
  alignas(64) float numbers[kNormBlock];
  alignas(64) double sums[kNumLanes] = {};
  read(data, dtype, begin, count, numbers);
  const int64_t padded = (count + kNumLanes - 1) / kNumLanes * kNumLanes;
  for (int64_t i = count; i < padded; ++i) numbers[i] = 0.0f;
  for (int64_t i = 0; i < padded; i += kNumLanes) {
    for (int64_t lane = 0; lane < kNumLanes; ++lane) {
      const double number = numbers[i + lane];
      sums[lane] += number * number;
    }
  }
  double sum = 0.0;
  for (double lane : sums) sum += lane;
  return sum;
}

struct Cast {
  const void* source;
  int32_t source_dtype;
  void* target;
  int32_t target_dtype;
};

ZS_CLONES void cast_range(const Cast& cast, int64_t begin, int64_t end) {
  alignas(64) float block[kCastBlock];
  for (int64_t at = begin; at < end; at += kCastBlock) {
    const int64_t count = std::min(kCastBlock, end - at);
    read(cast.source, cast.source_dtype, at, count, block);
    switch (cast.target_dtype) {
      case ZS_FLOAT32: write_as<float>(block, at, count, cast.target); break;
      case ZS_BFLOAT16: write_as<BFloat16>(block, at, count, cast.target); break;
      case ZS_FLOAT16: write_as<Float16>(block, at, count, cast.target); break;
    }
  }
}

}  // namespace
}  // namespace zerostd

int32_t zs_square_norm(const void* data, int32_t dtype, int64_t count, int32_t num_threads, double* sum) {
  using namespace zerostd;
  if (!is_dtype(dtype) || count < 0 || num_threads < 1) return ZS_BAD_ARGUMENT;
  std::vector<double> blocks(static_cast<size_t>((count + kNormBlock - 1) / kNormBlock));
  run_ranges({count, kNormBlock, kMinPerThread, num_threads}, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; at += kNormBlock) {
      const int64_t length = std::min(kNormBlock, end - at);
      blocks[static_cast<size_t>(at / kNormBlock)] = square_block(data, dtype, at, length);
    }
  });
  *sum = 0.0;
  for (double block : blocks) *sum += block;
  return ZS_OK;
}

int32_t zs_cast(const void* source, int32_t source_dtype, void* target, int32_t target_dtype, int64_t count,
                int32_t num_threads) {
  using namespace zerostd;
  if (!is_dtype(source_dtype) || !is_dtype(target_dtype) || count < 0 || num_threads < 1) return ZS_BAD_ARGUMENT;
  const Cast cast{source, source_dtype, target, target_dtype};
  run_ranges({count, kCastBlock, kMinPerThread, num_threads},
             [&](int64_t begin, int64_t end) { cast_range(cast, begin, end); });
  return ZS_OK;
}

int32_t zs_copy(const void* source, void* target, int64_t num_bytes, int32_t num_threads) {
  using namespace zerostd;
  if (num_bytes < 0 || num_threads < 1) return ZS_BAD_ARGUMENT;
  run_ranges({num_bytes, kPage, kMinBytesPerThread, num_threads}, [&](int64_t begin, int64_t end) {
    std::memcpy(static_cast<char*>(target) + begin, static_cast<const char*>(source) + begin,
                static_cast<size_t>(end - begin));
  });
  return ZS_OK;
}

int32_t zs_touch(void* data, int64_t num_bytes, int32_t num_threads) {
  using namespace zerostd;
  if (num_bytes < 0 || num_threads < 1) return ZS_BAD_ARGUMENT;
  if (num_bytes == 0) return ZS_OK;
  volatile char* bytes = static_cast<volatile char*>(data);
  bytes[0] = 0;
  const int64_t first = kPage - static_cast<int64_t>(reinterpret_cast<uintptr_t>(data) % kPage);  // the next page
  run_ranges({std::max<int64_t>(num_bytes - first, 0), kPage, kMinTouchedPerThread, num_threads},
             [&](int64_t begin, int64_t end) {
               for (int64_t at = begin; at < end; at += kPage) bytes[first + at] = 0;
             });
  return ZS_OK;
}
