/* Int8 keys, sixteen side by side, against int8 queries. */
#ifndef PRESCORE_INT8_H
#define PRESCORE_INT8_H

#include "vectors.h"

#define PER_BLOCK (16 / WIDTH) /* vectors that hold sixteen numbers */
#define GROUP (WIDTH == 16 ? 8 : 4) /* queries that share the loads of the keys: their sums fit into registers */
#define KEY_ZERO 64            /* keys are stored from 1 to 127: products of two with a query fit into 16 bits */

#if !defined(__AVX2__)
/* Products of sixteen keys with one query. */
INLINE void int8_product(const uint8_t *keys, const int32_t *query, int32_t start, const int64_t quarter, floats *to) {
#if defined(__SSE2__)
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
    for (int k = 0; k < 4; k++) to[k] = (floats)_mm_cvtepi32_ps(sum[k]);
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
    for (int k = 0; k < 4; k++) to[k] = (floats)vcvtq_f32_s32(sum[k]);
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
        to[k] = (floats)vcvtq_f32_s32(vaddq_s32(vpaddq_s32(sum[2 * k], sum[2 * k + 1]), vdupq_n_s32(start)));
#else
    int32_t sum[16];
    for (int key = 0; key < 16; key++) sum[key] = start;
    for (int64_t i = 0; i < quarter; i++) {
        int8_t four[4];
        memcpy(four, query + i, 4);
        for (int key = 0; key < 16; key++)
            for (int k = 0; k < 4; k++) sum[key] += keys[64 * i + 4 * key + k] * four[k];
    }
    for (int k = 0; k < PER_BLOCK; k++) to[k] = __builtin_convertvector(*(const ints *)(sum + k * WIDTH), floats);
#endif
}
#endif

/* Products of sixteen keys, [quarter, 16, 4], with `n` queries of `quarter` times four numbers, [n][PER_BLOCK]. The queries share
 * the loads of the keys. `start` is -KEY_ZERO times the sum of each query. */
INLINE void int8_products(const int n, const uint8_t *keys, const int32_t *const *query, const int32_t *start, const int64_t quarter, floats *to) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    const int chains = n >= 4 ? 1 : n >= 2 ? 2 : 4; /* at least four sums in flight hide the latency */
    __m512i sum[GROUP][4];
    for (int j = 0; j < n; j++)
        for (int c = 0; c < chains; c++) sum[j][c] = c ? _mm512_setzero_si512() : _mm512_set1_epi32(start[j]);
    for (int64_t i = 0; i < quarter; i += 4) /* a multiple of four */
        for (int c = 0; c < 4; c++) {
            const __m512i key = _mm512_loadu_si512(keys + 64 * (i + c));
            for (int j = 0; j < n; j++) sum[j][c % chains] = _mm512_dpbusd_epi32(sum[j][c % chains], key, _mm512_set1_epi32(query[j][i + c]));
        }
    for (int j = 0; j < n; j++) {
        for (int c = 1; c < chains; c++) sum[j][0] = _mm512_add_epi32(sum[j][0], sum[j][c]);
        to[j] = (floats)_mm512_cvtepi32_ps(sum[j][0]);
    }
#elif defined(__AVX2__)
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i sum[GROUP][2];
    for (int j = 0; j < n; j++) sum[j][0] = sum[j][1] = _mm256_set1_epi32(start[j]);
    for (int64_t i = 0; i < quarter; i++)
        for (int k = 0; k < 2; k++) {
            const __m256i key = _mm256_loadu_si256((const __m256i *)(keys + 64 * i) + k);
            for (int j = 0; j < n; j++) {
                const __m256i pairs = _mm256_maddubs_epi16(key, _mm256_set1_epi32(query[j][i]));
                sum[j][k] = _mm256_add_epi32(sum[j][k], _mm256_madd_epi16(pairs, ones));
            }
        }
    for (int j = 0; j < n; j++)
        for (int k = 0; k < 2; k++) to[2 * j + k] = (floats)_mm256_cvtepi32_ps(sum[j][k]);
#else
    for (int j = 0; j < n; j++) int8_product(keys, query[j], start[j], quarter, to + j * PER_BLOCK);
#endif
}

/* Append those of sixteen keys whose bit is set, positions and logits. There is space for sixteen more. */
INLINE int32_t append_hits(int32_t *hits, float *hit_logits, int32_t n, const int32_t *rows, const floats *logits, unsigned above) {
#if defined(__AVX512F__)
    _mm512_storeu_si512(hits + n, _mm512_maskz_compress_epi32((__mmask16)above, _mm512_loadu_si512(rows)));
    _mm512_storeu_ps(hit_logits + n, _mm512_maskz_compress_ps((__mmask16)above, (__m512)logits[0]));
    return n + __builtin_popcount(above);
#else
    for (; above; above &= above - 1, n++) {
        const int i = __builtin_ctz(above);
        hits[n] = rows[i];
        hit_logits[n] = logits[i / WIDTH][i % WIDTH];
    }
    return n;
#endif
}

#endif
