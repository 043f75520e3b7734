/* Routed attention on CPUs: what a call is made of, and what one thread works with.
 *
 * Pointers and sizes only. routed/native/__init__.py makes the only calls and checks everything they touch; nothing is checked here.
 */
#ifndef PRESCORE_ROUTED_H
#define PRESCORE_ROUTED_H

#include <stdlib.h>

#include "threads.h"
#include "vectors.h"

#define TILE 32        /* queries of a tile: a bit each of 32 */
#define MAX_DIM 256    /* of keys: and of values */
#define LOCAL_KEYS 256 /* local keys of one step: their weights for a tile stay in cache */
#define BLOCKS_AT_ONCE 8 /* of sixteen subclusters, searched at a time: the keys read stay in cache for the tile */
#define MAX_HITS (BLOCKS_AT_ONCE * 256 + 16) /* hits are written sixteen at a time */
#define MIN_STD 1e-3f /* bounds on the standard deviation of logits within clusters */
#define MAX_STD 1e15f

#define UNIT_NUMBERS 32 /* int8 numbers of a row that share a unit */

enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, INT8 = 3 };

/* Queries, keys or values where they lie: the rows of a head begin `at[head]` numbers after `data`. A row of int8 numbers ends with
 * what 1 stands for in each UNIT_NUMBERS of them, as bfloat16. */
typedef struct {
    const void *data;
    const int64_t *at;
    int64_t step, type; /* numbers between rows, one of the types above */
    int64_t dim;        /* int8 numbers of a row, before its units */
} Rows;

/* Must equal `RoutedCall` in routed/native/__init__.py. A KV head has `n_query` queries, `length` of each of its query heads, one
 * query head after the other. A column is a sink or a centroid: `sink_columns` places for sinks (a multiple of 16, those
 * after `sinks` are empty), then the centroids. */
typedef struct {
    Rows query; /* [kv_heads * query heads of each], `length` rows */
    Rows key, value;
    Rows far_key, far_value; /* that a search finds: the same, or int8 rows before them, where `key` begins with local ones */
    const int32_t *visible;                  /* [kv_heads, length]: clusters that a query sees */
    const int32_t *local_start, *local_stop; /* [kv_heads, length]: its local keys; NULL = read elsewhere */
    const float *columns;                    /* [kv_heads, n_columns / 16, dim, 16]: keys, sixteen side by side */
    const float *column_values;              /* [kv_heads, n_columns, value_dim] */
    const int32_t *positions;                /* [kv_heads, n_clusters, cluster_size]: the keys of each cluster */
    const uint8_t *int8;                     /* [kv_heads, n_clusters, cluster_size / 16, dim / 4, 16, 4]: KEY_ZERO is 0 */
    const float *scales;                     /* [kv_heads, blocks, 16]: what 1 stands for in the keys of sixteen subclusters */
    const uint8_t *sub_int8;                 /* [kv_heads, blocks, dim / 4, 16, 4]: centroids of sixteen subclusters each */
    const float *sub_scales;                 /* [kv_heads, blocks, 16] */
    const float *spread;                     /* [kv_heads, blocks, 16]: of the subclusters */
    const float *radius;                     /* [kv_heads, n_clusters, rounded up to 16] */
    const float *key_cov;                    /* [kv_heads, n_covs, dim, dim]: covariance of keys within clusters */
    const float *key_value_cov;              /* [kv_heads, n_covs, dim, value_dim]: of keys and values */
    const float *units;                      /* [kv_heads, n_covs]: root-mean-square distance of keys from their centroids */
    int64_t kv_heads, n_query, length, dim, value_dim, cluster_size, sinks, sink_columns, n_columns, n_clusters, n_covs;
    int64_t n_spans, clusters_per_span, clusters_per_cov; /* the first `n_spans` covariances are of spans that are complete */
    float scale, search_stds, heavy_stds, heavy_int8_error, margin, exact_margin, log_inverse;
    float max_mass_gain, mass_keys, mass_share, log_sink_weight;
    float *output, *lse; /* [kv_heads, n_query, value_dim], [kv_heads, n_query]: of what was read elsewhere; then of all */
    float *threshold;    /* [kv_heads, n_query]: the logit from which on far keys are read */
    int64_t *counts;     /* int8 keys compared, far keys read */
} RoutedCall;

