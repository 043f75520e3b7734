/* Int8 keys, sixteen side by side, against int8 queries. */
#ifndef PRESCORE_INT8_H
#define PRESCORE_INT8_H

#include "vectors.h"

#define PER_BLOCK (16 / WIDTH) /* vectors that hold sixteen numbers */
#define KEY_ZERO 64            /* keys are stored from 1 to 127: products of two with a query fit into 16 bits */

#if defined(__AVX512VNNI__)
/* sum + keys * four numbers of a query, which the instruction itself repeats: compilers load them by one of its own. */
#define ADD_PRODUCTS(sum, keys, numbers) __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(keys), "m"(*(numbers)))

/* `start` + products of sixteen keys, `width` times four dimensions of each in registers, with a query. */
INLINE __m512i add_product(const int width, const __m512i *keys, const int32_t *query, __m512i start) {
    __m512i sum[2] = {start, _mm512_setzero_si512()};
    for (int i = 0; i < width; i++) ADD_PRODUCTS(sum[i % 2], keys[i], query + i);
    return _mm512_add_epi32(sum[0], sum[1]);
}

/* Add `width` times four dimensions to products of sixteen keys, which stay in registers, with some queries. */
INLINE void add_products(const int width, const uint8_t *keys, uint32_t some, const int32_t *queries, int64_t step, const int32_t *starts,
                         int first, int32_t *to) {
    __m512i own[16];
    for (int i = 0; i < width; i++) own[i] = _mm512_loadu_si512(keys + 64 * i);
    for (; some; some &= some - 1, to += 16) {
        const int64_t t = __builtin_ctz(some);
        const __m512i start = first ? _mm512_set1_epi32(starts[t]) : _mm512_loadu_si512(to);
        _mm512_storeu_si512(to, add_product(width, own, queries + t * step, start));
    }
}
#else
/* Products of sixteen keys with a query. */
INLINE void int8_product(const uint8_t *keys, const int32_t *query, int32_t start, const int64_t quarter, int32_t *to) {
#if defined(__AVX2__)
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i sum[2] = {_mm256_set1_epi32(start), _mm256_set1_epi32(start)};
    for (int64_t i = 0; i < quarter; i++)
        for (int k = 0; k < 2; k++) {
            const __m256i key = _mm256_loadu_si256((const __m256i *)(keys + 64 * i) + k);
            const __m256i pairs = _mm256_maddubs_epi16(key, _mm256_set1_epi32(query[i]));
            sum[k] = _mm256_add_epi32(sum[k], _mm256_madd_epi16(pairs, ones));
        }
    for (int k = 0; k < 2; k++) _mm256_storeu_si256((__m256i *)to + k, sum[k]);
#elif defined(__SSE2__)
    __m128i sum[4];
    for (int k = 0; k < 4; k++) sum[k] = _mm_set1_epi32(start);
    for (int64_t i = 0; i < quarter; i++) { /* 16 bits hold x + 256 y: x q + y r is their product with q, and y (r - 256 q) */
        const __m128i four = _mm_set1_epi32(query[i]), high = _mm_slli_epi16(four, 8);
        const __m128i first = _mm_srai_epi16(high, 8), second = _mm_sub_epi16(_mm_srai_epi16(four, 8), high);
        for (int k = 0; k < 4; k++) {
            const __m128i pairs = _mm_loadu_si128((const __m128i *)(keys + 64 * i) + k);
            sum[k] = _mm_add_epi32(sum[k], _mm_madd_epi16(pairs, first));
            sum[k] = _mm_add_epi32(sum[k], _mm_madd_epi16(_mm_srli_epi16(pairs, 8), second));
        }
    }
    for (int k = 0; k < 4; k++) _mm_storeu_si128((__m128i *)to + k, sum[k]);
#elif defined(__ARM_FEATURE_DOTPROD)
    int32x4_t sum[4];
    for (int k = 0; k < 4; k++) sum[k] = vdupq_n_s32(start);
    for (int64_t i = 0; i < quarter; i += 4) { /* a multiple of four */
        const int8x16_t numbers = vreinterpretq_s8_s32(vld1q_s32(query + i));
        for (int k = 0; k < 4; k++) {
            const int8_t *four = (const int8_t *)keys + 64 * i + 16 * k;
            sum[k] = vdotq_laneq_s32(sum[k], vld1q_s8(four), numbers, 0);
            sum[k] = vdotq_laneq_s32(sum[k], vld1q_s8(four + 64), numbers, 1);
            sum[k] = vdotq_laneq_s32(sum[k], vld1q_s8(four + 128), numbers, 2);
            sum[k] = vdotq_laneq_s32(sum[k], vld1q_s8(four + 192), numbers, 3);
        }
    }
    for (int k = 0; k < 4; k++) vst1q_s32(to + 4 * k, sum[k]);
#elif defined(__aarch64__)
    int32x4_t sum[8]; /* of two keys each, in two parts */
    for (int k = 0; k < 8; k++) sum[k] = vdupq_n_s32(0);
    for (int64_t i = 0; i < quarter; i += 2) { /* a multiple of two; the sum of two products fits into 16 bits */
        const int8x16_t first = vreinterpretq_s8_s32(vdupq_n_s32(query[i])), second = vreinterpretq_s8_s32(vdupq_n_s32(query[i + 1]));
        for (int k = 0; k < 4; k++) {
            const int8x16_t x = vld1q_s8((const int8_t *)keys + 64 * i + 16 * k), y = vld1q_s8((const int8_t *)keys + 64 * (i + 1) + 16 * k);
            const int16x8_t low = vmull_s8(vget_low_s8(x), vget_low_s8(first)), high = vmull_high_s8(x, first);
            sum[2 * k] = vpadalq_s16(sum[2 * k], vmlal_s8(low, vget_low_s8(y), vget_low_s8(second)));
            sum[2 * k + 1] = vpadalq_s16(sum[2 * k + 1], vmlal_high_s8(high, y, second));
        }
    }
    for (int k = 0; k < 4; k++)
        vst1q_s32(to + 4 * k, vaddq_s32(vpaddq_s32(sum[2 * k], sum[2 * k + 1]), vdupq_n_s32(start)));
#else
    for (int key = 0; key < 16; key++) to[key] = start;
    for (int64_t i = 0; i < quarter; i++) {
        int8_t four[4];
        memcpy(four, query + i, 4);
        for (int key = 0; key < 16; key++)
            for (int k = 0; k < 4; k++) to[key] += keys[64 * i + 4 * key + k] * four[k];
    }
#endif
}
#endif

