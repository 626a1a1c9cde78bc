// Compiled for AVX-512 F, BW, DQ and VL; called where the processor has them.
#include "updates.h"

#if defined(ZS_X86)
#include <immintrin.h>

#include "number_formats.h"

namespace zerostd {
namespace {

using Vector = __m512;
using HalfVector = __m256i;
using Bits = uint32_t __attribute__((vector_size(64)));
constexpr int64_t kWidth = 16, kVectors = 2;

ZS_INLINE __m256i load_halves(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
ZS_INLINE __m512i upper(__m256i halves) { return _mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16); }

ZS_INLINE Vector load(const float* from) { return _mm512_loadu_ps(from); }
ZS_INLINE Vector load(const BFloat16* from) { return _mm512_castsi512_ps(upper(load_halves(from))); }
ZS_INLINE Vector load(const Float16* from) { return _mm512_cvtph_ps(load_halves(from)); }

ZS_INLINE Vector join(const uint16_t* high, const int16_t* low) {
  const __m512i lower = _mm512_cvtepi16_epi32(load_halves(low));
  return _mm512_castsi512_ps(_mm512_add_epi32(upper(load_halves(high)), lower));
}

ZS_INLINE void store(float* to, Vector value, bool stream = false) {
  stream ? _mm512_stream_ps(to, value) : _mm512_storeu_ps(to, value);
}

ZS_INLINE void store(uint16_t* to, HalfVector value, bool stream = false) {
  __m256i* const target = reinterpret_cast<__m256i*>(to);
  stream ? _mm256_stream_si256(target, value) : _mm256_storeu_si256(target, value);
}

ZS_INLINE void fence() { _mm_sfence(); }

ZS_INLINE Vector broadcast(float value) { return _mm512_set1_ps(value); }
ZS_INLINE Vector negate(Vector a) { return _mm512_xor_ps(a, _mm512_set1_ps(-0.0f)); }
ZS_INLINE Vector root(Vector a) { return _mm512_sqrt_ps(a); }
ZS_INLINE Vector multiply_add(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }

ZS_INLINE Vector absolute(Vector a) { return _mm512_abs_ps(a); }
ZS_INLINE Vector smaller(Vector a, Vector b) { return _mm512_min_ps(a, b); }
ZS_INLINE Vector larger(Vector a, Vector b) { return _mm512_max_ps(a, b); }

ZS_INLINE Vector larger_bits(Vector a, Vector b) {
  return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
}

ZS_INLINE uint32_t largest_bits(Vector a) {
  return static_cast<uint32_t>(_mm512_reduce_max_epi32(_mm512_castps_si512(a)));
}

ZS_INLINE __m128i load_codes(const unsigned char* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}

ZS_INLINE Vector load_signed(const unsigned char* from) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_codes(from)));
}

ZS_INLINE Vector load_unsigned(const unsigned char* from) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(load_codes(from)));
}

ZS_INLINE void store_codes(unsigned char* to, Vector value) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(value)));
}

ZS_INLINE Bits bits_of(Vector a) { return (Bits)_mm512_castps_si512(a); }
ZS_INLINE Vector numbers_of(Bits a) { return _mm512_cvtepi32_ps((__m512i)a); }
ZS_INLINE HalfVector upper_halves(Bits a) { return _mm512_cvtepi32_epi16((__m512i)(a >> 16)); }

// bits where the number is one, else nan.
ZS_INLINE __m512i unless_nan(Vector value, __m512i bits, int nan) {
  return _mm512_mask_mov_epi32(bits, _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q), _mm512_set1_epi32(nan));
}

ZS_INLINE __m256i round_bf16(Vector value) {
  const __m512i bits = _mm512_castps_si512(value);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(unless_nan(value, rounded, 0x7FC00000), 16));
}

ZS_INLINE __m256i round_fp16(Vector value) { return _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT); }

ZS_INLINE void split(Vector value, HalfVector* high, HalfVector* low) {
  __m512i bits = unless_nan(value, _mm512_castps_si512(value), 0x7FC00000);
  const __m512i end = _mm512_and_si512(bits, _mm512_set1_epi32(0x1FFFF));
  const __mmask16 is_even_tie = _mm512_cmpeq_epi32_mask(end, _mm512_set1_epi32(0x8000));
  bits = _mm512_mask_sub_epi32(bits, is_even_tie, bits, _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_set1_epi32(0x8000));
  *high = _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
  *low = _mm512_cvtepi32_epi16(bits);
}

}  // namespace
}  // namespace zerostd

#include "update_vectors.h"

void zerostd::update_avx512(const zs_step& step, int64_t begin, int64_t end, Stream stream) {
  update_all(step, begin, end, stream);
}
#endif