/* Keys from `begin` to `stop` of every KV head: the local keys of all queries. With `half`, numbers are pairs of bfloat16, of
 * two dimensions of a key and of two keys of a value. */
typedef struct {
    int64_t begin, stop, blocks, half;
    float *keys;   /* [kv_heads, blocks, dim, 16], half: dim / 2: sixteen side by side */
    float *values; /* [kv_heads, stop - begin, value_dim], half: [kv_heads, blocks * 8, value_dim]; NULL = read where they lie */
    const int32_t *rows; /* the keys that count as `begin` to `stop`; NULL = they themselves */
} LocalKeys;

/* A tile of queries of one KV head that see the same clusters. */
typedef struct {
    int64_t kv_head, n, clusters, columns; /* columns are rounded up to 16 */
    int64_t index[TILE];                   /* of each query in [kv_heads, n_query] */
    int64_t padded;
    int64_t spans;                                       /* that the queries see a part of */
    float query[TILE * MAX_DIM], scratch[TILE * MAX_DIM]; /* q; of the span at hand V q, or how far values move */
    float pairs[TILE * MAX_DIM / 2]; /* bfloat16 queries as they are given, without the scale, two a number */
    int32_t int8[TILE * MAX_DIM / 4]; /* four numbers each */
    int32_t int8_start[TILE]; /* -KEY_ZERO times the sum of the query's int8 numbers */
    float int8_scale[TILE], int8_per_unit[TILE], threshold[TILE]; /* what 1 stands for; numbers per unit */
    float shift[TILE], mass[TILE], sums[TILE * MAX_DIM]; /* of what was read: weights are exp(logit - shift) */
    float *std;           /* [spans, TILE], as the next three: of logits within clusters */
    float *least, *reach; /* int8 logits above the first are read; how far below it centroids may lie, by their spread */
    float *moved;         /* weights of the centroids times how far their values move, summed */
    int32_t n_hits[TILE];
    uint16_t near[TILE];                   /* which of sixteen clusters are within reach */
    uint16_t compared[TILE * 16], above[TILE * 16 + 32]; /* pairs of a query and a subcluster of a block; which keys reach the threshold */
    int32_t products[TILE * 16 * 16] __attribute__((aligned(64))); /* of the int8 keys of each pair */
    int32_t bounds[TILE * 16];             /* of each query and subcluster of a block: a key with at least this product is read */
    float *logits;         /* [TILE, padded] of columns; later their weights */
    int32_t *cluster_hits; /* [TILE, padded] keys read of each cluster */
    int32_t hits[TILE * MAX_HITS];   /* positions of the keys read of what was searched last */
    float hit_logits[TILE * MAX_HITS]; /* their logits, by int8 keys; later those of heavy keys are exact */
    const LocalKeys *local; /* NULL = local keys were read elsewhere */
    float local_weights[TILE * LOCAL_KEYS], local_sums[TILE * MAX_DIM];
} Tile;

Tile *prescore_new_tile(const RoutedCall *p, const LocalKeys *local);
int prescore_load_local(const RoutedCall *p, LocalKeys *local);
void prescore_load_local_block(const RoutedCall *p, const LocalKeys *local, int64_t kv_head, int64_t block);
void prescore_free_local(LocalKeys *local);
void prescore_attend_local(const RoutedCall *p, Tile *w);
void prescore_load_queries(const RoutedCall *p, Tile *w);
void prescore_begin_tile(const RoutedCall *p, Tile *w);
float prescore_mass_of_cluster(const RoutedCall *p, const Tile *w, int64_t span, int64_t t);
void prescore_begin_search(const RoutedCall *p, Tile *w);
int64_t prescore_search(const RoutedCall *p, Tile *w, int64_t block);
float prescore_exact_logits(const RoutedCall *p, Tile *w, int64_t t);

/* Whether queries, keys and values are bfloat16 and multiplied as such. */
INLINE int64_t half_products(const RoutedCall *p) {
#if defined(__AVX512BF16__)
    const int all = p->query.type == BFLOAT16 && p->key.type == BFLOAT16 && p->value.type == BFLOAT16;
    return all && p->dim % 32 == 0 && p->value_dim % 32 == 0;
#else
    (void)p;
    return 0;
#endif
}

