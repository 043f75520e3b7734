/* As many floats at a time as a register holds, in the compiler's own vector type: sixteen, eight or four. */
#ifndef PRESCORE_VECTORS_H
#define PRESCORE_VECTORS_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(_WIN32) /* memory of aligned_alloc has a function of its own to free it there: all memory is of that kind */
#include <malloc.h>
#define aligned_alloc(alignment, size) _aligned_malloc(size, alignment)
#define malloc(size) _aligned_malloc(size, 16)
#define free _aligned_free
#endif
#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define WIDTH 16
#elif defined(__AVX2__)
#define WIDTH 8
#else
#define WIDTH 4
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float floats __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

typedef int8_t bytes __attribute__((vector_size(WIDTH)));
typedef uint16_t halves __attribute__((vector_size(2 * WIDTH), aligned(2), may_alias));

INLINE floats splat(float x) { return x - (floats){0}; }
INLINE floats splat_bits(float x) { /* also of what is no number */
    int32_t raw;
    memcpy(&raw, &x, sizeof raw);
    return (floats)(raw - (ints){0});
}
INLINE floats load(const float *p) { return *(const floats *)p; } /* the type allows any alignment and alias */
INLINE void store(float *p, floats v) { *(floats *)p = v; }
INLINE floats choose(ints mask, floats yes, floats no) { return (floats)(((ints)yes & mask) | ((ints)no & ~mask)); }
/* Of two numbers one of which is NaN, the second. */
INLINE floats larger(floats a, floats b) {
#if defined(__AVX512F__)
    return (floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (floats)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
    return (floats)_mm_max_ps((__m128)a, (__m128)b);
#else
    return choose(a > b, a, b);
#endif
}
INLINE floats smaller(floats a, floats b) {
#if defined(__AVX512F__)
    return (floats)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (floats)_mm256_min_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
    return (floats)_mm_min_ps((__m128)a, (__m128)b);
#else
    return choose(a < b, a, b);
#endif
}

INLINE float total(floats v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#elif defined(__AVX2__)
    __m128 s = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
#elif defined(__SSE2__)
    const __m128 s = _mm_add_ps((__m128)v, _mm_shuffle_ps((__m128)v, (__m128)v, 0xb1));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehl_ps(s, s)));
#elif defined(__aarch64__)
    return vaddvq_f32((float32x4_t)v);
#else
    return (v[0] + v[1]) + (v[2] + v[3]);
#endif
}
INLINE float largest(floats v) {
#if defined(__AVX512F__)
    const __m256 half = _mm256_max_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
#elif defined(__SSE2__) && WIDTH == 4
    const __m128 s = _mm_max_ps((__m128)v, _mm_shuffle_ps((__m128)v, (__m128)v, 0xb1));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehl_ps(s, s)));
#elif defined(__aarch64__)
    return vmaxnmvq_f32((float32x4_t)v);
#else
    float s = v[0];
    for (int i = 1; i < WIDTH; i++) s = v[i] > s ? v[i] : s;
    return s;
#endif
}
INLINE unsigned bits(ints mask) {
#if defined(__AVX512DQ__)
    return _mm512_movepi32_mask((__m512i)mask);
#elif defined(__AVX2__)
    return (unsigned)_mm256_movemask_ps((__m256)mask);
#elif defined(__SSE2__)
    return (unsigned)_mm_movemask_ps((__m128)mask);
#elif defined(__aarch64__)
    return vaddvq_u32((uint32x4_t)(mask & (ints){1, 2, 4, 8}));
#else
    unsigned found = 0;
    for (int i = 0; i < WIDTH; i++) found |= (mask[i] ? 1u : 0u) << i;
    return found;
#endif
}

/* The next whole number, of numbers that fit into 32 bits. */
INLINE ints round_up(floats x) {
#if defined(__AVX512F__)
    return (ints)_mm512_cvt_roundps_epi32((__m512)x, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC);
#else
    const ints down = __builtin_convertvector(x, ints); /* towards zero */
    return down - (x > __builtin_convertvector(down, floats)); /* a true comparison is -1 */
#endif
}

/* Which numbers of `a` are at least those of `b`, as bits. */
INLINE unsigned at_least(floats a, floats b) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GE_OQ);
#else
    return bits(a >= b);
#endif
}

