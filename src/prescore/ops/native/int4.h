/* Int4 keys, sixteen side by side, against int6 queries, some at a time. */
#ifndef PRESCORE_INT4_H
#define PRESCORE_INT4_H

#include "vectors.h"

#define PER_BLOCK (16 / WIDTH) /* vectors that hold sixteen keys */

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define AT_ONCE 4
#elif defined(__AVX2__)
#define AT_ONCE 2
#else
#define AT_ONCE 1
#endif

/* Sums of products of each half of the dimensions, of sixteen keys and `AT_ONCE` queries; `sums` are those of the queries,
 * since stored int4 numbers are 8 too large. */
INLINE void int4_sums(const uint8_t *int4, const int8_t *const *q, const int32_t (*sums)[2], int64_t eighth,
                      floats (*low)[PER_BLOCK], floats (*high)[PER_BLOCK]) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    __m512i a[AT_ONCE], b[AT_ONCE];
    for (int j = 0; j < AT_ONCE; j++) {
        a[j] = _mm512_set1_epi32(-8 * sums[j][0]);
        b[j] = _mm512_set1_epi32(-8 * sums[j][1]);
    }
    const __m512i nibble = _mm512_set1_epi8(15);
#pragma GCC unroll 8
    for (int64_t i = 0; i < eighth; i++) {
        __m512i z = _mm512_loadu_si512(int4 + 64 * i);
        __m512i first = _mm512_and_si512(z, nibble), second = _mm512_and_si512(_mm512_srli_epi16(z, 4), nibble);
        for (int j = 0; j < AT_ONCE; j++) {
            int32_t q0, q1;
            memcpy(&q0, q[j] + 4 * i, 4);
            memcpy(&q1, q[j] + 4 * (i + eighth), 4);
            a[j] = _mm512_dpbusd_epi32(a[j], first, _mm512_set1_epi32(q0));
            b[j] = _mm512_dpbusd_epi32(b[j], second, _mm512_set1_epi32(q1));
        }
    }
    for (int j = 0; j < AT_ONCE; j++) {
        low[j][0] = (floats)_mm512_cvtepi32_ps(a[j]);
        high[j][0] = (floats)_mm512_cvtepi32_ps(b[j]);
    }
#else
    int32_t whole[2][16];
#if defined(__AVX2__)
    __m256i sum[AT_ONCE][4];
    for (int j = 0; j < AT_ONCE; j++)
        for (int k = 0; k < 4; k++) sum[j][k] = _mm256_setzero_si256();
    const __m256i nibble = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    for (int64_t i = 0; i < eighth; i++) { /* sums of 16 bits hold 15 * 31 * dim / 4 up to 256 dimensions */
        __m256i y0 = _mm256_loadu_si256((const __m256i *)(int4 + 64 * i));
        __m256i y1 = _mm256_loadu_si256((const __m256i *)(int4 + 64 * i + 32));
        __m256i f0 = _mm256_and_si256(y0, nibble), f1 = _mm256_and_si256(y1, nibble);
        __m256i s0 = _mm256_and_si256(_mm256_srli_epi16(y0, 4), nibble);
        __m256i s1 = _mm256_and_si256(_mm256_srli_epi16(y1, 4), nibble);
        for (int j = 0; j < AT_ONCE; j++) {
            int32_t q0, q1;
            memcpy(&q0, q[j] + 4 * i, 4);
            memcpy(&q1, q[j] + 4 * (i + eighth), 4);
            __m256i b0 = _mm256_set1_epi32(q0), b1 = _mm256_set1_epi32(q1);
            sum[j][0] = _mm256_add_epi16(sum[j][0], _mm256_maddubs_epi16(f0, b0));
            sum[j][1] = _mm256_add_epi16(sum[j][1], _mm256_maddubs_epi16(f1, b0));
            sum[j][2] = _mm256_add_epi16(sum[j][2], _mm256_maddubs_epi16(s0, b1));
            sum[j][3] = _mm256_add_epi16(sum[j][3], _mm256_maddubs_epi16(s1, b1));
        }
    }
#endif
    for (int j = 0; j < AT_ONCE; j++) {
#if defined(__AVX2__)
        for (int k = 0; k < 4; k++)
            _mm256_storeu_si256((__m256i *)whole[k / 2] + k % 2, _mm256_madd_epi16(sum[j][k], ones));
#else
        memset(whole, 0, sizeof whole);
        for (int64_t i = 0; i < eighth; i++)
            for (int key = 0; key < 16; key++)
                for (int k = 0; k < 4; k++) {
                    uint8_t code = int4[64 * i + 4 * key + k];
                    whole[0][key] += (code & 15) * q[j][4 * i + k];
                    whole[1][key] += (code >> 4) * q[j][4 * (i + eighth) + k];
                }
#endif
        for (int k = 0; k < PER_BLOCK; k++) {
            low[j][k] = __builtin_convertvector(*(const ints *)(whole[0] + k * WIDTH) - 8 * sums[j][0], floats);
            high[j][k] = __builtin_convertvector(*(const ints *)(whole[1] + k * WIDTH) - 8 * sums[j][1], floats);
        }
    }
#endif
}

/* Append those of sixteen positions whose bit is set. There is space for sixteen more. */
INLINE int32_t append_rows(int32_t *hits, int32_t n, const int32_t *rows, unsigned above) {
#if defined(__AVX512F__)
    __m512i some = _mm512_maskz_compress_epi32((__mmask16)above, _mm512_loadu_si512(rows));
    _mm512_storeu_si512(hits + n, some);
    return n + __builtin_popcount(above);
#else
    for (; above; above &= above - 1) hits[n++] = rows[__builtin_ctz(above)];
    return n;
#endif
}

#endif
