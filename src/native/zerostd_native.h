// The whole C ABI of libzerostd_native. No torch, no Python: pointers, sizes and plain numbers.
// Called through ctypes by zerostd/kernels/native.py, which holds the same numbers; any change of a signature, of a
// number or of a meaning raises ZS_ABI_VERSION here and there.
#pragma once

#include <stdint.h>

#define ZS_ABI_VERSION 1

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

#ifdef __cplusplus
}
#endif
