/* Vectors of LANES floats, as the compiler knows them on every CPU. */
#ifndef PLURES_VECTORS_H
#define PLURES_VECTORS_H
#include <stdint.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#define ALWAYS static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 24")

typedef float vector __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef float eight __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t mask __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

/* sum += a * b. Left to itself the compiler moves sums from register to register, or computes each address anew. */
#if defined(__FMA__) && !defined(PLURES_PLAIN)
#define ADD_PRODUCT(sum, a, b) __asm__("vfmadd231ps %1, %2, %0" : "+v"(sum) : "v"(a), "v"(b))
#define ADD_PRODUCT_FROM(sum, a, p) __asm__("vfmadd231ps %1, %2, %0" : "+v"(sum) : "m"(*(const vector *)(p)), "v"(a))
#define KEEP_POINTER(p) __asm__("" : "+r"(p))
#else
#define ADD_PRODUCT(sum, a, b) ((sum) += (a) * (b))
#define ADD_PRODUCT_FROM(sum, a, p) ((sum) += (a) * load(p))
#define KEEP_POINTER(p) ((void)0)
#endif

ALWAYS vector load(const float *p) { return *(const vector *)p; }
ALWAYS void store(float *p, vector v) { *(vector *)p = v; }
ALWAYS vector splat(float value) { return value - (vector){0}; }
ALWAYS vector positive(vector v) { return (vector)((mask)v & ~(mask)(v < splat(0))); } /* keeps NaN, as torch does */
/* What an activation makes of sums: 0 is none, 1 a ReLU, and 6 one that ends at 6. */
ALWAYS vector activated(vector v, int relu) {
    if (!relu) return v;
    const mask above = (mask)(v > splat(6)) & (relu == 6 ? -1 : 0);
    return positive((vector)(((mask)splat(6) & above) | ((mask)v & ~above)));
}
ALWAYS float activated_number(float value, int relu) { return !relu ? value : value < 0 ? 0 : relu == 6 && value > 6 ? 6 : value; }
ALWAYS int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
ALWAYS int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* LANES bytes as numbers; compilers take them one by one. */
ALWAYS mask widened(const uint8_t *p) {
#if LANES == 16 && defined(__AVX512F__) && !defined(PLURES_PLAIN)
    return (mask)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif LANES == 8 && defined(__AVX2__) && !defined(PLURES_PLAIN)
    return (mask)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    mask made;
    for (int i = 0; i < LANES; i++) made[i] = p[i];
    return made;
#endif
}

#if LANES == 16 /* of two halves, which may be NULL: zeros, and nothing is stored */
ALWAYS vector load_two(const float *a, const float *b) {
    const eight first = a ? *(const eight *)a : (eight){0}, second = b ? *(const eight *)b : (eight){0};
#ifdef __AVX512F__
    return (vector)_mm512_insertf64x4(_mm512_castpd256_pd512((__m256d)first), (__m256d)second, 1);
#else
    return (vector){first[0], first[1], first[2], first[3], first[4], first[5], first[6], first[7],
                    second[0], second[1], second[2], second[3], second[4], second[5], second[6], second[7]};
#endif
}
ALWAYS void store_two(float *a, float *b, vector v) {
    const eight *halves = (const eight *)&v;
    if (a) *(eight *)a = halves[0];
    if (b) *(eight *)b = halves[1];
}
#else
#define load_two(a, b) splat(0)
#define store_two(a, b, v) ((void)0)
#endif

#if defined(__clang__) || __GNUC__ >= 12
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#if LANES == 16
#define EVEN(a, b) PICK(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
#define ODD(a, b) PICK(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)
#elif LANES == 8
#define EVEN(a, b) PICK(a, b, 0, 2, 4, 6, 8, 10, 12, 14)
#define ODD(a, b) PICK(a, b, 1, 3, 5, 7, 9, 11, 13, 15)
#else
#define EVEN(a, b) PICK(a, b, 0, 2, 4, 6)
#define ODD(a, b) PICK(a, b, 1, 3, 5, 7)
#endif
#endif

#endif
