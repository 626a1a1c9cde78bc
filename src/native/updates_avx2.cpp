// Compiled for AVX2, FMA and F16C; called where the processor has them.
#include "updates.h"

#if defined(ZS_X86)
#include <immintrin.h>

#include "number_formats.h"

namespace zerostd {
namespace {

using Vector = __m256;
using HalfVector = __m128i;
using Bits = uint32_t __attribute__((vector_size(32)));
constexpr int64_t kWidth = 8, kVectors = 2;

ZS_INLINE __m128i load_halves(const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); }
ZS_INLINE __m256i upper(__m128i halves) { return _mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16); }

ZS_INLINE Vector load(const float* from) { return _mm256_loadu_ps(from); }
ZS_INLINE Vector load(const BFloat16* from) { return _mm256_castsi256_ps(upper(load_halves(from))); }
ZS_INLINE Vector load(const Float16* from) { return _mm256_cvtph_ps(load_halves(from)); }

ZS_INLINE Vector join(const uint16_t* high, const int16_t* low) {
  const __m256i lower = _mm256_cvtepi16_epi32(load_halves(low));
  return _mm256_castsi256_ps(_mm256_add_epi32(upper(load_halves(high)), lower));
}

ZS_INLINE void store(float* to, Vector value, bool = false) { _mm256_storeu_ps(to, value); }

ZS_INLINE void store(uint16_t* to, HalfVector value, bool = false) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), value);
}

ZS_INLINE void fence() {}

ZS_INLINE Vector broadcast(float value) { return _mm256_set1_ps(value); }
ZS_INLINE Vector negate(Vector a) { return _mm256_xor_ps(a, _mm256_set1_ps(-0.0f)); }
ZS_INLINE Vector root(Vector a) { return _mm256_sqrt_ps(a); }
ZS_INLINE Vector multiply_add(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }

ZS_INLINE Vector absolute(Vector a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
ZS_INLINE Vector smaller(Vector a, Vector b) { return _mm256_min_ps(a, b); }
ZS_INLINE Vector larger(Vector a, Vector b) { return _mm256_max_ps(a, b); }

ZS_INLINE Vector larger_bits(Vector a, Vector b) {
  return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b)));
}

ZS_INLINE uint32_t largest_bits(Vector a) {
  const __m256i bits = _mm256_castps_si256(a);
  __m128i most = _mm_max_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
  most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4E));
  most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0xB1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(most));
}

ZS_INLINE __m128i load_codes(const unsigned char* from) {
  return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
}

ZS_INLINE Vector load_signed(const unsigned char* from) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_codes(from)));
}

ZS_INLINE Vector load_unsigned(const unsigned char* from) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load_codes(from)));
}

ZS_INLINE void store_codes(unsigned char* to, Vector value) {
  const __m256i codes = _mm256_and_si256(_mm256_cvtps_epi32(value), _mm256_set1_epi32(0xFF));
  const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(halves, halves));
}

// The lower half of each 32-bit number.
ZS_INLINE __m128i lower_halves(__m256i bits) {
  const __m256i clean = _mm256_and_si256(bits, _mm256_set1_epi32(0xFFFF));
  return _mm_packus_epi32(_mm256_castsi256_si128(clean), _mm256_extracti128_si256(clean, 1));
}

ZS_INLINE Bits bits_of(Vector a) { return (Bits)_mm256_castps_si256(a); }
ZS_INLINE Vector numbers_of(Bits a) { return _mm256_cvtepi32_ps((__m256i)a); }
ZS_INLINE HalfVector upper_halves(Bits a) { return lower_halves((__m256i)(a >> 16)); }

// bits where the number is one, else nan.
ZS_INLINE __m256i unless_nan(Vector value, __m256i bits, int nan) {
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(bits, _mm256_set1_epi32(nan), is_nan);
}

ZS_INLINE __m128i round_bf16(Vector value) {
  const __m256i bits = _mm256_castps_si256(value);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
  return lower_halves(_mm256_srli_epi32(unless_nan(value, rounded, 0x7FC00000), 16));
}

ZS_INLINE __m128i round_fp16(Vector value) { return _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT); }

ZS_INLINE void split(Vector value, HalfVector* high, HalfVector* low) {
  __m256i bits = unless_nan(value, _mm256_castps_si256(value), 0x7FC00000);
  const __m256i end = _mm256_and_si256(bits, _mm256_set1_epi32(0x1FFFF));
  bits = _mm256_add_epi32(bits, _mm256_cmpeq_epi32(end, _mm256_set1_epi32(0x8000)));  // minus one for an even tie
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_set1_epi32(0x8000));
  *high = lower_halves(_mm256_srli_epi32(rounded, 16));
  *low = lower_halves(bits);
}

}  // namespace
}  // namespace zerostd

#include "update_vectors.h"

void zerostd::update_avx2(const zs_step& step, int64_t begin, int64_t end, Stream stream) {
  update_all(step, begin, end, stream);
}
#endif