/* Where a query stands in the arrays that query heads share. */
INLINE int64_t place_of(const RoutedCall *p, int64_t kv_head, int64_t query) { return kv_head * p->length + query % p->length; }

/* Take the next queries of a KV head that see the same clusters, at most a tile; returns where the next tile begins. */
INLINE int64_t next_tile(const RoutedCall *p, Tile *w, int64_t kv_head, int64_t begin, int64_t stop) {
    w->kv_head = kv_head;
    w->clusters = p->visible[place_of(p, kv_head, begin)];
    w->columns = (p->sink_columns + w->clusters + 15) / 16 * 16;
    w->spans = w->clusters ? (w->clusters - 1) / p->clusters_per_span + 1 : 0;
    w->n = 0;
    while (w->n < TILE && begin < stop && p->visible[place_of(p, kv_head, begin)] == w->clusters)
        w->index[w->n++] = kv_head * p->n_query + begin++;
    return begin;
}

/* Which covariance of all KV heads belongs to a span. */
INLINE int64_t cov_of(const RoutedCall *p, const Tile *w, int64_t span) {
    return w->kv_head * p->n_covs + (span + 1 < w->spans ? span : p->n_spans + (w->clusters - 1) / p->clusters_per_cov);
}

/* Where the columns of a span end; they begin where those before end, the first ones after the sinks. */
INLINE int64_t span_end(const RoutedCall *p, const Tile *w, int64_t span) {
    return span + 1 < w->spans ? p->sink_columns + (span + 1) * p->clusters_per_span : w->columns;
}

INLINE int64_t row_offset(const Rows *r, int64_t kv_head, int64_t row) { return r->at[kv_head] + row * r->step; }

INLINE float unit_of(uint16_t half) {
    const uint32_t raw = (uint32_t)half << 16;
    float unit;
    memcpy(&unit, &raw, sizeof unit);
    return unit;
}

INLINE floats load_row(const Rows *r, int64_t offset, int64_t i) {
    if (r->type == FLOAT32) return load((const float *)r->data + offset + i);
    if (r->type == INT8) {
        const int8_t *row = (const int8_t *)r->data + offset;
        uint16_t unit;
        bytes numbers;
        memcpy(&unit, row + r->dim + i / UNIT_NUMBERS * 2, sizeof unit);
        memcpy(&numbers, row + i, sizeof numbers);
        return __builtin_convertvector(__builtin_convertvector(numbers, ints), floats) * splat(unit_of(unit));
    }
    const uint16_t *from = (const uint16_t *)r->data + offset + i;
    return r->type == BFLOAT16 ? from_bfloat16(from) : from_float16(from);
}
INLINE float row_dot(const Rows *r, int64_t offset, const float *with, int64_t dim) {
    floats s = splat(0);
    for (int64_t i = 0; i < dim; i += WIDTH) s += load_row(r, offset, i) * load(with + i);
    return total(s);
}
/* The sums of four registers. */
INLINE void totals(const floats *v, float *to) {
#if defined(__AVX512F__)
    const __m512 low = _mm512_add_ps(_mm512_unpacklo_ps((__m512)v[0], (__m512)v[1]), _mm512_unpackhi_ps((__m512)v[0], (__m512)v[1]));
    const __m512 high = _mm512_add_ps(_mm512_unpacklo_ps((__m512)v[2], (__m512)v[3]), _mm512_unpackhi_ps((__m512)v[2], (__m512)v[3]));
    const __m512 all = _mm512_add_ps(_mm512_shuffle_ps(low, high, 0x44), _mm512_shuffle_ps(low, high, 0xee));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#elif defined(__SSE2__) && WIDTH == 4
    __m128 a = (__m128)v[0], b = (__m128)v[1], c = (__m128)v[2], d = (__m128)v[3];
    _MM_TRANSPOSE4_PS(a, b, c, d);
    _mm_storeu_ps(to, _mm_add_ps(_mm_add_ps(a, b), _mm_add_ps(c, d)));
#elif defined(__aarch64__)
    const float32x4_t low = vpaddq_f32((float32x4_t)v[0], (float32x4_t)v[1]);
    vst1q_f32(to, vpaddq_f32(low, vpaddq_f32((float32x4_t)v[2], (float32x4_t)v[3])));
#else
    for (int j = 0; j < 4; j++) to[j] = total(v[j]);
#endif
}
INLINE void row_dots_of_type(float *to, const Rows *r, int64_t type, int64_t kv_head, const int32_t *rows, int64_t n,
                             const float *with, int64_t dim) {
    const Rows own = {r->data, r->at, r->step, type, r->dim};
    for (int64_t i = 0; i < n; i += 4) {
        int64_t at[4];
        floats sum[4];
        for (int j = 0; j < 4; j++) {
            at[j] = row_offset(&own, kv_head, rows[i + j < n ? i + j : n - 1]);
            sum[j] = splat(0);
        }
        for (int64_t c = 0; c < dim; c += WIDTH) {
            const floats x = load(with + c);
            for (int j = 0; j < 4; j++) sum[j] += load_row(&own, at[j], c) * x;
        }
        totals(sum, to + i);
    }
}
/* Products of some rows with one vector, four at a time: more loads are in flight, and four registers are summed at once.
 * Writes up to three numbers after the last. */
