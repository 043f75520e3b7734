/* Routed attention beyond the local chunks, on CPUs: what a call is made of, and what one thread works with.
 *
 * Pointers and sizes only. routed/compiled/checked.py makes the only calls, and all they touch is checked there; nothing
 * here checks again.
 */
#ifndef PRESCORE_ROUTED_H
#define PRESCORE_ROUTED_H

#include <stdlib.h>

#include "threads.h"
#include "vectors.h"

#define TILE 32      /* queries that are worked off together */
#define MOST_DIM 256 /* of keys: sums of codes in 16 bits hold no more; and of values */
#define ODD 16       /* keys of a node that lie farthest from its mean: its first ones, compared by every query */
#define NEAR_ROWS 256 /* that are weighed together: their weights for a tile stay in cache */

enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

/* Rows of keys or values where they lie: that of a lane begins `at[lane]` numbers behind `data`. */
typedef struct {
    const void *data;
    const int64_t *at;
    int64_t step, type; /* numbers between rows, one of the types above */
} Rows;

/* Must equal `FarCall` in routed/compiled/call.py. A lane has `n_query` queries, `length` of each of its heads, one head
 * after the other. A column is a sink or a node: `sink_room` places for sinks (a multiple of 16, those behind `sinks` are
 * empty), then the nodes. */
typedef struct {
    Rows query; /* [lanes * heads] lanes of `length` rows */
    Rows key, value;
    const int32_t *visible;     /* [lanes, length]: nodes that a query sees */
    const int32_t *first, *stop; /* [lanes, length]: rows that it reads in any case; NULL = read elsewhere */
    const float *columns;       /* [lanes, room / 16, dim, 16]: keys of the columns, sixteen side by side */
    const float *column_values; /* [lanes, room, value_dim] */
    const int32_t *rows;        /* [lanes, node_room, leaf]: the keys of each node */
    const uint8_t *codes;       /* [lanes, node_room, leaf / 16, dim / 8, 16, 4]: two numbers of four bits a byte */
    const float *scales;        /* [lanes, node_room, leaf / 16, 2, 16] */
    const uint8_t *odd_codes;   /* [lanes, node_room, dim / 8, 16, 4]: those of the odd keys again, side by side */
    const float *odd_scales;    /* [lanes, node_room, 2, 16] */
    const float *spread;        /* [lanes, pools, dim, dim]: covariance of keys within nodes */
    const float *drift;         /* [lanes, pools, dim, value_dim]: that of keys and values */
    int64_t lanes, n_query, length, dim, value_dim, leaf, sinks, sink_room, room, node_room, pools, nodes_per_pool;
    int64_t more; /* columns behind `room` that a sampled rest needs */
    float scale, reach, log_share, most_known_gain, log_sink_part;
    float *output, *lse; /* [lanes, n_query, value_dim], [lanes, n_query]: of what was read elsewhere; then of all */
    float *limit;        /* [lanes, n_query]: from which logit on keys are read by themselves */
    int64_t *counts;     /* keys searched, rows read */
} Problem;

/* Rows from `begin` to `stop` of every lane, which some query reads in any case. */
typedef struct {
    int64_t begin, stop, blocks;
    float *keys;   /* [lanes, blocks, dim, 16]: sixteen side by side */
    float *values; /* [lanes, stop - begin, value_dim]; NULL = they lie as they should */
} Near;

/* A tile of queries of one lane that see the same nodes. */
typedef struct {
    int64_t lane, n, nodes, columns; /* columns are rounded up to 16 */
    int64_t index[TILE];             /* of each query in [lanes, n_query] */
    int64_t padded, found_room;
    float query[TILE * MOST_DIM], drift[TILE * MOST_DIM], moment[TILE * MOST_DIM];
    int8_t code[TILE * MOST_DIM];
    int32_t code_sum[TILE * 2];
    float code_scale[TILE], per_code[TILE], spread[TILE], limit[TILE]; /* per_code: 1 / code_scale */
    int32_t n_found[TILE];
    float *logits;     /* [TILE, padded] of columns; later their weights */
    float *move;       /* [TILE, padded]: how far a stand-in's value goes along the drift */
    int32_t *hits;     /* [TILE, padded] rows read of each node */
    float *row_logits; /* [found_room] */
    int32_t *found;    /* [TILE, found_room] rows read */
    const Near *near;  /* what `first` and `stop` speak of; NULL = it was read elsewhere */
    float near_weights[TILE * NEAR_ROWS], near_sums[TILE * MOST_DIM];
} Work;

