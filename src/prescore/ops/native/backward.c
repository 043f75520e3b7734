/* Routed attention beyond the local chunks, backward, under the merged output and log-sum-exp.
 *
 * With weights `p` and the gradient `g` of the output, a logit's gradient is `p (g . v - g . output)`. Which rows were
 * read is found again from each query's limit. A stand-in's logit and value also depend on the limit, on the spread and
 * on the drift of its query; the limit again on all that is known before the search.
 */
#include "routed.h"
#include "stand_ins.h"

/* Must equal `FarGradients` in routed/compiled/buffers.py. Sums of keys, values, columns and covariances are kept
 * `parts` times, for as many threads at once, one after the other. */
typedef struct {
    const float *grad, *product;        /* [lanes, n_query, value_dim], [lanes, n_query]: grad . output */
    const float *column_keys;           /* [lanes, room, dim] */
    const float *value_columns;         /* [lanes, room / 16, value_dim, 16] */
    const float *turned_drift;          /* [lanes, pools, value_dim, dim] */
    float *query;                       /* [lanes, n_query, dim]: added to */
    float *limit;                       /* [lanes, n_query]: written */
    float *key, *value;                 /* [parts, lanes, n_keys, dim], [.., value_dim]: added to */
    float *column_key, *column_value;   /* [parts, lanes, room, dim], [.., value_dim]: added to */
    float *spread, *drift;              /* [parts, lanes, pools, dim, dim], [.., dim, value_dim]: added to */
    int64_t parts, n_keys;
} Gradients;

/* One thread's share of the sums of a lane. */
typedef struct {
    float *key, *value, *column_key, *column_value, *spread, *drift;
} Sums;

/* What a tile needs besides its `Work`. */
typedef struct {
    float *along;        /* [TILE, padded]: grad . value of each column; later its share of what is known */
    float *grads;        /* [TILE, value_dim] */
    float by_query[TILE * MOST_DIM]; /* gradients of the scaled queries */
    float by_spread[TILE]; /* of each query's spread, divided by the spread */
    float moved[TILE];   /* weights of the stand-ins times their moves, summed */
} Tile;

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

/* The log-sum-exp of all that a query knew before its search; infinite where nothing was looked for. */
static float known_mass(const Problem *p, const Work *w, int64_t t) {
    return p->log_share == -INFINITY ? INFINITY : w->limit[t] + p->log_share;
}

/* Weights of the sinks of a query, the gradients of their logits and their shares of what is known, in place of
 * `logits`, `move` and `along`. */
static void sink_gradients(const Problem *p, const Gradients *g, Work *w, Tile *b, int64_t t) {
    const int64_t at = w->index[t];
    const floats lse = splat(p->lse[at]), product = splat(g->product[at]);
    const floats known = splat(known_mass(p, w, t) - p->log_sink_part);
    float *logits = w->logits + t * w->padded, *moves = w->move + t * w->padded, *along = b->along + t * w->padded;
    for (int64_t c = 0; c < p->sink_room; c += WIDTH) {
        const floats x = load(logits + c), weight = vexp(x - lse);
        store(moves + c, weight * (load(along + c) - product));
        store(along + c, vexp(x - known));
        store(logits + c, weight);
    }
}

/* The same for the stand-ins, and what their corrections make of the gradient: of the limit, which is returned, of the
 * spread and of the drift. */
