// A copy whose target nobody reads soon. A store to memory that is in no cache would first read it; these stores do not,
// and they leave in the caches what is there.
#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "zerostd_native.h"

int32_t zs_copy_past_caches(const void* from, int64_t num_bytes, void* to) {
  if (num_bytes < 0 || (num_bytes > 0 && (from == nullptr || to == nullptr))) return ZS_BAD_ARGUMENT;
  if (num_bytes == 0) return ZS_OK;
  const auto* source = static_cast<const uint8_t*>(from);
  auto* target = static_cast<uint8_t*>(to);
#if defined(__SSE2__)
  constexpr int64_t kLine = 64;
  const auto before = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(target) % kLine);
  const int64_t head = std::min(num_bytes, before);
  std::memcpy(target, source, static_cast<size_t>(head));
  const int64_t last = head + (num_bytes - head) / kLine * kLine;
  for (int64_t at = head; at < last; at += kLine) {
    const auto* line = reinterpret_cast<const __m128i*>(source + at);
    const __m128i a = _mm_loadu_si128(line);
    const __m128i b = _mm_loadu_si128(line + 1);
    const __m128i c = _mm_loadu_si128(line + 2);
    const __m128i d = _mm_loadu_si128(line + 3);
    auto* place = reinterpret_cast<__m128i*>(target + at);
    _mm_stream_si128(place, a);
    _mm_stream_si128(place + 1, b);
    _mm_stream_si128(place + 2, c);
    _mm_stream_si128(place + 3, d);
  }
  _mm_sfence();  // before anything that says that the copy is done
  std::memcpy(target + last, source + last, static_cast<size_t>(num_bytes - last));
#else
  std::memcpy(target, source, static_cast<size_t>(num_bytes));
#endif
  return ZS_OK;
}