Work *prescore_new_work(const Problem *p, const Near *near);
int prescore_take_near(const Problem *p, Near *near);
void prescore_free_near(Near *near);
void prescore_read_near(const Problem *p, Work *w);
void prescore_take_queries(const Problem *p, Work *w);
void prescore_begin_tile(const Problem *p, Work *w);
void prescore_find_rows(const Problem *p, Work *w);
void prescore_correct_columns(const Problem *p, Work *w, int64_t t);
void prescore_set_limit(const Problem *p, Work *w, int64_t t);
float prescore_read_rows(const Problem *p, Work *w, int64_t t, float *highest);

/* Where a lane's query stands in what all heads share. */
INLINE int64_t place_of(const Problem *p, int64_t lane, int64_t query) { return lane * p->length + query % p->length; }

/* Take the next queries of a lane that see the same nodes, at most a tile; returns how many there are behind them. */
INLINE int64_t next_tile(const Problem *p, Work *w, int64_t lane, int64_t begin, int64_t stop) {
    w->lane = lane;
    w->nodes = p->visible[place_of(p, lane, begin)];
    w->columns = (p->sink_room + w->nodes + 15) / 16 * 16;
    w->n = 0;
    while (w->n < TILE && begin < stop && p->visible[place_of(p, lane, begin)] == w->nodes)
        w->index[w->n++] = lane * p->n_query + begin++;
    return begin;
}

INLINE int64_t row_offset(const Rows *r, int64_t lane, int64_t row) { return r->at[lane] + row * r->step; }

/* Sixteen-bit numbers as floats. */
INLINE floats widen(const uint16_t *from, int64_t type) {
    floats out;
    if (type == BFLOAT16) {
        ints raw;
        for (int i = 0; i < WIDTH; i++) raw[i] = (int32_t)((uint32_t)from[i] << 16);
        return (floats)raw;
    }
    for (int i = 0; i < WIDTH; i++) {
        _Float16 half;
        memcpy(&half, from + i, 2);
        out[i] = (float)half;
    }
    return out;
}
INLINE floats load_row(const Rows *r, int64_t offset, int64_t i) {
    if (r->type == FLOAT32) return load((const float *)r->data + offset + i);
    return widen((const uint16_t *)r->data + offset + i, r->type);
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
#else
    for (int j = 0; j < 4; j++) to[j] = total(v[j]);
#endif
}
INLINE void row_dots_of_type(float *to, const Rows *r, int64_t type, int64_t lane, const int32_t *rows, int64_t n,
                             const float *with, int64_t dim) {
    const Rows own = {r->data, r->at, r->step, type};
    for (int64_t i = 0; i < n; i += 4) {
        int64_t at[4];
        floats sum[4];
        for (int j = 0; j < 4; j++) {
            at[j] = row_offset(&own, lane, rows[i + j < n ? i + j : n - 1]);
            sum[j] = splat(0);
        }
        for (int64_t c = 0; c < dim; c += WIDTH) {
            const floats x = load(with + c);
            for (int j = 0; j < 4; j++) sum[j] += load_row(&own, at[j], c) * x;
        }
        totals(sum, to + i);
    }
}
/* Products of some rows with one vector, four at a time: more of them are on their way from memory, and the sums of four
 * registers are one. Writes up to three numbers behind the last. */
