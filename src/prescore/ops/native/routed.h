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

enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

/* Rows of keys or values where they lie: that of a lane begins `at[lane]` numbers behind `data`. */
typedef struct {
    const void *data;
    const int64_t *at;
    int64_t step, type; /* numbers between rows, one of the types above */
} Rows;

/* Must equal `FarCall` in routed/compiled/call.py. A column is a sink or a node: `sink_room` places for sinks (a multiple of
 * 16, those behind `sinks` are empty), then the nodes. */
typedef struct {
    const float *query;         /* [lanes, n_query, dim] */
    Rows key, value;
    const int32_t *visible;     /* [lanes, n_query]: nodes that a query sees */
    const int32_t *first, *stop; /* [lanes, n_query]: rows that it reads in any case; NULL = none */
    const float *columns;       /* [lanes, room / 16, dim, 16]: keys of the columns, sixteen side by side */
    const float *column_values; /* [lanes, room, value_dim] */
    const int32_t *rows;        /* [lanes, node_room, leaf]: the keys of each node */
    const uint8_t *codes;       /* [lanes, node_room, leaf / 16, dim / 8, 16, 4]: two numbers of four bits a byte */
    const float *scales;        /* [lanes, node_room, leaf / 16, 2, 16] */
    const float *spread;        /* [lanes, pools, dim, dim]: covariance of keys within nodes */
    const float *drift;         /* [lanes, pools, dim, value_dim]: that of keys and values */
    int64_t lanes, n_query, dim, value_dim, leaf, sinks, sink_room, room, node_room, pools, nodes_per_pool;
    int64_t more; /* columns behind `room` that a sampled rest needs */
    float scale, reach, log_share, most_gain;
    float margin; /* deviations of its own error that a coded logit is lifted by */
    float *output, *lse; /* [lanes, n_query, value_dim], [lanes, n_query]: of what was read elsewhere; then of all */
    float *limit;        /* [lanes, n_query]: from which logit on keys are read by themselves */
    int64_t *counts;     /* keys searched, rows read */
} Problem;

/* A tile of queries of one lane that see the same nodes. */
typedef struct {
    int64_t lane, n, nodes, columns; /* columns are rounded up to 16 */
    int64_t index[TILE];             /* of each query in [lanes, n_query] */
    int64_t padded, found_room;
    float query[TILE * MOST_DIM], drift[TILE * MOST_DIM], moment[TILE * MOST_DIM];
    int8_t code[TILE * MOST_DIM];
    int32_t code_sum[TILE * 2];
    float lift[TILE * 2]; /* of the sums of each half */
    float code_scale[TILE], spread[TILE], limit[TILE];
    int32_t n_found[TILE];
    float *logits;     /* [TILE, padded] of columns; later their weights */
    float *move;       /* [TILE, padded]: how far a stand-in's value goes along the drift */
    int32_t *hits;     /* [TILE, padded] rows read of each node */
    float *row_logits; /* [found_room] */
    int32_t *found;    /* [TILE, found_room] rows read */
} Work;

Work *prescore_new_work(const Problem *p);
void prescore_begin_tile(const Problem *p, Work *w);
void prescore_find_rows(const Problem *p, Work *w);
void prescore_correct_columns(const Problem *p, Work *w, int64_t t);
void prescore_set_limit(const Problem *p, Work *w, int64_t t);
void prescore_read_fixed(const Problem *p, Work *w, int64_t t);
float prescore_read_rows(const Problem *p, Work *w, int64_t t, float *highest);

/* Take the next queries of a lane that see the same nodes, at most a tile; returns how many there are behind them. */
INLINE int64_t next_tile(const Problem *p, Work *w, int64_t lane, int64_t begin, int64_t stop) {
    const int32_t *visible = p->visible + lane * p->n_query;
    w->lane = lane;
    w->nodes = visible[begin];
    w->columns = (p->sink_room + w->nodes + 15) / 16 * 16;
    w->n = 0;
    while (w->n < TILE && begin < stop && visible[begin] == w->nodes) w->index[w->n++] = lane * p->n_query + begin++;
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
INLINE void add_row(float *to, const Rows *r, int64_t offset, float factor, int64_t dim) {
    for (int64_t i = 0; i < dim; i += WIDTH) store(to + i, load(to + i) + load_row(r, offset, i) * splat(factor));
}
/* to += the sum of some rows, `rows[i]` or, where that is NULL, `first + i`, each with its weight: four vectors at a
 * time stay in registers. */
INLINE void add_rows_of_type(float *to, const Rows *r, int64_t type, int64_t lane, const int32_t *rows, int64_t first,
                             const float *weights, int64_t n, int64_t dim) {
    const Rows own = {r->data, r->at, r->step, type};
    int64_t c = 0;
    for (; c + 4 * WIDTH <= dim; c += 4 * WIDTH) {
        floats a0 = load(to + c), a1 = load(to + c + WIDTH), a2 = load(to + c + 2 * WIDTH), a3 = load(to + c + 3 * WIDTH);
        for (int64_t i = 0; i < n; i++) {
            const int64_t offset = row_offset(&own, lane, rows ? rows[i] : first + i) + c;
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
            a += load_row(&own, row_offset(&own, lane, rows ? rows[i] : first + i), c) * splat(weights[i]);
        store(to + c, a);
    }
}
INLINE void add_rows(float *to, const Rows *r, int64_t lane, const int32_t *rows, int64_t first, const float *weights,
                     int64_t n, int64_t dim) {
    if (r->type == FLOAT32)
        add_rows_of_type(to, r, FLOAT32, lane, rows, first, weights, n, dim);
    else
        add_rows_of_type(to, r, r->type, lane, rows, first, weights, n, dim);
}
INLINE void fetch_row(const Rows *r, int64_t offset, int64_t dim) {
    const int64_t size = r->type == FLOAT32 ? 4 : 2;
    for (int64_t i = 0; i < dim * size; i += 64) __builtin_prefetch((const char *)r->data + offset * size + i);
}

/* to[t] (+)= sum over i of a[t, i] * m[i], for the rows t of a tile and `wide` columns. */
INLINE void product(float *to, int64_t to_step, const float *a, int64_t a_step, int64_t a_inner, int64_t n,
                    const float *m, int64_t m_step, int64_t inner, int64_t wide, int add) {
    for (int64_t c = 0; c < wide; c += WIDTH)
        for (int64_t t = 0; t < n; t += 8) {
            const float *row[8];
            floats sum[8];
            for (int j = 0; j < 8; j++) {
                row[j] = a + (t + j < n ? t + j : n - 1) * a_step;
                sum[j] = splat(0);
            }
            for (int64_t i = 0; i < inner; i++) {
                floats x = load(m + i * m_step + c);
                for (int j = 0; j < 8; j++) sum[j] += x * splat(row[j][i * a_inner]);
            }
            for (int j = 0; j < 8 && t + j < n; j++) {
                float *at = to + (t + j) * to_step + c;
                if (add) sum[j] += load(at);
                store(at, sum[j]);
            }
        }
}

#endif