/* Products of sixteen keys, [quarter, 16, 4], with `some` of the queries, given as bits, [.., step]: sixteen numbers each, one
 * query after the other. `quarter` is a multiple of four; the start of a query is -KEY_ZERO times the sum of its numbers. */
INLINE void int8_products(const uint8_t *keys, uint32_t some, const int32_t *queries, const int64_t step, const int32_t *starts,
                          const int64_t quarter, int32_t *to) {
#if defined(__AVX512VNNI__)
    int64_t at = 0;
    for (; at + 16 <= quarter; at += 16) add_products(16, keys + 64 * at, some, queries + at, step, starts, at == 0, to);
    for (; at < quarter; at += 4) add_products(4, keys + 64 * at, some, queries + at, step, starts, at == 0, to);
#else
    for (; some; some &= some - 1, to += 16) {
        const int64_t t = __builtin_ctz(some);
        int8_product(keys, queries + t * step, starts[t], quarter, to);
    }
#endif
}

/* Which of 32 numbers have a bit in common with `wanted`, as bits. */
INLINE uint32_t having(const uint16_t *numbers, unsigned wanted) {
#if defined(__AVX512BW__)
    return _mm512_test_epi16_mask(_mm512_loadu_si512(numbers), _mm512_set1_epi16((short)wanted));
#else
    uint32_t found = 0;
    for (int i = 0; i < 32; i++) found |= (numbers[i] & wanted ? 1u : 0u) << i;
    return found;
#endif
}

/* Append those of sixteen keys whose bit is set, positions and logits. There is space for sixteen more. */
INLINE int32_t append_hits(int32_t *hits, float *hit_logits, int32_t n, const int32_t *rows, const float *logits, unsigned above) {
#if defined(__AVX512F__)
    _mm512_storeu_si512(hits + n, _mm512_maskz_compress_epi32((__mmask16)above, _mm512_loadu_si512(rows)));
    _mm512_storeu_ps(hit_logits + n, _mm512_maskz_compress_ps((__mmask16)above, _mm512_loadu_ps(logits)));
    return n + __builtin_popcount(above);
#else
    for (; above; above &= above - 1, n++) {
        const int i = __builtin_ctz(above);
        hits[n] = rows[i];
        hit_logits[n] = logits[i];
    }
    return n;
#endif
}

#endif
