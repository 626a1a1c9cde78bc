// The whole C ABI of libzerostd_native. No torch, no Python: pointers, sizes and plain numbers.
// Called through ctypes by zerostd/kernels/native.py, which holds the same numbers; any change of a signature, of a
// number or of a meaning raises ZS_ABI_VERSION here and there.
#pragma once

#include <stdint.h>

#define ZS_ABI_VERSION 12

#if defined(__GNUC__)
#define ZS_EXPORT __attribute__((visibility("default")))
#else
#define ZS_EXPORT
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum zs_dtype { ZS_FLOAT32 = 0, ZS_BFLOAT16 = 1, ZS_FLOAT16 = 2 };
enum zs_status { ZS_OK = 0, ZS_BAD_ARGUMENT = 1 };

ZS_EXPORT int32_t zs_abi_version(void);

// out[i] = factor * (((received[0][i] + received[1][i]) + received[2][i]) + ...), or out[i] += that when accumulate != 0.
//
// received   num_slices slices of slice_len elements each, one after another, of type received_dtype
// out        slice_len elements of type out_dtype; must be ZS_FLOAT32 to accumulate; must not overlap received
//
// The sum runs in fp32 and in slice order, and is rounded once, to nearest even, when it is written. The result does
// not depend on num_threads.
ZS_EXPORT int32_t zs_sum_slices(const void* received, int32_t received_dtype, int64_t num_slices, int64_t slice_len,
                                float factor, void* out, int32_t out_dtype, int32_t accumulate, int32_t num_threads);

// Numbers as integers of `bits` (8 or 4) bits in blocks of ZS_CODED_BLOCK with one fp32 scale each. A code is the number
// divided by the scale, rounded to nearest even; the scale is the largest magnitude of the block over 127 (or 7). A
// block with a number that is not finite has the scale NaN, and decodes to NaN.
//
// coded      count * bits / 8 bytes of codes (two to a byte: the first in the lower half, each plus 8), then the scales;
//            aligned to 4 bytes
#define ZS_CODED_BLOCK 64
ZS_EXPORT int32_t zs_encode_blocks(const void* values, int32_t dtype, int64_t count, int32_t bits, void* coded,
                                   int32_t num_threads);

// The sum of num_slices coded slices of slice_len numbers each, as zs_sum_slices does it.
ZS_EXPORT int32_t zs_decode_blocks(const void* coded, int64_t num_slices, int64_t slice_len, int32_t bits, float factor,
                                   void* out, int32_t out_dtype, int32_t accumulate, int32_t num_threads);

// The bytes of count numbers of item_bytes (2 or 4) each, turned left by one bit, plane by plane: the highest byte of all
// of them, then the next one. planes has item_bytes pointers to count bytes each; values is aligned to item_bytes.
ZS_EXPORT int32_t zs_split_planes(const void* values, int64_t count, int32_t item_bytes, void* const* planes);
ZS_EXPORT int32_t zs_join_planes(const void* const* planes, int64_t count, int32_t item_bytes, void* values);

// One optimizer step over count elements: every array is read once and written once. The operations, and where two of
// them round as one (FMA), are those of torch.optim's CPU implementation without foreach and fused, so the bits are its
// bits where torch's vectors have FMA exactly when ours do: AVX2, AVX-512 and Arm. NaN payloads may differ.
enum zs_rule { ZS_ADAM = 0, ZS_SGD = 1, ZS_ADAGRAD = 2 };
enum zs_decay { ZS_NO_DECAY = 0, ZS_COUPLED = 1, ZS_DECOUPLED = 2 };
enum zs_momentum { ZS_NO_MOMENTUM = 0, ZS_FIRST = 1, ZS_CONTINUED = 2 };
enum zs_codec { ZS_NO_CODEC = 0, ZS_INT8 = 1, ZS_BF16 = 2 };

