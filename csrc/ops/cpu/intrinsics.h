/* The intrinsics for x86. GCC's header has every instruction set and takes 0.4 s per source.
 * Unused ones are skipped by defining their include guards. Other compilers' guards have other
 * names, which is harmless. In GCC 13 a set that is not skipped needs types of skipped ones; it
 * and later ones read all. */
#pragma once

#if defined(__GNUC__) && __GNUC__ < 13 && !defined(__clang__) && !defined(_IMMINTRIN_H_INCLUDED)
#define __AVX512FP16INTRIN_H_INCLUDED
#define __AVX512FP16VLINTRIN_H_INCLUDED
#define _AVX512ERINTRIN_H_INCLUDED
#define _AVX512PFINTRIN_H_INCLUDED
#define _AVX512VLDQINTRIN_H_INCLUDED
#define _AVX512VBMI2VLINTRIN_H_INCLUDED
#define __AVX512VBMI2INTRIN_H_INCLUDED
#define _AVX512VBMIVLINTRIN_H_INCLUDED
#define _AVX512BITALGINTRIN_H_INCLUDED
#define _AVX5124FMAPSINTRIN_H_INCLUDED
#define _GFNIINTRIN_H_INCLUDED
#endif

#include <immintrin.h>