INLINE void row_dots(float *to, const Rows *r, int64_t kv_head, const int32_t *rows, int64_t n, const float *with, int64_t dim) {
    if (r->type == FLOAT32)
        row_dots_of_type(to, r, FLOAT32, kv_head, rows, n, with, dim);
    else if (r->type == FLOAT16)
        row_dots_of_type(to, r, FLOAT16, kv_head, rows, n, with, dim);
    else if (r->type == INT8)
        row_dots_of_type(to, r, INT8, kv_head, rows, n, with, dim);
    else
        row_dots_of_type(to, r, BFLOAT16, kv_head, rows, n, with, dim);
}
INLINE void add_row(float *to, const Rows *r, int64_t offset, float factor, int64_t dim) {
    for (int64_t i = 0; i < dim; i += WIDTH) store(to + i, load(to + i) + load_row(r, offset, i) * splat(factor));
}
/* to += the sum of some rows, each with its weight, in the dimensions from `c` on: `n_sums` vectors, which stay in registers. */
INLINE void add_rows_at(float *to, const Rows *r, int64_t kv_head, const int32_t *rows, const float *weights, int64_t n, int64_t c,
                        const int n_sums) {
    floats sum[8];
    for (int k = 0; k < n_sums; k++) sum[k] = load(to + c + k * WIDTH);
    for (int64_t i = 0; i < n; i++) {
        const int64_t offset = row_offset(r, kv_head, rows[i]);
        const floats w = splat(weights[i]);
        for (int k = 0; k < n_sums; k++) sum[k] += load_row(r, offset, c + k * WIDTH) * w;
    }
    for (int k = 0; k < n_sums; k++) store(to + c + k * WIDTH, sum[k]);
}
/* to += the sum of some rows, each with its weight. */
INLINE void add_rows_of_type(float *to, const Rows *r, int64_t type, int64_t kv_head, const int32_t *rows,
                             const float *weights, int64_t n, int64_t dim) {
    const Rows own = {r->data, r->at, r->step, type, r->dim};
    int64_t c = 0;
    for (; c + 8 * WIDTH <= dim; c += 8 * WIDTH) add_rows_at(to, &own, kv_head, rows, weights, n, c, 8);
    for (; c + 4 * WIDTH <= dim; c += 4 * WIDTH) add_rows_at(to, &own, kv_head, rows, weights, n, c, 4);
    for (; c < dim; c += WIDTH) add_rows_at(to, &own, kv_head, rows, weights, n, c, 1);
}
INLINE void add_rows(float *to, const Rows *r, int64_t kv_head, const int32_t *rows, const float *weights, int64_t n,
                     int64_t dim) {
    if (r->type == FLOAT32)
        add_rows_of_type(to, r, FLOAT32, kv_head, rows, weights, n, dim);
    else if (r->type == FLOAT16)
        add_rows_of_type(to, r, FLOAT16, kv_head, rows, weights, n, dim);
    else if (r->type == INT8)
        add_rows_of_type(to, r, INT8, kv_head, rows, weights, n, dim);
    else
        add_rows_of_type(to, r, BFLOAT16, kv_head, rows, weights, n, dim);
}
#if defined(__AVX512BF16__)
/* `row_dots` of bfloat16 keys with a query of pairs. */
INLINE void half_dots(float *to, const Rows *r, int64_t kv_head, const int32_t *rows, int64_t n, const float *with, int64_t dim,
                      float scale) {
    for (int64_t i = 0; i < n; i += 4) {
        const uint16_t *at[4];
        floats sum[4];
        for (int j = 0; j < 4; j++) {
            at[j] = (const uint16_t *)r->data + row_offset(r, kv_head, rows[i + j < n ? i + j : n - 1]);
            sum[j] = splat(0);
        }
        for (int64_t c = 0; c < dim; c += 32) {
            const __m512bh x = (__m512bh)load(with + c / 2);
            for (int j = 0; j < 4; j++) sum[j] = (floats)_mm512_dpbf16_ps((__m512)sum[j], (__m512bh)_mm512_loadu_si512(at[j] + c), x);
        }
        totals(sum, to + i);
        for (int j = 0; j < 4; j++) to[i + j] *= scale;
    }
}
/* `add_rows` of bfloat16 values, two at a time, with weights rounded to bfloat16. There is space for one weight more. */
INLINE void add_half_rows(float *to, const Rows *r, int64_t kv_head, const int32_t *rows, float *weights, int64_t n, int64_t dim) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    weights[n] = 0;
    for (int64_t c = 0; c < dim; c += 64) {
        const int wide = dim - c >= 64;
        __m512 low[2], high[2];
        for (int h = 0; h < 2; h++) low[h] = high[h] = _mm512_setzero_ps();
        for (int64_t i = 0; i < n; i += 2) {
            const uint16_t *a = (const uint16_t *)r->data + row_offset(r, kv_head, rows[i]) + c;
            const uint16_t *b = (const uint16_t *)r->data + row_offset(r, kv_head, rows[i + 1 < n ? i + 1 : i]) + c;
            const __m128bh both = _mm_cvtneps_pbh(_mm_castpd_ps(_mm_load_sd((const double *)(weights + i))));
            const __m512bh w = (__m512bh)_mm512_broadcastd_epi32((__m128i)both);
            for (int h = 0; h < 1 + wide; h++) {
                const __m512i x = _mm512_loadu_si512(a + 32 * h), y = _mm512_loadu_si512(b + 32 * h);
                low[h] = _mm512_dpbf16_ps(low[h], (__m512bh)_mm512_unpacklo_epi16(x, y), w);
                high[h] = _mm512_dpbf16_ps(high[h], (__m512bh)_mm512_unpackhi_epi16(x, y), w);
            }
        }
        for (int h = 0; h < 1 + wide; h++) { /* unpacking has moved dimensions by fours */
            float *own = to + c + 32 * h;
            store(own, load(own) + (floats)_mm512_permutex2var_ps(low[h], first, high[h]));
            store(own + 16, load(own + 16) + (floats)_mm512_permutex2var_ps(low[h], second, high[h]));
        }
    }
}
#endif
INLINE void prefetch_row(const Rows *r, int64_t offset, int64_t dim) {
    const int64_t size = r->type == FLOAT32 ? 4 : r->type == INT8 ? 1 : 2;
    for (int64_t i = 0; i < dim * size; i += 64) __builtin_prefetch((const char *)r->data + offset * size + i);
}