static float node_gradients(const Problem *p, const Gradients *g, Work *w, Tile *b, int64_t t) {
    const int64_t at = w->index[t];
    const float s = w->spread[t], own_gain = 0.5f * s * s;
    const floats one = splat(1.0f), part = splat(1.0f / s), limit = splat(w->limit[t]), far = splat(1e30f);
    const floats lse = splat(p->lse[at]), product = splat(g->product[at]), known = splat(known_mass(p, w, t));
    const floats behind = splat(logf((float)p->leaf) + (own_gain < p->most_known_gain ? own_gain : p->most_known_gain));
    const floats drifted = splat(dot(b->grads + t * p->value_dim, w->drift + t * p->value_dim, p->value_dim));
    float *logits = w->logits + t * w->padded, *moves = w->move + t * w->padded, *along = b->along + t * w->padded;
    const int32_t *hits = w->hits + t * w->padded;
    floats by_limit = splat(0), by_spread = splat(0), moved = splat(0), shares = splat(0);
    for (int64_t c = p->sink_room; c < w->columns; c += WIDTH) {
        /* the limit may be infinite, and an empty column lies infinitely deep: 0 * inf would be NaN */
        const floats x = load(logits + c), r = larger(smaller((limit - x) * part, far), -far);
        const Correction k = correct_with_slopes(r, s);
        const floats left = splat((float)p->leaf) - __builtin_convertvector(*(const ints *)(hits + c), floats);
        floats weight = vexp(x + k.gain + vlog(larger(left, one)) - lse);
        weight = choose(left > splat(0.0f), weight, splat(0.0f));
        const floats d = weight * (load(along + c) + k.move * drifted - product), pull = weight * drifted;
        const floats up = (d * k.gain_by_r + pull * k.move_by_r) * part, share = vexp(x + behind - known);
        by_limit += up;
        by_spread += d * k.gain_by_s + pull * k.move_by_s - up * r;
        moved += weight * k.move;
        shares += share;
        store(moves + c, d - up);
        store(along + c, share);
        store(logits + c, weight);
    }
    const float of_limit = total(by_limit), known_gain = own_gain < p->most_known_gain ? s : 0.0f;
    const float of_spread = total(by_spread) + of_limit * total(shares) * known_gain;
    b->by_spread[t] = s > LEAST_SPREAD ? of_spread / s : 0.0f;
    b->moved[t] = total(moved);
    return of_limit;
}

/* Weights of the columns of a query, and the gradients of their logits, in place of `logits` and `move`. */
static void column_gradients(const Problem *p, const Gradients *g, Work *w, Tile *b, int64_t t) {
    float *logits = w->logits + t * w->padded, *moves = w->move + t * w->padded, of_limit = 0;
    b->by_spread[t] = b->moved[t] = 0;
    if (p->lse[w->index[t]] == -INFINITY) { /* saw nothing */
        memset(logits, 0, sizeof(float) * (size_t)w->columns);
        memset(moves, 0, sizeof(float) * (size_t)w->columns);
    } else {
        sink_gradients(p, g, w, b, t);
        of_limit = node_gradients(p, g, w, b, t);
        if (of_limit != 0) add_scaled(moves, b->along + t * w->padded, of_limit, w->columns);
    }
    g->limit[w->index[t]] = of_limit;
}

/* Through the spread `sqrt(q' V q)` and the drift `C' q` of each query; uses up `moment` and `drift`. */
static void covariances_backward(const Problem *p, const Gradients *g, Work *w, const Sums *s, Tile *b) {
    const int64_t dim = p->dim, wide = p->value_dim, pool = (w->nodes - 1) / p->nodes_per_pool;
    for (int64_t t = 0; t < w->n; t++) {
        float *half = w->moment + t * dim, *pulled = w->drift + t * wide;
        add_scaled(b->by_query + t * dim, half, b->by_spread[t], dim);
        const floats by_spread = splat(0.5f * b->by_spread[t]), moved = splat(b->moved[t]);
        for (int64_t i = 0; i < dim; i += WIDTH) store(half + i, load(w->query + t * dim + i) * by_spread);
        for (int64_t i = 0; i < wide; i += WIDTH) store(pulled + i, load(b->grads + t * wide + i) * moved);
    }
    const float *turned = g->turned_drift + (w->lane * p->pools + pool) * dim * wide;
    product(b->by_query, dim, w->drift, wide, 1, w->n, turned, dim, wide, dim, 1);
    product(s->spread + pool * dim * dim, dim, w->query, 1, dim, dim, w->moment, dim, w->n, dim, 1);
    product(s->drift + pool * dim * wide, wide, w->query, 1, dim, dim, w->drift, wide, w->n, wide, 1);
}

