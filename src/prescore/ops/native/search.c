/* Which rows a query reads by itself: those whose logit, by four-bit keys and a six-bit query, reaches its limit.
 *
 * Only nodes that may hold such a key are searched: a node's logits lie around that of its mean with the deviation
 * that the pooled covariance gives for this query, and `reach` deviations are looked at.
 */
#include "routed.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define TOGETHER 4
#elif defined(__AVX2__)
#define TOGETHER 2
#else
#define TOGETHER 1
#endif

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

/* Sixteen keys against some queries: which of them reach the limits. */
INLINE void compare(const uint8_t *codes, const float *scales, const int8_t *const *q, const int32_t (*sums)[2],
                    const float (*lift)[2], const float *limits, int64_t eighth, unsigned *above) {
    __m512i a[TOGETHER], b[TOGETHER];
    for (int j = 0; j < TOGETHER; j++) { /* codes are 8 too large */
        a[j] = _mm512_set1_epi32(-8 * sums[j][0]);
        b[j] = _mm512_set1_epi32(-8 * sums[j][1]);
    }
    const __m512i nibble = _mm512_set1_epi8(15);
    for (int64_t i = 0; i < eighth; i++) {
        __m512i z = _mm512_loadu_si512(codes + 64 * i);
        __m512i first = _mm512_and_si512(z, nibble), second = _mm512_and_si512(_mm512_srli_epi16(z, 4), nibble);
        for (int j = 0; j < TOGETHER; j++) {
            int32_t q0, q1;
            memcpy(&q0, q[j] + 4 * i, 4);
            memcpy(&q1, q[j] + 4 * (i + eighth), 4);
            a[j] = _mm512_dpbusd_epi32(a[j], first, _mm512_set1_epi32(q0));
            b[j] = _mm512_dpbusd_epi32(b[j], second, _mm512_set1_epi32(q1));
        }
    }
    const __m512 s0 = _mm512_loadu_ps(scales), s1 = _mm512_loadu_ps(scales + 16);
    for (int j = 0; j < TOGETHER; j++) {
        __m512 x0 = _mm512_add_ps(_mm512_cvtepi32_ps(a[j]), _mm512_set1_ps(lift[j][0]));
        __m512 x1 = _mm512_add_ps(_mm512_cvtepi32_ps(b[j]), _mm512_set1_ps(lift[j][1]));
        __m512 x = _mm512_fmadd_ps(s1, x1, _mm512_mul_ps(s0, x0));
        above[j] = _mm512_cmp_ps_mask(x, _mm512_set1_ps(limits[j]), _CMP_GE_OQ);
    }
}

/* Append those of sixteen rows that are above. There is room for sixteen more. */
INLINE int32_t keep(int32_t *found, int32_t n, const int32_t *rows, unsigned above) {
    __m512i some = _mm512_maskz_compress_epi32((__mmask16)above, _mm512_loadu_si512(rows));
    _mm512_storeu_si512(found + n, some);
    return n + __builtin_popcount(above);
}

#else

INLINE unsigned reaching(const int32_t *low, const int32_t *high, const int32_t *sums, const float *lift,
                         const float *scales, float limit) {
    unsigned above = 0;
    for (int k = 0; k < 16; k += WIDTH) {
        floats a = __builtin_convertvector(*(const ints *)(low + k) - 8 * sums[0], floats) + splat(lift[0]);
        floats b = __builtin_convertvector(*(const ints *)(high + k) - 8 * sums[1], floats) + splat(lift[1]);
        above |= bits(load(scales + k) * a + load(scales + 16 + k) * b >= splat(limit)) << k;
    }
    return above;
}