#define VECTORS (16 / WIDTH) /* registers of a panel: sixteen columns */
#if defined(__aarch64__)
#define ROWS 4 /* rows whose sums are kept in registers, one panel at a time: of thirty-two, or of sixteen */
#else
#define ROWS (8 / VECTORS)
#endif
#define PANELS (WIDTH == 16 ? 4 : 1)

/* sum + x * y; with `half`, numbers are pairs of bfloat16 whose two products are added. */
INLINE floats multiply_add(const int half, floats sum, floats x, float y) {
#if defined(__AVX512BF16__)
    if (half) return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)splat_bits(y));
#endif
    (void)half;
    return sum + x * splat(y);
}

/* to[t] (+)= sum over i of a[t, i] * m[i], for the rows t of a tile and some panels; `at_once` rows and all panels at a time. */
INLINE void product_of(const int half, const int at_once, const int panels, float *to, int64_t to_step, const float *a, int64_t a_step,
                       int64_t a_inner, int64_t n, const float *m, int64_t m_step, int64_t panel, int64_t inner, int add) {
    for (int64_t t = 0; t < n; t += at_once) {
        const float *row[ROWS];
        floats sum[ROWS][PANELS * VECTORS];
        for (int j = 0; j < at_once; j++) {
            row[j] = a + (t + j < n ? t + j : n - 1) * a_step;
            for (int v = 0; v < panels * VECTORS; v++) sum[j][v] = splat(0);
        }
        for (int64_t i = 0; i < inner; i++) {
            floats x[PANELS * VECTORS];
            for (int v = 0; v < panels * VECTORS; v++) x[v] = load(m + i * m_step + v / VECTORS * panel + v % VECTORS * WIDTH);
            for (int j = 0; j < at_once; j++)
                for (int v = 0; v < panels * VECTORS; v++) sum[j][v] = multiply_add(half, sum[j][v], x[v], row[j][i * a_inner]);
        }
        for (int j = 0; j < at_once && t + j < n; j++)
            for (int v = 0; v < panels * VECTORS; v++) {
                float *at = to + (t + j) * to_step + v * WIDTH;
                if (add) sum[j][v] += load(at);
                store(at, sum[j][v]);
            }
    }
}
/* The same for `wide` columns, a multiple of 16. Panels of `m`, sixteen columns each, lie `panel` numbers apart. */
INLINE void any_product(const int half, float *to, int64_t to_step, const float *a, int64_t a_step, int64_t a_inner, int64_t n,
                        const float *m, int64_t m_step, int64_t panel, int64_t inner, int64_t wide, int add) {
    int64_t c = 0;
    for (; PANELS > 1 && c + 16 * PANELS <= wide; c += 16 * PANELS) {
        const float *own = m + c / 16 * panel;
        if (n > 2) /* a single step has few queries */
            product_of(half, 4, PANELS, to + c, to_step, a, a_step, a_inner, n, own, m_step, panel, inner, add);
        else
            product_of(half, 1, PANELS, to + c, to_step, a, a_step, a_inner, n, own, m_step, panel, inner, add);
    }
    for (; c < wide; c += 16) {
        const float *own = m + c / 16 * panel;
        if (n > 2)
            product_of(half, ROWS, 1, to + c, to_step, a, a_step, a_inner, n, own, m_step, panel, inner, add);
        else
            product_of(half, 1, 1, to + c, to_step, a, a_step, a_inner, n, own, m_step, panel, inner, add);
    }
}
INLINE void product(float *to, int64_t to_step, const float *a, int64_t a_step, int64_t a_inner, int64_t n,
                    const float *m, int64_t m_step, int64_t panel, int64_t inner, int64_t wide, int add) {
    any_product(0, to, to_step, a, a_step, a_inner, n, m, m_step, panel, inner, wide, add);
}