/* exp: a power of two times a polynomial; 0 below -87 */
INLINE floats vexp(floats x) {
#if defined(__AVX512F__)
    const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ); /* NaN too */
    const __m512 y = _mm512_min_ps(_mm512_set1_ps(88.0f), (__m512)x); /* in this order NaN stays NaN */
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(y, _mm512_set1_ps(1.44269504f)), 8);
    const __m512 z = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), y));
    __m512 q = _mm512_fmadd_ps(_mm512_set1_ps(1.9875691500e-4f), z, _mm512_set1_ps(1.3981999507e-3f));
    q = _mm512_fmadd_ps(q, z, _mm512_set1_ps(8.3334519073e-3f));
    q = _mm512_fmadd_ps(q, z, _mm512_set1_ps(4.1665795894e-2f));
    q = _mm512_fmadd_ps(q, z, _mm512_set1_ps(1.6666665459e-1f));
    q = _mm512_fmadd_ps(q, z, _mm512_set1_ps(5.0000001201e-1f));
    q = _mm512_fmadd_ps(q, _mm512_mul_ps(z, z), _mm512_add_ps(z, _mm512_set1_ps(1.0f)));
    return (floats)_mm512_maskz_scalef_ps(normal, q, n);
#else
    ints tiny = x < splat(-87.0f);
    x = larger(splat(-87.0f), smaller(splat(88.0f), x)); /* in this order NaN stays NaN */
    floats shifted = x * splat(1.44269504f) + splat(12582912.0f); /* 1.5 * 2^23 rounds to an integer */
    ints power = (ints)shifted - (ints)splat(12582912.0f);
    floats whole = shifted - splat(12582912.0f);
    floats z = x - whole * splat(0.693359375f) + whole * splat(2.12194440e-4f);
    floats p = splat(1.9875691500e-4f);
    p = p * z + splat(1.3981999507e-3f);
    p = p * z + splat(8.3334519073e-3f);
    p = p * z + splat(4.1665795894e-2f);
    p = p * z + splat(1.6666665459e-1f);
    p = p * z + splat(5.0000001201e-1f);
    p = p * z * z + z + splat(1.0f);
    return choose(tiny, splat(0.0f), (floats)((ints)p + (power << 23)));
#endif
}

/* log of positive, normal numbers */
INLINE floats vlog(floats x) {
    ints raw = (ints)x, low = {0};
    ints power = ((raw >> 23) & 255) - (low + 127);
    floats m = (floats)((raw & (low + 0x007fffff)) | (low + 0x3f800000)); /* in [1, 2) */
    ints upper = m > splat(1.41421356f);
    m = choose(upper, m * splat(0.5f), m);
    floats whole = __builtin_convertvector(power - upper, floats); /* a true comparison is -1 */
    floats z = m - splat(1.0f), p = splat(7.0376836292e-2f);
    p = p * z + splat(-1.1514610310e-1f);
    p = p * z + splat(1.1676998740e-1f);
    p = p * z + splat(-1.2420140846e-1f);
    p = p * z + splat(1.4249322787e-1f);
    p = p * z + splat(-1.6668057665e-1f);
    p = p * z + splat(2.0000714765e-1f);
    p = p * z + splat(-2.4999993993e-1f);
    p = p * z + splat(3.3333331174e-1f);
    p = p * z * z * z - splat(0.5f) * z * z + z;
    return p + whole * splat(0.69314718f);
}

/* Sixteen-bit numbers: without sign, bfloat16, float16. */
INLINE ints widen(const uint16_t *from) {
#if defined(__AVX512F__)
    return (ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__AVX2__)
    return (ints)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
#elif defined(__SSE2__)
    return (ints)_mm_unpacklo_epi16(_mm_loadl_epi64((const __m128i *)from), _mm_setzero_si128());
#elif defined(__aarch64__)
    return (ints)vmovl_u16(vld1_u16(from));
#else
    return __builtin_convertvector(*(const halves *)from, ints);
#endif
}
INLINE floats from_bfloat16(const uint16_t *from) { return (floats)(widen(from) << 16); }
INLINE floats from_float16(const uint16_t *from) {
#if defined(__AVX512F__)
    return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__AVX2__)
    return (floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#elif defined(__aarch64__)
    return (floats)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
#else
    const ints raw = widen(from), small = (ints){0} + (113 << 23);
    const ints length = (raw & 0x7fff) << 13, sign = (raw & 0x8000) << 16;
    const ints normal = length + (112 << 23) + ((length >= (31 << 23)) & (112 << 23)); /* infinite stays infinite */
    const floats subnormal = (floats)(length + small) - (floats)small;
    return (floats)((ints)choose(length < (1 << 23), subnormal, (floats)normal) | sign);
#endif
}

INLINE float dot(const float *a, const float *b, int64_t dim) {
    floats s = splat(0);
    for (int64_t i = 0; i < dim; i += WIDTH) s += load(a + i) * load(b + i);
    return total(s);
}
INLINE void add_scaled(float *to, const float *from, float factor, int64_t dim) {
    for (int64_t i = 0; i < dim; i += WIDTH) store(to + i, load(to + i) + load(from + i) * splat(factor));
}

#endif