INLINE void compare(const uint8_t *codes, const float *scales, const int8_t *const *q, const int32_t (*sums)[2],
                    const float (*lift)[2], const float *limits, int64_t eighth, unsigned *above) {
    int32_t low[16], high[16];
#if defined(__AVX2__)
    __m256i sum[TOGETHER][4];
    for (int j = 0; j < TOGETHER; j++)
        for (int k = 0; k < 4; k++) sum[j][k] = _mm256_setzero_si256();
    const __m256i nibble = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    for (int64_t i = 0; i < eighth; i++) { /* sums of 16 bits hold 15 * 31 * dim / 4 up to 256 dimensions */
        __m256i y0 = _mm256_loadu_si256((const __m256i *)(codes + 64 * i));
        __m256i y1 = _mm256_loadu_si256((const __m256i *)(codes + 64 * i + 32));
        __m256i f0 = _mm256_and_si256(y0, nibble), f1 = _mm256_and_si256(y1, nibble);
        __m256i s0 = _mm256_and_si256(_mm256_srli_epi16(y0, 4), nibble);
        __m256i s1 = _mm256_and_si256(_mm256_srli_epi16(y1, 4), nibble);
        for (int j = 0; j < TOGETHER; j++) {
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
    for (int j = 0; j < TOGETHER; j++) {
        for (int k = 0; k < 2; k++) {
            _mm256_storeu_si256((__m256i *)low + k, _mm256_madd_epi16(sum[j][k], ones));
            _mm256_storeu_si256((__m256i *)high + k, _mm256_madd_epi16(sum[j][k + 2], ones));
        }
        above[j] = reaching(low, high, sums[j], lift[j], scales, limits[j]);
    }
#else
    memset(low, 0, sizeof low);
    memset(high, 0, sizeof high);
    for (int64_t i = 0; i < eighth; i++)
        for (int key = 0; key < 16; key++)
            for (int k = 0; k < 4; k++) {
                uint8_t code = codes[64 * i + 4 * key + k];
                low[key] += (code & 15) * q[0][4 * i + k];
                high[key] += (code >> 4) * q[0][4 * (i + eighth) + k];
            }
    above[0] = reaching(low, high, sums[0], lift[0], scales, limits[0]);
#endif
}

INLINE int32_t keep(int32_t *found, int32_t n, const int32_t *rows, unsigned above) {
    for (; above; above &= above - 1) found[n++] = rows[__builtin_ctz(above)];
    return n;
}

#endif

/* The rows of one node for the queries that search it. */
static void search_node(const Problem *p, Work *w, int64_t node, const int *who, int n_who) {
    const int64_t dim = p->dim, leaf = p->leaf, at = w->lane * p->node_room + node;
    const uint8_t *codes = p->codes + at * leaf * dim / 2;
    const float *scales = p->scales + at * leaf * 2;
    const int32_t *rows = p->rows + at * leaf;
    for (int x = 0; x < n_who; x += TOGETHER) {
        const int8_t *q[TOGETHER];
        int32_t sums[TOGETHER][2], n[TOGETHER];
        float limits[TOGETHER], lift[TOGETHER][2];
        int32_t *found[TOGETHER];
        const int some = n_who - x < TOGETHER ? n_who - x : TOGETHER;
        for (int j = 0; j < TOGETHER; j++) {
            const int t = who[j < some ? x + j : x];
            q[j] = w->code + t * dim;
            memcpy(sums[j], w->code_sum + 2 * t, sizeof sums[j]);
            memcpy(lift[j], w->lift + 2 * t, sizeof lift[j]);
            /* codes are of what a key differs from the mean */
            limits[j] = (w->limit[t] - w->logits[t * w->padded + p->sink_room + node]) / w->code_scale[t];
            found[j] = w->found + t * w->found_room;
            n[j] = w->n_found[t];
        }
        for (int64_t b = 0; b < leaf / 16; b++) {
            unsigned above[TOGETHER];
            compare(codes + b * 8 * dim, scales + 32 * b, q, (const int32_t (*)[2])sums, (const float (*)[2])lift, limits,
                    dim / 8, above);
            for (int j = 0; j < some; j++) n[j] = keep(found[j], n[j], rows + 16 * b, above[j]);
        }
        for (int j = 0; j < some; j++) {
            const int t = who[x + j];
            w->hits[t * w->padded + p->sink_room + node] = n[j] - w->n_found[t];
            w->n_found[t] = n[j];
        }
    }
}

/* Find the rows of a tile whose limits are known. */
void prescore_find_rows(const Problem *p, Work *w) {
    float least[TILE];
    int64_t searched = 0;
    for (int64_t t = 0; t < w->n; t++) {
        /* an infinite limit asks for nothing, however far one reaches */
        least[t] = w->limit[t] == INFINITY ? INFINITY : w->limit[t] - p->reach * w->spread[t];
        w->n_found[t] = 0;
        memset(w->hits + t * w->padded, 0, sizeof(int32_t) * (size_t)w->columns);
    }
    for (int64_t node = 0; node < w->nodes; node++) {
        int who[TILE], n_who = 0;
        const float *logit = w->logits + p->sink_room + node;
        for (int64_t t = 0; t < w->n; t++) {
            who[n_who] = (int)t;
            n_who += logit[t * w->padded] >= least[t];
        }
        if (n_who) search_node(p, w, node, who, n_who);
        searched += n_who;
    }
#pragma omp atomic
    p->counts[0] += searched * p->leaf;
}
