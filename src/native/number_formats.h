// bf16 and fp16 to fp32 and back, bit for bit as torch does it (a NaN stays a NaN; its payload may differ).
// Branch-free, integers and fp32 only, so that loops over them vectorise on every instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__GNUC__)
#define ZS_INLINE inline __attribute__((always_inline))
#else
#define ZS_INLINE inline
#endif

namespace zerostd {

// The numbers of zs_dtype.
ZS_INLINE bool is_dtype(int32_t dtype) { return dtype >= 0 && dtype <= 2; }

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

ZS_INLINE uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

ZS_INLINE float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

ZS_INLINE float to_float(float value) { return value; }

ZS_INLINE float to_float(BFloat16 value) { return float_of(uint32_t{value.bits} << 16); }

ZS_INLINE float to_float(Float16 value) {
  const uint32_t shifted = uint32_t{value.bits} << 16;  // sign at bit 31, exponent at 26, mantissa at 16
  const uint32_t sign = shifted & 0x80000000u;
  const uint32_t magnitude = shifted & 0x7FFFFFFFu;
  // Normal, infinite, NaN: move into place with the exponent raised by 224, which carries fp16's largest exponent to
  // fp32's, then take 112 back by an exact multiplication.
  const float normal = float_of((magnitude >> 3) + 0x70000000u) * 0x1.0p-112f;
  // Subnormal: lay the mantissa under the exponent of 0.5 and subtract 0.5; exact as well.
  const float subnormal = float_of((magnitude >> 16) | 0x3F000000u) - 0.5f;
  return float_of(sign | bits_of(magnitude < 0x04000000u ? subnormal : normal));
}

ZS_INLINE void from_float(float value, float* out) { *out = value; }

ZS_INLINE void from_float(float value, BFloat16* out) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;  // rounding could carry a NaN to infinity
  out->bits = static_cast<uint16_t>(is_nan ? 0x7FC0u : rounded);
}

ZS_INLINE void from_float(float value, Float16* out) {
  const uint32_t bits = bits_of(value);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  // What is too large becomes infinity in the first product; the second brings the rest to 4 times its size.
  const float scaled = (float_of(magnitude) * 0x1.0p+112f) * 0x1.0p-110f;
  // Adding a power of two 2^15 above the value (and at least that of the smallest normal) leaves the 10 mantissa bits
  // that fp16 keeps at the bottom: the addition does the rounding to nearest even, subnormals included.
  const uint32_t exponent = magnitude & 0x7F800000u;
  const uint32_t bias = (exponent > 0x38800000u ? exponent : 0x38800000u) + 0x07800000u;
  const uint32_t sum = bits_of(float_of(bias) + scaled);
  const uint32_t rounded = ((sum >> 13) & 0x7C00u) + (sum & 0x0FFFu);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  out->bits = static_cast<uint16_t>(sign | (magnitude > 0x7F800000u ? 0x7E00u : rounded));
}

}  // namespace zerostd
