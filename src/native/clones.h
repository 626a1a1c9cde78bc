// One body, compiled once per instruction set and chosen by the loader; plain where the compiler or the C library
// cannot do that. Results are equal: no clone may contract a * b + c (-ffp-contract=off).
#pragma once

#if defined(ZS_HAS_TARGET_CLONES)
#define ZS_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define ZS_CLONES
#endif