// gradient       count elements of gradient_dtype; multiplied by factor in fp32, then negated when maximize != 0
// source, target what is read and written; an array of target is the same memory as its source, or apart from it.
//   master       fp32, or with low != NULL the upper halves of fp32 numbers as bf16, rounded to nearest even; low holds
//                the lower halves, and (master << 16) + (signed)low are the bits of the number. A tie with an even upper
//                half has no such halves: the unit of fp32 below it, towards zero, is kept in its place
//   states       fp32: Adam exp_avg and exp_avg_sq; Adagrad sum; SGD with momentum its buffer (not read when ZS_FIRST)
// codec          how states are kept; other than ZS_NO_CODEC with Adam only. Each operation rounds by itself then, so bits
//                are not those of torch.optim; roots are rounded correctly, and root must be NULL. Rounded to nearest,
//                exp_avg_sq would not fall when gradients become smaller: at beta2 = 0.999 a step changes it by less
//                than half a unit. So moments are rounded up or down at random, and the mean stays. With m and v, the
//                bits of both in fp32 (zero if subnormal, and one NaN for all), a hash has 32 random bits for an
//                element: noise_of(m, v, key) in update_moments.h. Decoded numbers are coded without noise, and then get
//                the same codes
//   ZS_INT8      records of ZS_CODED_BLOCK codes of 8 bits and an fp32 scale, aligned to nothing; the last record is
//                whole. With the scale s, the largest magnitude of the block:
//                  exp_avg     code c is s * (c / (254 - |c|)); coded as 254 * (m / (s + |m|)), from -127 to 127
//                  exp_avg_sq  code c is (s * (c / 255))^2; coded as the root times 255 / s, at least 1 unless it is 0.
//                              s is the largest root
//                Before it is rounded to nearest even, a code is shifted by (2n + 1) / 2^16 - 1/2, where n are the upper
//                15 of the lower 16 bits of the hash for exp_avg, of the upper 16 for exp_avg_sq. Scales below 2^-100,
//                and 2^-54 for roots, count as zero. A block with a number that is not finite, or 2^126 and more, has
//                the scale NaN and the codes zero
//   ZS_BF16      bf16 numbers: the lower 16 bits of the hash are added to m, the upper 16 to v, and the lower halves of
//                both sums are dropped
// key            of the hash: another one for each step
// weight         NULL, or takes the new master in weight_dtype, rounded to nearest even; may be the gradient's memory
//                when both have the same item size. So may target.master when it is bf16.
// root           NULL: square roots are rounded correctly. Or what torch calls for them on this machine: MKL's vmsSqrt,
//                which may be off by a unit in the last place; called with root_mode, on up to 1024 numbers
// root_threads   NULL, or mkl_set_num_threads_local: called with 1 before and with what it returned after, so that MKL
//                does not wake threads of its own for so few numbers
// All other memory must be apart. The result does not depend on num_threads.
typedef void zs_root(int32_t count, const float* numbers, float* roots, int64_t root_mode);
typedef int32_t zs_root_threads(int32_t num_threads);

struct zs_arrays {
  void* master;
  void* low;
  void* states[2];
};

struct zs_step {
  int32_t rule;
  int32_t maximize;
  int32_t decay;     // ZS_DECOUPLED with ZS_ADAM only
  int32_t momentum;  // ZS_SGD only, as is nesterov
  int32_t nesterov;
  int32_t gradient_dtype;
  int32_t weight_dtype;
  int32_t num_threads;
  int32_t codec;
  uint32_t key;
  float factor;
  float rate;          // negative: Adam -lr / (1 - beta1^t), SGD -lr, Adagrad -lr / (1 + (t - 1) * lr_decay)
  float decay_factor;  // coupled: weight_decay, decoupled: 1 - lr * weight_decay
  float new_part;      // of the first state: Adam 1 - beta1, SGD 1 - dampening
  float old_part;      // Adam, of exp_avg_sq: beta2; SGD momentum
  float square_part;   // Adam 1 - beta2
  float correction;    // Adam sqrt(1 - beta2^t); coded: not read, rate and eps come multiplied by it
  float eps;
  int64_t count;
  const void* gradient;
  struct zs_arrays source;
  struct zs_arrays target;
  void* weight;
  zs_root* root;
  int64_t root_mode;
  zs_root_threads* root_threads;
};