/* to[t] = sum over i of a[i, t] * m[i]: the same where the rows of `a` are summed over, and `n` of its columns, a
 * multiple of 8, are wanted; of a result that is its own transpose, the `upper` half alone. */
INLINE void turned_product(float *to, int64_t to_step, const float *a, int64_t a_step, int64_t n, const float *m,
                           int64_t m_step, int64_t inner, int64_t wide, int upper) {
    for (int64_t t = 0; t < n; t += ROWS)
        for (int64_t c = upper ? t / 16 * 16 : 0; c < wide; c += 16) {
            floats sum[ROWS][VECTORS];
            for (int j = 0; j < ROWS; j++)
                for (int v = 0; v < VECTORS; v++) sum[j][v] = splat(0);
            for (int64_t i = 0; i < inner; i++) {
                const float *own = a + i * a_step + t;
                floats x[VECTORS];
                for (int v = 0; v < VECTORS; v++) x[v] = load(m + i * m_step + c + v * WIDTH);
                for (int j = 0; j < ROWS; j++)
                    for (int v = 0; v < VECTORS; v++) sum[j][v] += x[v] * splat(own[j]);
            }
            for (int j = 0; j < ROWS; j++)
                for (int v = 0; v < VECTORS; v++) store(to + (t + j) * to_step + c + v * WIDTH, sum[j][v]);
        }
}

/* rows' rows, [dim, dim]: the half above the diagonal is computed, the other one copied. */
INLINE void second_moment(float *to, const float *rows, int64_t n, int64_t dim) {
    turned_product(to, dim, rows, dim, dim, rows, dim, n, dim, 1);
    for (int64_t i = 16; i < dim; i++)
        for (int64_t j = 0; j < i / 16 * 16; j++) to[i * dim + j] = to[j * dim + i];
}

#endif