static void tile_backward(const Problem *p, const Gradients *g, Work *w, const Sums *s, Tile *b) {
    const int64_t dim = p->dim, wide = p->value_dim, columns = p->sink_room + w->nodes;
    const float *values = g->value_columns + w->lane * p->room * wide;
    prescore_take_queries(p, w);
    prescore_begin_tile(p, w);
    for (int64_t t = 0; t < w->n; t++) {
        w->limit[t] = p->limit[w->index[t]];
        memcpy(b->grads + t * wide, g->grad + w->index[t] * wide, sizeof(float) * (size_t)wide);
    }
    prescore_find_rows(p, w);
    for (int64_t c = 0; c < w->columns / 16; c++)
        product(b->along + 16 * c, w->padded, b->grads, wide, 1, w->n, values + c * wide * 16, 16, wide, 16, 0);
    for (int64_t t = 0; t < w->n; t++) column_gradients(p, g, w, b, t);
    product(b->by_query, dim, w->move, w->padded, 1, w->n, g->column_keys + w->lane * p->room * dim, dim, columns, dim, 0);
    product(s->column_key, dim, w->move, 1, w->padded, columns, w->query, dim, w->n, dim, 1);
    product(s->column_value, wide, w->logits, 1, w->padded, columns, b->grads, wide, w->n, wide, 1);
    covariances_backward(p, g, w, s, b);
    for (int64_t t = 0; t < w->n; t++) {
        if (p->lse[w->index[t]] == -INFINITY) continue;
        rows_backward(p, g, w, s, t, b->by_query + t * dim);
        add_scaled(g->query + w->index[t] * dim, b->by_query + t * dim, p->scale, dim);
    }
}

static Sums sums_of(const Problem *p, const Gradients *g, int64_t lane, int64_t part) {
    const int64_t own = part * p->lanes + lane, dim = p->dim, wide = p->value_dim;
    return (Sums){
        .key = g->key + own * g->n_keys * dim,
        .value = g->value + own * g->n_keys * wide,
        .column_key = g->column_key + own * p->room * dim,
        .column_value = g->column_value + own * p->room * wide,
        .spread = g->spread + own * p->pools * dim * dim,
        .drift = g->drift + own * p->pools * dim * wide,
    };
}

/* A tile with its arrays behind it; NULL where there is no memory. */
static Tile *new_tile(const Work *w) {
    Tile *b = malloc(sizeof(Tile) + sizeof(float) * (size_t)(TILE * (w->padded + MOST_DIM)));
    if (!b) return NULL;
    b->along = (float *)(b + 1);
    b->grads = b->along + TILE * w->padded;
    return b;
}

/* Returns 0, or 1 where there was no memory. */
PRESCORE_EXPORT int prescore_routed_backward(const Problem *p, const Gradients *g) {
    const int64_t tiles = (p->n_query + TILE - 1) / TILE, lanes = p->lanes;
    int failed = 0;
#pragma omp parallel for schedule(dynamic, 1) num_threads(prescore_threads())
    for (int64_t job = 0; job < lanes * g->parts; job++) {
        const int64_t lane = job % lanes, part = job / lanes;
        Work *w = prescore_new_work(p, NULL);
        Tile *b = w ? new_tile(w) : NULL;
        if (!b) {
#pragma omp atomic write
            failed = 1;
            free(w);
            continue;
        }
        const Sums s = sums_of(p, g, lane, part);
        for (int64_t tile = part; tile < tiles; tile += g->parts) {
            const int64_t begin = tile * TILE, stop = begin + TILE < p->n_query ? begin + TILE : p->n_query;
            for (int64_t done = begin; done < stop;) {
                done = next_tile(p, w, lane, done, stop);
                if (w->nodes) tile_backward(p, g, w, &s, b);
            }
        }
        free(b);
        free(w);
    }
    return failed;
}
