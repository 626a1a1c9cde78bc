// Numbers as planes of bytes, for a coder that has a plane of exponents to itself. Each number is turned left by one bit,
// so that its sign is the last bit and a bf16 or fp32 number has its exponent in one byte. Planes go from that byte to the
// lowest.
#include <cstdint>

#include "clones.h"
#include "zerostd_native.h"

namespace zerostd {
namespace {

ZS_CLONES void split_pairs(const uint16_t* values, int64_t count, uint8_t* first, uint8_t* second) {
  for (int64_t i = 0; i < count; ++i) {
    const uint16_t turned = static_cast<uint16_t>((values[i] << 1) | (values[i] >> 15));
    first[i] = static_cast<uint8_t>(turned >> 8);
    second[i] = static_cast<uint8_t>(turned);
  }
}

ZS_CLONES void join_pairs(const uint8_t* first, const uint8_t* second, int64_t count, uint16_t* values) {
  for (int64_t i = 0; i < count; ++i) {
    const uint16_t turned = static_cast<uint16_t>((first[i] << 8) | second[i]);
    values[i] = static_cast<uint16_t>((turned >> 1) | (turned << 15));
  }
}

ZS_CLONES void split_quads(const uint32_t* values, int64_t count, uint8_t* const* planes) {
  uint8_t *first = planes[0], *second = planes[1], *third = planes[2], *fourth = planes[3];
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t turned = (values[i] << 1) | (values[i] >> 31);
    first[i] = static_cast<uint8_t>(turned >> 24);
    second[i] = static_cast<uint8_t>(turned >> 16);
    third[i] = static_cast<uint8_t>(turned >> 8);
    fourth[i] = static_cast<uint8_t>(turned);
  }
}

ZS_CLONES void join_quads(const uint8_t* const* planes, int64_t count, uint32_t* values) {
  const uint8_t *first = planes[0], *second = planes[1], *third = planes[2], *fourth = planes[3];
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t turned = (static_cast<uint32_t>(first[i]) << 24) | (static_cast<uint32_t>(second[i]) << 16) |
                            (static_cast<uint32_t>(third[i]) << 8) | fourth[i];
    values[i] = (turned >> 1) | (turned << 31);
  }
}

bool is_bad(const void* values, int64_t count, int32_t item_bytes, const void* planes) {
  return count < 0 || (count > 0 && (!values || !planes)) || (item_bytes != 2 && item_bytes != 4);
}

}  // namespace
}  // namespace zerostd

int32_t zs_split_planes(const void* values, int64_t count, int32_t item_bytes, void* const* planes) {
  if (zerostd::is_bad(values, count, item_bytes, planes)) return ZS_BAD_ARGUMENT;
  uint8_t* const* bytes = reinterpret_cast<uint8_t* const*>(planes);
  if (count == 0) return ZS_OK;
  if (item_bytes == 2) {
    zerostd::split_pairs(static_cast<const uint16_t*>(values), count, bytes[0], bytes[1]);
  } else {
    zerostd::split_quads(static_cast<const uint32_t*>(values), count, bytes);
  }
  return ZS_OK;
}

int32_t zs_join_planes(const void* const* planes, int64_t count, int32_t item_bytes, void* values) {
  if (zerostd::is_bad(values, count, item_bytes, planes)) return ZS_BAD_ARGUMENT;
  const uint8_t* const* bytes = reinterpret_cast<const uint8_t* const*>(planes);
  if (count == 0) return ZS_OK;
  if (item_bytes == 2) {
    zerostd::join_pairs(bytes[0], bytes[1], count, static_cast<uint16_t*>(values));
  } else {
    zerostd::join_quads(bytes, count, static_cast<uint32_t*>(values));
  }
  return ZS_OK;
}
