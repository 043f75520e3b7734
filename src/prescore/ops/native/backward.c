/* Routed attention beyond the local chunks, backward, under the merged output and log-sum-exp.
 *
 * With weights `p` and the gradient `g` of the output, a logit's gradient is `p (g . v - g . output)`. Which rows were
 * read is found again from each query's limit.
 */
#include "routed.h"

/* Must equal `FarGradients` in routed/compiled/call.py. Sums of keys, values and columns are kept `parts` times, for as many
 * threads at once, one after the other. */
typedef struct {
    const float *grad, *product;        /* [lanes, n_query, value_dim], [lanes, n_query]: grad . output */
    const float *column_keys;           /* [lanes, room, dim] */
    const float *value_columns;         /* [lanes, room / 16, value_dim, 16] */
    float *query;                       /* [lanes, n_query, dim]: added to */
    float *key, *value;                 /* [parts, lanes, n_keys, dim], [.., value_dim]: added to */
    float *column_key, *column_value;   /* [parts, lanes, room, dim], [.., value_dim]: added to */
    int64_t parts, n_keys;
} Gradients;

/* One thread's share of the sums of a lane. */
typedef struct {
    float *key, *value, *column_key, *column_value;
} Sums;

static void rows_backward(const Problem *p, const Gradients *g, const Work *w, const Sums *s, int64_t t, float *to) {
    const int64_t at = w->index[t], dim = p->dim, wide = p->value_dim, found = w->n_found[t];
    const int32_t *rows = w->found + t * w->found_room;
    const float *query = w->query + t * dim, *grad = g->grad + at * wide;
    for (int64_t i = 0; i < found; i++) {
        const int64_t row = rows[i], key = row_offset(&p->key, w->lane, row), value = row_offset(&p->value, w->lane, row);
        const float weight = expf(row_dot(&p->key, key, query, dim) - p->lse[at]);
        const float d = weight * (row_dot(&p->value, value, grad, wide) - g->product[at]);
        add_row(to, &p->key, key, d, dim);
        add_scaled(s->key + row * dim, query, d, dim);
        add_scaled(s->value + row * wide, grad, weight, wide);
    }
}

/* Weights of the columns of a query, and the gradients of their logits, in place of `logits` and `move`. */
static void column_gradients(const Problem *p, const Gradients *g, Work *w, int64_t t, const float *along) {
    const int64_t at = w->index[t];
    const floats lse = splat(p->lse[at]), product = splat(g->product[at]);
    const floats drifted = splat(dot(g->grad + at * p->value_dim, w->drift + t * p->value_dim, p->value_dim));
    float *logits = w->logits + t * w->padded, *moves = w->move + t * w->padded;
    for (int64_t c = 0; c < w->columns; c += WIDTH) {
        floats weight = vexp(load(logits + c) - lse);
        store(moves + c, weight * (load(along + c) + load(moves + c) * drifted - product));
        store(logits + c, weight);
    }
}

static void tile_backward(const Problem *p, const Gradients *g, Work *w, const Sums *s, float *along, float *grads) {
    const int64_t dim = p->dim, wide = p->value_dim, columns = p->sink_room + w->nodes;
    float sums[TILE * MOST_DIM];
    prescore_begin_tile(p, w);
    memset(w->n_found, 0, sizeof w->n_found);
    for (int64_t t = 0; t < w->n; t++) {
        w->limit[t] = p->limit[w->index[t]];
        memcpy(grads + t * wide, g->grad + w->index[t] * wide, sizeof(float) * (size_t)wide);
    }
    if (w->nodes) {
        prescore_find_rows(p, w);
        for (int64_t t = 0; t < w->n; t++) prescore_correct_columns(p, w, t);
    } else {
        memset(w->drift, 0, sizeof(float) * (size_t)(w->n * wide));
        for (int64_t t = 0; t < w->n; t++) memset(w->move + t * w->padded, 0, sizeof(float) * (size_t)w->columns);
    }
    const float *values = g->value_columns + w->lane * p->room * wide;
    for (int64_t b = 0; b < w->columns / 16; b++)
        product(along + 16 * b, w->padded, grads, wide, 1, w->n, values + b * wide * 16, 16, wide, 16, 0);
    for (int64_t t = 0; t < w->n; t++) {
        if (p->lse[w->index[t]] == -INFINITY) { /* saw nothing */
            memset(w->logits + t * w->padded, 0, sizeof(float) * (size_t)w->columns);
            memset(w->move + t * w->padded, 0, sizeof(float) * (size_t)w->columns);
        } else {
            column_gradients(p, g, w, t, along + t * w->padded);
        }
    }
    product(sums, dim, w->move, w->padded, 1, w->n, g->column_keys + w->lane * p->room * dim, dim, columns, dim, 0);
    product(s->column_key, dim, w->move, 1, w->padded, columns, w->query, dim, w->n, dim, 1);
    product(s->column_value, wide, w->logits, 1, w->padded, columns, grads, wide, w->n, wide, 1);
    for (int64_t t = 0; t < w->n; t++) {
        if (p->lse[w->index[t]] == -INFINITY) continue;
        rows_backward(p, g, w, s, t, sums + t * dim);
        add_scaled(g->query + w->index[t] * dim, sums + t * dim, p->scale, dim);
    }
}

/* Returns 0, or 1 where there was no memory. */
PRESCORE_EXPORT int prescore_routed_backward(const Problem *p, const Gradients *g) {
    const int64_t tiles = (p->n_query + TILE - 1) / TILE, lanes = p->lanes;
    int failed = 0;
#pragma omp parallel for schedule(dynamic, 1) num_threads(prescore_threads())
    for (int64_t job = 0; job < lanes * g->parts; job++) {
        const int64_t lane = job % lanes, part = job / lanes;
        Work *w = prescore_new_work(p);
        float *along = w ? malloc(sizeof(float) * (size_t)(TILE * (w->padded + MOST_DIM))) : NULL;
        if (!along) {
#pragma omp atomic write
            failed = 1;
            free(w);
            continue;
        }
        const Sums s = {
            g->key + (part * lanes + lane) * g->n_keys * p->dim,
            g->value + (part * lanes + lane) * g->n_keys * p->value_dim,
            g->column_key + (part * lanes + lane) * p->room * p->dim,
            g->column_value + (part * lanes + lane) * p->room * p->value_dim,
        };
        for (int64_t tile = part; tile < tiles; tile += g->parts) {
            const int64_t begin = tile * TILE, stop = begin + TILE < p->n_query ? begin + TILE : p->n_query;
            for (int64_t done = begin; done < stop;) {
                done = next_tile(p, w, lane, done, stop);
                if (w->nodes || p->sinks) tile_backward(p, g, w, &s, along, along + TILE * w->padded);
            }
        }
        free(along);
        free(w);
    }
    return failed;
}
