// Numbers as small integers in blocks of 64 with one fp32 scale each: what crosses a wire instead of 16 or 32 bits.
// Coding divides and rounds to nearest even, decoding multiplies, all in fp32, so every machine gets the same bits.
#include <algorithm>
#include <cstdint>

#include "clones.h"
#include "number_formats.h"
#include "thread_pool.h"
#include "zerostd_native.h"

namespace zerostd {
namespace {

constexpr int64_t kBlock = ZS_CODED_BLOCK;
constexpr int64_t kMinBlocksPerThread = (1 << 15) / kBlock;
constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding and subtracting it rounds what is far smaller

ZS_INLINE float largest_code(int32_t bits) { return bits == 8 ? 127.0f : 7.0f; }

struct Encoding {
  const void* values;
  int32_t dtype;
  int32_t bits;
  uint8_t* codes;
  float* scales;
};

template <typename T>
ZS_INLINE void encode_block_as(const Encoding& encoding, int64_t block) {
  const T* values = static_cast<const T*>(encoding.values) + block * kBlock;
  const float most = largest_code(encoding.bits);
  alignas(64) float numbers[kBlock];
  uint32_t largest_bits = 0;  // of the magnitudes: as integers they are in the same order, and NaN is above infinity
  for (int64_t i = 0; i < kBlock; ++i) {
    numbers[i] = to_float(values[i]);
    const uint32_t magnitude = bits_of(numbers[i]) & 0x7FFFFFFFu;
    largest_bits = magnitude > largest_bits ? magnitude : largest_bits;
  }
  const bool is_finite = largest_bits < 0x7F800000u;
  const float scale = is_finite ? float_of(largest_bits) / most : float_of(0x7FC00000u);
  const bool has_codes = is_finite && scale > 0.0f;
  const float divisor = has_codes ? scale : 1.0f;
  alignas(64) int32_t codes[kBlock];
  for (int64_t i = 0; i < kBlock; ++i) {
    float quotient = has_codes ? numbers[i] / divisor : 0.0f;
    quotient = quotient > most ? most : quotient;
    quotient = quotient < -most ? -most : quotient;
    codes[i] = static_cast<int32_t>((quotient + kRound) - kRound);
  }
  encoding.scales[block] = scale;
  if (encoding.bits == 8) {
    uint8_t* out = encoding.codes + block * kBlock;
    for (int64_t i = 0; i < kBlock; ++i) out[i] = static_cast<uint8_t>(codes[i]);
  } else {
    uint8_t* out = encoding.codes + block * (kBlock / 2);
    for (int64_t i = 0; i < kBlock / 2; ++i) {
      out[i] = static_cast<uint8_t>((codes[2 * i] + 8) | ((codes[2 * i + 1] + 8) << 4));
    }
  }
}

ZS_CLONES void encode_range(const Encoding& encoding, int64_t begin, int64_t end) {
  for (int64_t block = begin; block < end; ++block) {
    switch (encoding.dtype) {
      case ZS_FLOAT32: encode_block_as<float>(encoding, block); break;
      case ZS_BFLOAT16: encode_block_as<BFloat16>(encoding, block); break;
      case ZS_FLOAT16: encode_block_as<Float16>(encoding, block); break;
    }
  }
}

struct Decoding {
  const uint8_t* coded;
  int64_t num_slices;
  int64_t slice_len;
  int32_t bits;
  float factor;
  void* out;
  int32_t out_dtype;
  bool accumulate;
};

template <typename T>
ZS_INLINE void write_block_as(const Decoding& decoding, int64_t block, const float* total) {
  T* out = static_cast<T*>(decoding.out) + block * kBlock;
  for (int64_t i = 0; i < kBlock; ++i) from_float(total[i], out + i);
}

ZS_CLONES void decode_range(const Decoding& decoding, int64_t begin, int64_t end) {
  const int64_t code_bytes = decoding.slice_len * decoding.bits / 8;
  const int64_t slice_bytes = code_bytes + decoding.slice_len / kBlock * static_cast<int64_t>(sizeof(float));
  alignas(64) float total[kBlock];
  for (int64_t block = begin; block < end; ++block) {
    for (int64_t s = 0; s < decoding.num_slices; ++s) {
      const uint8_t* slice = decoding.coded + s * slice_bytes;
      float scale;
      std::memcpy(&scale, slice + code_bytes + block * static_cast<int64_t>(sizeof(float)), sizeof scale);
      alignas(64) float numbers[kBlock];
      if (decoding.bits == 8) {
        const uint8_t* codes = slice + block * kBlock;
        for (int64_t i = 0; i < kBlock; ++i) numbers[i] = static_cast<float>(static_cast<int8_t>(codes[i])) * scale;
      } else {
        const uint8_t* codes = slice + block * (kBlock / 2);
        for (int64_t i = 0; i < kBlock / 2; ++i) {
          numbers[2 * i] = static_cast<float>(static_cast<int32_t>(codes[i] & 15u) - 8) * scale;
          numbers[2 * i + 1] = static_cast<float>(static_cast<int32_t>(codes[i] >> 4) - 8) * scale;
        }
      }
      for (int64_t i = 0; i < kBlock; ++i) total[i] = s == 0 ? numbers[i] : total[i] + numbers[i];
    }
    for (int64_t i = 0; i < kBlock; ++i) total[i] *= decoding.factor;
    if (decoding.accumulate) {
      float* out = static_cast<float*>(decoding.out) + block * kBlock;
      for (int64_t i = 0; i < kBlock; ++i) out[i] += total[i];
      continue;
    }
    switch (decoding.out_dtype) {
      case ZS_FLOAT32: write_block_as<float>(decoding, block, total); break;
      case ZS_BFLOAT16: write_block_as<BFloat16>(decoding, block, total); break;
      case ZS_FLOAT16: write_block_as<Float16>(decoding, block, total); break;
    }
  }
}

}  // namespace
}  // namespace zerostd

int32_t zs_encode_blocks(const void* values, int32_t dtype, int64_t count, int32_t bits, void* coded,
                         int32_t num_threads) {
  using namespace zerostd;
  if (!is_dtype(dtype) || count < 0 || count % kBlock || (bits != 8 && bits != 4) || num_threads < 1) {
    return ZS_BAD_ARGUMENT;
  }
  uint8_t* codes = static_cast<uint8_t*>(coded);
  const Encoding encoding{values, dtype, bits, codes, reinterpret_cast<float*>(codes + count * bits / 8)};
  run_ranges({count / kBlock, 1, kMinBlocksPerThread, num_threads},
             [&](int64_t begin, int64_t end) { encode_range(encoding, begin, end); });
  return ZS_OK;
}

int32_t zs_decode_blocks(const void* coded, int64_t num_slices, int64_t slice_len, int32_t bits, float factor, void* out,
                         int32_t out_dtype, int32_t accumulate, int32_t num_threads) {
  using namespace zerostd;
  if (!is_dtype(out_dtype) || num_slices < 1 || slice_len < 0 || slice_len % kBlock || (bits != 8 && bits != 4) ||
      num_threads < 1 || (accumulate && out_dtype != ZS_FLOAT32)) {
    return ZS_BAD_ARGUMENT;
  }
  const Decoding decoding{static_cast<const uint8_t*>(coded), num_slices, slice_len, bits,
                          factor, out, out_dtype, accumulate != 0};
  run_ranges({slice_len / kBlock, 1, kMinBlocksPerThread, num_threads},
             [&](int64_t begin, int64_t end) { decode_range(decoding, begin, end); });
  return ZS_OK;
}
