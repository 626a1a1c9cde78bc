// For 64-bit Arm, all of which have these instructions.
#include "updates.h"

#if defined(ZS_NEON)
#include <arm_neon.h>

#include "number_formats.h"

namespace zerostd {
namespace {

using Vector = float32x4_t;
using HalfVector = uint16x4_t;
using Bits = uint32_t __attribute__((vector_size(16)));
constexpr int64_t kWidth = 4, kVectors = 4;

ZS_INLINE uint32x4_t upper(const uint16_t* halves) { return vshlq_n_u32(vmovl_u16(vld1_u16(halves)), 16); }

ZS_INLINE Vector load(const float* from) { return vld1q_f32(from); }
ZS_INLINE Vector load(const BFloat16* from) { return vreinterpretq_f32_u32(upper(&from->bits)); }
ZS_INLINE Vector load(const Float16* from) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&from->bits))); }

ZS_INLINE Vector join(const uint16_t* high, const int16_t* low) {
  return vreinterpretq_f32_u32(vaddq_u32(upper(high), vreinterpretq_u32_s32(vmovl_s16(vld1_s16(low)))));
}

ZS_INLINE void store(float* to, Vector value, bool = false) { vst1q_f32(to, value); }
ZS_INLINE void store(uint16_t* to, HalfVector value, bool = false) { vst1_u16(to, value); }

ZS_INLINE void fence() {}

ZS_INLINE Vector broadcast(float value) { return vdupq_n_f32(value); }
ZS_INLINE Vector negate(Vector a) { return vnegq_f32(a); }
ZS_INLINE Vector root(Vector a) { return vsqrtq_f32(a); }
ZS_INLINE Vector multiply_add(Vector a, Vector b, Vector c) { return vfmaq_f32(c, a, b); }

ZS_INLINE Vector absolute(Vector a) { return vabsq_f32(a); }
ZS_INLINE Vector smaller(Vector a, Vector b) { return vminq_f32(a, b); }
ZS_INLINE Vector larger(Vector a, Vector b) { return vmaxq_f32(a, b); }

ZS_INLINE Vector larger_bits(Vector a, Vector b) {
  return vreinterpretq_f32_s32(vmaxq_s32(vreinterpretq_s32_f32(a), vreinterpretq_s32_f32(b)));
}

ZS_INLINE uint32_t largest_bits(Vector a) { return static_cast<uint32_t>(vmaxvq_s32(vreinterpretq_s32_f32(a))); }

ZS_INLINE uint8x8_t load_codes(const unsigned char* from) {
  uint32_t codes;
  std::memcpy(&codes, from, sizeof codes);
  return vcreate_u8(codes);
}

ZS_INLINE Vector load_signed(const unsigned char* from) {
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(load_codes(from))))));
}

ZS_INLINE Vector load_unsigned(const unsigned char* from) {
  return vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(load_codes(from)))));
}

ZS_INLINE void store_codes(unsigned char* to, Vector value) {
  const int16x4_t halves = vmovn_s32(vcvtnq_s32_f32(value));
  const uint32_t codes = vget_lane_u32(vreinterpret_u32_s8(vmovn_s16(vcombine_s16(halves, halves))), 0);
  std::memcpy(to, &codes, sizeof codes);
}

ZS_INLINE Bits bits_of(Vector a) { return (Bits)vreinterpretq_u32_f32(a); }
ZS_INLINE Vector numbers_of(Bits a) { return vcvtq_f32_u32((uint32x4_t)a); }
ZS_INLINE HalfVector upper_halves(Bits a) { return vshrn_n_u32((uint32x4_t)a, 16); }

// bits where the number is one, else nan.
ZS_INLINE uint32x4_t unless_nan(Vector value, uint32x4_t bits, uint32_t nan) {
  return vbslq_u32(vceqq_f32(value, value), bits, vdupq_n_u32(nan));
}

ZS_INLINE HalfVector round_bf16(Vector value) {
  const uint32x4_t bits = vreinterpretq_u32_f32(value);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7FFF)), odd);
  return vshrn_n_u32(unless_nan(value, rounded, 0x7FC00000u), 16);
}

ZS_INLINE HalfVector round_fp16(Vector value) { return vreinterpret_u16_f16(vcvt_f16_f32(value)); }

ZS_INLINE void split(Vector value, HalfVector* high, HalfVector* low) {
  uint32x4_t bits = unless_nan(value, vreinterpretq_u32_f32(value), 0x7FC00000u);
  const uint32x4_t end = vandq_u32(bits, vdupq_n_u32(0x1FFFF));
  bits = vaddq_u32(bits, vceqq_u32(end, vdupq_n_u32(0x8000)));  // minus one for an even tie
  *high = vshrn_n_u32(vaddq_u32(bits, vdupq_n_u32(0x8000)), 16);
  *low = vmovn_u32(bits);
}

}  // namespace
}  // namespace zerostd

#include "update_vectors.h"

void zerostd::update_neon(const zs_step& step, int64_t begin, int64_t end, Stream stream) {
  update_all(step, begin, end, stream);
}
#endif
