// zs_crc32 and zs_crc32_pages: the checksum of zlib (and of Ethernet, gzip and PNG), several times as fast: by carry-less multiplication on
// x86, by the processor's own instruction on Arm, by tables of eight bytes elsewhere.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#include "zerostd_native.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define ZS_FOLDS
#include <immintrin.h>
#elif defined(__aarch64__) && defined(__GNUC__) && defined(__linux__)
#define ZS_HAS_INSTRUCTION
#include <sys/auxv.h>
#endif

namespace zerostd {
namespace {

constexpr uint32_t kPolynomial = 0xedb88320;  // bits reversed, as all of it

// kTables[k][b]: what byte b does to the checksum when k more bytes follow it.
using Tables = std::array<std::array<uint32_t, 256>, 8>;

constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? kPolynomial : 0);
    tables[0][byte] = crc;
  }
  for (size_t k = 1; k < 8; ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      tables[k][byte] = (tables[k - 1][byte] >> 8) ^ tables[0][tables[k - 1][byte] & 255];
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

// These take and return the register as it is inside: the checksum with all bits turned.

uint32_t by_tables(uint32_t crc, const unsigned char* data, int64_t count) {
  for (; count >= 8; data += 8, count -= 8) {
    crc ^= static_cast<uint32_t>(data[0]) | static_cast<uint32_t>(data[1]) << 8 | static_cast<uint32_t>(data[2]) << 16 |
           static_cast<uint32_t>(data[3]) << 24;
    crc = kTables[7][crc & 255] ^ kTables[6][crc >> 8 & 255] ^ kTables[5][crc >> 16 & 255] ^ kTables[4][crc >> 24] ^
          kTables[3][data[4]] ^ kTables[2][data[5]] ^ kTables[1][data[6]] ^ kTables[0][data[7]];
  }
  for (; count > 0; ++data, --count) crc = (crc >> 8) ^ kTables[0][(crc ^ *data) & 255];
  return crc;
}

#if defined(ZS_FOLDS)

// Gopal and others, "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel, 2009: what is
// behind 16 bytes is a polynomial times a power of x, so 16 bytes fold onto those 16 or 64 further on. The numbers are
// powers of x modulo the polynomial, bits reversed, and for the last step the polynomial and its inverse.
__attribute__((target("pclmul,sse4.1"))) inline __m128i fold(__m128i from, __m128i by, __m128i onto) {
  const __m128i low = _mm_clmulepi64_si128(from, by, 0x00), high = _mm_clmulepi64_si128(from, by, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), onto);
}

__attribute__((target("pclmul,sse4.1"))) inline __m128i read(const unsigned char* data) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data));
}

constexpr int64_t kLeast = 64;  // bytes

// count: at least kLeast, and a multiple of 16.
__attribute__((target("pclmul,sse4.1"))) uint32_t by_folding(uint32_t crc, const unsigned char* data, int64_t count) {
  const __m128i by_64 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4);
  const __m128i by_16 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
  const __m128i by_8 = _mm_set_epi64x(0, 0x0163cd6124);
  const __m128i polynomial = _mm_set_epi64x(0x01f7011641, 0x01db710641);
  const __m128i low_words = _mm_setr_epi32(~0, 0, ~0, 0);
  __m128i a = _mm_xor_si128(read(data), _mm_cvtsi32_si128(static_cast<int>(crc)));
  __m128i b = read(data + 16), c = read(data + 32), d = read(data + 48);
  for (data += 64, count -= 64; count >= 64; data += 64, count -= 64) {
    a = fold(a, by_64, read(data));
    b = fold(b, by_64, read(data + 16));
    c = fold(c, by_64, read(data + 32));
    d = fold(d, by_64, read(data + 48));
  }
  a = fold(fold(fold(a, by_16, b), by_16, c), by_16, d);
  for (; count >= 16; data += 16, count -= 16) a = fold(a, by_16, read(data));
  // 128 bits to 96, to 64, and by Barrett's reduction to 32
  a = _mm_xor_si128(_mm_srli_si128(a, 8), _mm_clmulepi64_si128(a, by_16, 0x10));
  a = _mm_xor_si128(_mm_srli_si128(a, 4), _mm_clmulepi64_si128(_mm_and_si128(a, low_words), by_8, 0x00));
  __m128i whole = _mm_clmulepi64_si128(_mm_and_si128(a, low_words), polynomial, 0x10);
  whole = _mm_clmulepi64_si128(_mm_and_si128(whole, low_words), polynomial, 0x00);
  return static_cast<uint32_t>(_mm_extract_epi32(_mm_xor_si128(a, whole), 1));
}