ZS_EXPORT int32_t zs_update(const struct zs_step* step);

// The most that zs_update may use from now on: 0 what every processor has, 1 AVX2 and FMA, 2 AVX-512. For tests.
// Returns what it does use: no more than this processor has.
ZS_EXPORT int32_t zs_limit_instructions(int32_t most);

// zlib's crc32 of num_bytes at data, going on from that of what comes before them (0 of nothing). is_plain != 0: without
// the processor's own instructions for it, for tests.
ZS_EXPORT int32_t zs_crc32(const void* data, int64_t num_bytes, uint32_t before, int32_t is_plain, uint32_t* crc);

// The same of each page of page_bytes, by itself: one number of crcs for each. The last page may be shorter.
ZS_EXPORT int32_t zs_crc32_pages(const void* data, int64_t num_bytes, int64_t page_bytes, uint32_t* crcs);

// Copies num_bytes to a place that nobody reads soon, past the caches. The two places must not overlap.
ZS_EXPORT int32_t zs_copy_past_caches(const void* from, int64_t num_bytes, void* to);

// -- Tiles of arrays that a kernel of a device changes --
//
// An array of `count` elements passes through slots of the device, tile by tile: copies up, a kernel, copies beside it in
// its stream, copies down. Before a slot takes a tile, the calling thread waits until what was in it is home; it has no
// other wait. Functions, streams and events are the driver's handles. Everything is one 64-bit word, so that Python can
// write it as one array.
#define ZS_DEVICE_SLOTS 4
enum zs_device_kind { ZS_DEVICE_NUMBER = 0, ZS_DEVICE_COUNT = 1, ZS_DEVICE_ARRAY = 2 };

// moves == 0: the tile is at addresses[slot]. Otherwise addresses[0] is the array's first element, and each `unit` elements
// take unit_bytes, the last ones too if they are fewer; a tile is then a multiple of unit.
struct zs_device_array {
  uint64_t addresses[ZS_DEVICE_SLOTS];
  int64_t moves;
  int64_t unit;
  int64_t unit_bytes;
};

struct zs_device_copy {
  struct zs_device_array source;  // it says how many bytes are copied
  struct zs_device_array target;
};

// Of a kernel: a number of up to 8 bytes as it is, the elements of the tile, or the address of an array.
struct zs_device_parameter {
  int64_t kind;
  uint64_t number;
  struct zs_device_array array;
};

struct zs_device_tiles {
  int64_t count;
  int64_t tile;        // elements of one
  int64_t first_slot;  // the following tiles go around
  int64_t num_up;
  int64_t num_beside;
  int64_t num_down;
  int64_t num_parameters;     // 64 at most
  uint64_t function;
  int64_t per_program;        // elements
  int64_t threads;            // of a program
  int64_t shared_bytes;
  uint64_t streams[3];                     // up, update, down
  uint64_t events[ZS_DEVICE_SLOTS][3];     // of each slot: it is up, updated, home; the last one was recorded before
  const struct zs_device_copy* copies;     // up, beside the kernel, down
  const struct zs_device_parameter* parameters;
};

// The functions of the driver in this library, such as libcuda.so.1; NULL if it is missing or lacks one. Never closed.
typedef struct zs_driver zs_driver;
ZS_EXPORT zs_driver* zs_open_driver(const char* library);

// The bytes of each parameter of a kernel, up to `most` of them; returns how many.
ZS_EXPORT int32_t zs_driver_parameters(const zs_driver* driver, uint64_t function, int64_t* sizes, int64_t most);

// Queues all tiles. Returns 0, the driver's error, or -ZS_BAD_ARGUMENT; after an error some may have been queued.
ZS_EXPORT int32_t zs_queue_tiles(const zs_driver* driver, const struct zs_device_tiles* tiles);
ZS_EXPORT const char* zs_driver_error(const zs_driver* driver, int32_t error);

#ifdef __cplusplus
}
#endif