INLINE void row_dots(float *to, const Rows *r, int64_t lane, const int32_t *rows, int64_t n, const float *with, int64_t dim) {
    if (r->type == FLOAT32)
        row_dots_of_type(to, r, FLOAT32, lane, rows, n, with, dim);
    else
        row_dots_of_type(to, r, r->type, lane, rows, n, with, dim);
}
INLINE void add_row(float *to, const Rows *r, int64_t offset, float factor, int64_t dim) {
    for (int64_t i = 0; i < dim; i += WIDTH) store(to + i, load(to + i) + load_row(r, offset, i) * splat(factor));
}
/* to += the sum of some rows, each with its weight: four vectors at a time stay in registers. */
INLINE void add_rows_of_type(float *to, const Rows *r, int64_t type, int64_t lane, const int32_t *rows,
                             const float *weights, int64_t n, int64_t dim) {
    const Rows own = {r->data, r->at, r->step, type};
    int64_t c = 0;
    for (; c + 4 * WIDTH <= dim; c += 4 * WIDTH) {
        floats a0 = load(to + c), a1 = load(to + c + WIDTH), a2 = load(to + c + 2 * WIDTH), a3 = load(to + c + 3 * WIDTH);
        for (int64_t i = 0; i < n; i++) {
            const int64_t offset = row_offset(&own, lane, rows[i]) + c;
            const floats w = splat(weights[i]);
            a0 += load_row(&own, offset, 0) * w;
            a1 += load_row(&own, offset, WIDTH) * w;
            a2 += load_row(&own, offset, 2 * WIDTH) * w;
            a3 += load_row(&own, offset, 3 * WIDTH) * w;
        }
        store(to + c, a0);
        store(to + c + WIDTH, a1);
        store(to + c + 2 * WIDTH, a2);
        store(to + c + 3 * WIDTH, a3);
    }
    for (; c < dim; c += WIDTH) {
        floats a = load(to + c);
        for (int64_t i = 0; i < n; i++)
            a += load_row(&own, row_offset(&own, lane, rows[i]), c) * splat(weights[i]);
        store(to + c, a);
    }
}
INLINE void add_rows(float *to, const Rows *r, int64_t lane, const int32_t *rows, const float *weights, int64_t n,
                     int64_t dim) {
    if (r->type == FLOAT32)
        add_rows_of_type(to, r, FLOAT32, lane, rows, weights, n, dim);
    else
        add_rows_of_type(to, r, r->type, lane, rows, weights, n, dim);
}
INLINE void fetch_row(const Rows *r, int64_t offset, int64_t dim) {
    const int64_t size = r->type == FLOAT32 ? 4 : 2;
    for (int64_t i = 0; i < dim * size; i += 64) __builtin_prefetch((const char *)r->data + offset * size + i);
}

/* Sums of products are kept in eight registers: sixteen columns, and as many rows as then are left. */
#define VECTORS (16 / WIDTH)
#define ROWS (8 / VECTORS)

/* to[t] (+)= sum over i of a[t, i] * m[i], for the rows t of a tile and `wide` columns, a multiple of 16; `together` rows
 * at a time. */
INLINE void product_of(const int together, float *to, int64_t to_step, const float *a, int64_t a_step, int64_t a_inner,
                       int64_t n, const float *m, int64_t m_step, int64_t inner, int64_t wide, int add) {
    for (int64_t c = 0; c < wide; c += 16)
        for (int64_t t = 0; t < n; t += together) {
            const float *row[ROWS];
            floats sum[ROWS][VECTORS];
            for (int j = 0; j < together; j++) {
                row[j] = a + (t + j < n ? t + j : n - 1) * a_step;
                for (int v = 0; v < VECTORS; v++) sum[j][v] = splat(0);
            }
            for (int64_t i = 0; i < inner; i++) {
                floats x[VECTORS];
                for (int v = 0; v < VECTORS; v++) x[v] = load(m + i * m_step + c + v * WIDTH);
                for (int j = 0; j < together; j++)
                    for (int v = 0; v < VECTORS; v++) sum[j][v] += x[v] * splat(row[j][i * a_inner]);
            }
            for (int j = 0; j < together && t + j < n; j++)
                for (int v = 0; v < VECTORS; v++) {
                    float *at = to + (t + j) * to_step + c + v * WIDTH;
                    if (add) sum[j][v] += load(at);
                    store(at, sum[j][v]);
                }
        }
}
INLINE void product(float *to, int64_t to_step, const float *a, int64_t a_step, int64_t a_inner, int64_t n,
                    const float *m, int64_t m_step, int64_t inner, int64_t wide, int add) {
    if (n > 2) /* a single step has few queries */
        product_of(ROWS, to, to_step, a, a_step, a_inner, n, m, m_step, inner, wide, add);
    else
        product_of(1, to, to_step, a, a_step, a_inner, n, m, m_step, inner, wide, add);
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
