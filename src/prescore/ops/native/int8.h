/* Int8 keys, sixteen side by side, against an int8 query. */
#ifndef PRESCORE_INT8_H
#define PRESCORE_INT8_H

#include "vectors.h"

#define PER_BLOCK (16 / WIDTH) /* vectors that hold sixteen numbers */
#define KEY_ZERO 64            /* keys are stored from 1 to 127: products of two with a query fit into 16 bits */

/* Products of sixteen keys, [quarter, 16, 4], with a query of `quarter` times four numbers; `start` is -KEY_ZERO times the sum
 * of the query. */
INLINE void int8_products(const uint8_t *keys, const int32_t *query, int32_t start, const int64_t quarter, floats *to) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    __m512i sum[4] = {_mm512_set1_epi32(start), _mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
    for (int64_t i = 0; i < quarter; i += 4) /* a multiple of four */
        for (int j = 0; j < 4; j++)
            sum[j] = _mm512_dpbusd_epi32(sum[j], _mm512_loadu_si512(keys + 64 * (i + j)), _mm512_set1_epi32(query[i + j]));
    const __m512i all = _mm512_add_epi32(_mm512_add_epi32(sum[0], sum[1]), _mm512_add_epi32(sum[2], sum[3]));
    to[0] = (floats)_mm512_cvtepi32_ps(all);
#elif defined(__AVX2__)
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i sum[2] = {_mm256_set1_epi32(start), _mm256_set1_epi32(start)};
    for (int64_t i = 0; i < quarter; i++)
        for (int k = 0; k < 2; k++) {
            const __m256i pairs = _mm256_maddubs_epi16(_mm256_loadu_si256((const __m256i *)(keys + 64 * i) + k), _mm256_set1_epi32(query[i]));
            sum[k] = _mm256_add_epi32(sum[k], _mm256_madd_epi16(pairs, ones));
        }
    for (int k = 0; k < 2; k++) to[k] = (floats)_mm256_cvtepi32_ps(sum[k]);
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