// The same with registers of 32 bytes, eight of them: twice as fast where memory keeps up.
#define ZS_WIDE __attribute__((target("avx2,vpclmulqdq,pclmul,sse4.1")))

ZS_WIDE inline __m256i fold_wide(__m256i from, __m256i by, __m256i onto) {
  const __m256i low = _mm256_clmulepi64_epi128(from, by, 0x00), high = _mm256_clmulepi64_epi128(from, by, 0x11);
  return _mm256_xor_si256(_mm256_xor_si256(low, high), onto);
}

ZS_WIDE inline __m256i read_wide(const unsigned char* data) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data));
}

constexpr int64_t kLeastWide = 512;  // bytes

// count: at least kLeastWide, and a multiple of 16. What eight registers hold in the end is a message of its own, with
// the same remainder as all bytes before, so it is summed as 256 bytes from a register of zeros.
ZS_WIDE uint32_t by_wide_folding(uint32_t crc, const unsigned char* data, int64_t count) {
  const __m256i by_256 = _mm256_broadcastsi128_si256(_mm_set_epi64x(0x01322d1430, 0x011542778a));
  __m256i parts[8];
  for (int k = 0; k < 8; ++k) parts[k] = read_wide(data + 32 * k);
  parts[0] = _mm256_xor_si256(parts[0], _mm256_zextsi128_si256(_mm_cvtsi32_si128(static_cast<int>(crc))));
  for (data += 256, count -= 256; count >= 256; data += 256, count -= 256) {
    for (int k = 0; k < 8; ++k) parts[k] = fold_wide(parts[k], by_256, read_wide(data + 32 * k));
  }
  alignas(32) unsigned char rest[256];
  for (int k = 0; k < 8; ++k) _mm256_store_si256(reinterpret_cast<__m256i*>(rest + 32 * k), parts[k]);
  crc = by_folding(0, rest, 256);
  return count >= kLeast ? by_folding(crc, data, count) : by_tables(crc, data, count);
}

uint32_t best(uint32_t crc, const unsigned char* data, int64_t count) {
  static const bool can_fold = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  if (!can_fold || count < kLeast) return by_tables(crc, data, count);
  static const bool can_fold_wide = __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx2");
  const int64_t folded = count / 16 * 16;
  crc = (can_fold_wide && folded >= kLeastWide ? by_wide_folding : by_folding)(crc, data, folded);
  return by_tables(crc, data + folded, count - folded);
}

#elif defined(ZS_HAS_INSTRUCTION)

uint32_t best(uint32_t crc, const unsigned char* data, int64_t count) {
  static const bool has_it = getauxval(AT_HWCAP) & (1 << 7);  // HWCAP_CRC32
  if (!has_it) return by_tables(crc, data, count);
  for (; count >= 8; data += 8, count -= 8) {
    uint64_t eight;
    std::memcpy(&eight, data, 8);
    __asm__(".arch_extension crc\n\tcrc32x %w0, %w0, %x1" : "+r"(crc) : "r"(eight));
  }
  return by_tables(crc, data, count);
}

#else

uint32_t best(uint32_t crc, const unsigned char* data, int64_t count) { return by_tables(crc, data, count); }

#endif

}  // namespace
}  // namespace zerostd

int32_t zs_crc32(const void* data, int64_t num_bytes, uint32_t before, int32_t is_plain, uint32_t* crc) {
  using namespace zerostd;
  if (num_bytes < 0) return ZS_BAD_ARGUMENT;
  const unsigned char* bytes = static_cast<const unsigned char*>(data);
  *crc = ~(is_plain ? by_tables(~before, bytes, num_bytes) : best(~before, bytes, num_bytes));
  return ZS_OK;
}

int32_t zs_crc32_pages(const void* data, int64_t num_bytes, int64_t page_bytes, uint32_t* crcs) {
  using namespace zerostd;
  if (num_bytes < 0 || page_bytes <= 0) return ZS_BAD_ARGUMENT;
  const unsigned char* bytes = static_cast<const unsigned char*>(data);
  for (int64_t start = 0; start < num_bytes; start += page_bytes) {
    *crcs++ = ~best(~uint32_t{0}, bytes + start, std::min(page_bytes, num_bytes - start));
  }
  return ZS_OK;
}
