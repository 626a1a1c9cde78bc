// One number at a time, for every processor.
#include "number_formats.h"
#include "updates.h"

namespace zerostd {
namespace {

using Vector = float;
using HalfVector = uint16_t;
using Bits = uint32_t;
constexpr int64_t kWidth = 1, kVectors = 1;

template <typename T>
ZS_INLINE Vector load(const T* from) {
  return to_float(*from);
}

ZS_INLINE Vector join(const uint16_t* high, const int16_t* low) {
  return float_of((uint32_t{*high} << 16) + static_cast<uint32_t>(int32_t{*low}));
}

template <typename T>
ZS_INLINE void store(T* to, T value, bool = false) {
  *to = value;
}

ZS_INLINE void fence() {}

ZS_INLINE Vector broadcast(float value) { return value; }
ZS_INLINE Vector negate(Vector a) { return -a; }
ZS_INLINE Vector root(Vector a) { return __builtin_sqrtf(a); }

ZS_INLINE Vector absolute(Vector a) { return float_of(bits_of(a) & 0x7FFFFFFFu); }
ZS_INLINE Vector smaller(Vector a, Vector b) { return a < b ? a : b; }
ZS_INLINE Vector larger(Vector a, Vector b) { return a > b ? a : b; }
ZS_INLINE Vector larger_bits(Vector a, Vector b) { return bits_of(a) > bits_of(b) ? a : b; }
ZS_INLINE uint32_t largest_bits(Vector a) { return bits_of(a); }
ZS_INLINE Vector numbers_of(Bits a) { return static_cast<float>(static_cast<int32_t>(a)); }
ZS_INLINE HalfVector upper_halves(Bits a) { return static_cast<uint16_t>(a >> 16); }
ZS_INLINE Vector load_signed(const unsigned char* from) { return static_cast<signed char>(*from); }
ZS_INLINE Vector load_unsigned(const unsigned char* from) { return *from; }

// The sum with 1.5 * 2^23 rounds to nearest even.
ZS_INLINE void store_codes(unsigned char* to, Vector value) {
  *to = static_cast<unsigned char>(static_cast<int32_t>((value + 12582912.0f) - 12582912.0f));
}

// Rounded once where torch's vectors have FMA (Arm), else twice, as there.
ZS_INLINE Vector multiply_add(Vector a, Vector b, Vector c) {
#if defined(__FP_FAST_FMAF)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

template <typename T>
ZS_INLINE uint16_t round_as(Vector value) {
  T rounded;
  from_float(value, &rounded);
  return rounded.bits;
}

ZS_INLINE uint16_t round_bf16(Vector value) { return round_as<BFloat16>(value); }
ZS_INLINE uint16_t round_fp16(Vector value) { return round_as<Float16>(value); }

ZS_INLINE void split(Vector value, HalfVector* high, HalfVector* low) {
  uint32_t bits = value != value ? 0x7FC00000u : bits_of(value);
  bits -= (bits & 0x1FFFFu) == 0x8000u;  // an even tie
  *high = static_cast<uint16_t>((bits + 0x8000u) >> 16);
  *low = static_cast<uint16_t>(bits);
}

}  // namespace
}  // namespace zerostd

#include "update_vectors.h"

void zerostd::update_baseline(const zs_step& step, int64_t begin, int64_t end, Stream stream) {
  update_all(step, begin, end, stream);
}
