// Between updates.cpp, which checks and shares out the work, and the files that do it, one for each instruction set.
#pragma once

#include <cstdint>

#include "zerostd_native.h"

namespace zerostd {

// What is written around the cache (non-temporal stores): a line that is overwritten whole need not be read first. The
// arrays must then begin at a multiple of 64 bytes.
struct Stream {
  bool target, weight;
};

// One step of the elements begin ... end; begin is a multiple of 64.
using UpdateRange = void(const zs_step& step, int64_t begin, int64_t end, Stream stream);

UpdateRange update_baseline;
#if defined(__x86_64__) && defined(__GNUC__)
#define ZS_X86
UpdateRange update_avx2;    // AVX2, FMA and F16C
UpdateRange update_avx512;  // those, and AVX-512 F, BW, DQ and VL
#elif defined(__aarch64__) && defined(__GNUC__)
#define ZS_NEON
UpdateRange update_neon;
#endif

}  // namespace zerostd
