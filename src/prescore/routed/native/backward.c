/* The far part of routed attention, backward, under the merged output and log-sum-exp.
 *
 * With weights `p` and the gradient `g` of the output, a logit's gradient is `p (g . v - g . output)`. The keys read are found
 * again from each query's threshold. A centroid's logit and value also depend on the threshold, on the standard deviation and
 * on the direction `C'q` of its query; the threshold depends on the mass that is estimated before the search.
 */
#include "routed.h"
#include "centroids.h"

/* Must equal `RoutedGradients` in routed/native/__init__.py. Sums of keys, values, columns and covariances are kept `parts` times, for
 * as many threads. */
typedef struct {
    const float *grad, *product;      /* [kv_heads, n_query, value_dim], [kv_heads, n_query]: grad . output */
    const float *column_keys;         /* [kv_heads, n_columns, dim] */
    const float *value_columns;       /* [kv_heads, n_columns / 16, value_dim, 16] */
    const float *key_value_cov_t;     /* [kv_heads, n_covs, value_dim, dim] */
    float *query;                     /* [kv_heads, n_query, dim]: added to */
    float *threshold;                 /* [kv_heads, n_query]: written */
    float *key, *value;               /* [parts, kv_heads, n_keys, dim], [.., value_dim]: added to */
    float *column_key, *column_value; /* [parts, kv_heads, n_columns, dim], [.., value_dim]: added to */
    float *key_cov, *key_value_cov;   /* [parts, kv_heads, n_covs, dim, dim], [.., dim, value_dim]: added to */
    int64_t parts, n_keys;
} Gradients;

/* One thread's share of the sums of a KV head. */
typedef struct {
    float *key, *value, *column_key, *column_value, *key_cov, *key_value_cov;
} Sums;

/* What the backward pass of a tile needs in addition. */
typedef struct {
    float *along;                   /* [TILE, padded]: grad . value of each column; later its share of the estimated mass */
    float *move;                    /* [TILE, padded]: gradients of the columns' logits */
    float *grads;                   /* [TILE, value_dim] */
    float by_query[TILE * MAX_DIM]; /* gradients of the scaled queries */
    float *by_std;                  /* [spans, TILE] of each standard deviation, divided by it */
    float *pulled;                  /* [spans, TILE] of how far the values of the span move */
} GradTile;

static void hits_backward(const RoutedCall *p, const Gradients *g, Tile *w, const Sums *s, int64_t t, float *to) {
    const int64_t at = w->index[t], dim = p->dim, wide = p->value_dim, hits = w->n_hits[t];
    const int32_t *rows = w->hits + t * MAX_HITS;
    const float *query = w->query + t * dim, *grad = g->grad + at * wide, *logits = w->hit_logits + t * MAX_HITS;
    prescore_exact_logits(p, w, t);
    for (int64_t i = 0; i < hits; i++) {
        const int64_t row = rows[i], key = row_offset(&p->key, w->kv_head, row), value = row_offset(&p->value, w->kv_head, row);
        const float weight = expf(logits[i] - p->lse[at]);
        const float d = weight * (row_dot(&p->value, value, grad, wide) - g->product[at]);
        add_row(to, &p->key, key, d, dim);
        add_scaled(s->key + row * dim, query, d, dim);
        add_scaled(s->value + row * wide, grad, weight, wide);
    }
}

/* Log of the mass that a query estimated before its search; infinite where it did not search. */
static float estimated_mass(const RoutedCall *p, const Tile *w, int64_t t) {
    return p->log_inverse == -INFINITY ? INFINITY : w->threshold[t] + p->log_inverse;
}

/* Weights of the sinks of a query, the gradients of their logits and their shares of the estimated mass, in place of
 * `logits`, `move` and `along`. */
static void sink_gradients(const RoutedCall *p, const Gradients *g, Tile *w, GradTile *b, int64_t t) {
    const int64_t at = w->index[t];
    const floats lse = splat(p->lse[at]), product = splat(g->product[at]);
    const floats mass = splat(estimated_mass(p, w, t) - p->log_sink_weight);
    float *logits = w->logits + t * w->padded, *moves = b->move + t * w->padded, *along = b->along + t * w->padded;
    for (int64_t c = 0; c < p->sink_columns; c += WIDTH) {
        const floats x = load(logits + c), weight = vexp(x - lse);
        store(moves + c, weight * (load(along + c) - product));
        store(along + c, vexp(x - mass));
        store(logits + c, weight);
    }
}

/* The same for the centroids, and the gradients through their corrections: of the threshold, which is returned, of the
 * standard deviations and of the directions. */
static float centroid_gradients(const RoutedCall *p, const Gradients *g, Tile *w, GradTile *b, int64_t t) {
    const int64_t at = w->index[t];
    const floats one = splat(1.0f), threshold = splat(w->threshold[t]), far = splat(1e30f);
    const floats lse = splat(p->lse[at]), product = splat(g->product[at]), mass = splat(estimated_mass(p, w, t));
    float *logits = w->logits + t * w->padded, *moves = b->move + t * w->padded, *along = b->along + t * w->padded;
    const int32_t *cluster_hits = w->cluster_hits + t * w->padded;
    float by_threshold_total = 0;
    int64_t c = p->sink_columns;
    for (int64_t span = 0; span < w->spans; span++) {
        const float s = w->std[span * TILE + t];
        const floats part = splat(1.0f / s), behind = splat(prescore_mass_of_cluster(p, w, span, t));
        const floats pulled_grad = splat(b->pulled[span * TILE + t]);
        floats by_threshold = splat(0), by_std = splat(0), moved = splat(0), shares = splat(0);
        for (; c < span_end(p, w, span); c += WIDTH) {
            /* the threshold may be infinite, and the logit of an empty column is -inf: 0 * inf would be NaN */
            const floats x = load(logits + c), r = larger(smaller((threshold - x) * part, far), -far);
            const Correction k = correct_with_slopes(r, s);
            const floats left = splat((float)p->cluster_size) - __builtin_convertvector(*(const ints *)(cluster_hits + c), floats);
            floats weight = vexp(x + k.gain + vlog(larger(left, one)) - lse);
            weight = choose(left > splat(0.0f), weight, splat(0.0f));
            const floats d = weight * (load(along + c) + k.move * pulled_grad - product), pull = weight * pulled_grad;
            const floats up = (d * k.gain_by_r + pull * k.move_by_r) * part, share = vexp(x + behind - mass);
            by_threshold += up;
            by_std += d * k.gain_by_s + pull * k.move_by_s - up * r;
            moved += weight * k.move;
            shares += share;
            store(moves + c, d - up);
            store(along + c, share);
            store(logits + c, weight);
        }
        by_threshold_total += total(by_threshold);
        b->by_std[span * TILE + t] = total(by_std);
        b->pulled[span * TILE + t] = total(shares); /* for the next loop */
        w->moved[span * TILE + t] = total(moved);
    }
    for (int64_t span = 0; span < w->spans; span++) {
        const int64_t i = span * TILE + t;
        const float s = w->std[i], mass_gain = 0.5f * s * s < p->max_mass_gain ? s : 0.0f;
        b->by_std[i] = s > MIN_STD ? (b->by_std[i] + by_threshold_total * b->pulled[i] * mass_gain) / s : 0.0f;
    }
    return by_threshold_total;
}

/* Weights of the columns of a query, and the gradients of their logits, in place of `logits` and `move`. */
static void column_gradients(const RoutedCall *p, const Gradients *g, Tile *w, GradTile *b, int64_t t) {
    float *logits = w->logits + t * w->padded, *moves = b->move + t * w->padded, by_threshold_total = 0;
    if (p->lse[w->index[t]] == -INFINITY) { /* saw nothing */
        memset(logits, 0, sizeof(float) * (size_t)w->columns);
        memset(moves, 0, sizeof(float) * (size_t)w->columns);
        for (int64_t span = 0; span < w->spans; span++) b->by_std[span * TILE + t] = w->moved[span * TILE + t] = 0;
    } else {
        sink_gradients(p, g, w, b, t);
        by_threshold_total = centroid_gradients(p, g, w, b, t);
        if (by_threshold_total != 0) add_scaled(moves, b->along + t * w->padded, by_threshold_total, w->columns);
    }
    g->threshold[w->index[t]] = by_threshold_total;
}

/* How far the gradients point along the direction `C' q` of each span. */
static void pull(const RoutedCall *p, Tile *w, GradTile *b) {
    const int64_t dim = p->dim, wide = p->value_dim;
    for (int64_t span = 0; span < w->spans; span++) {
        product(w->scratch, wide, w->query, dim, 1, w->n, p->key_value_cov + cov_of(p, w, span) * dim * wide, wide, 16, dim, wide, 0);
        for (int64_t t = 0; t < w->n; t++) b->pulled[span * TILE + t] = dot(b->grads + t * wide, w->scratch + t * wide, wide);
    }
}

/* Through `sqrt(q' V q)` and `C' q` of each query and span. */
static void covariances_backward(const RoutedCall *p, const Gradients *g, Tile *w, const Sums *s, GradTile *b) {
    const int64_t dim = p->dim, wide = p->value_dim;
    for (int64_t span = 0; span < w->spans; span++) {
        const int64_t at = cov_of(p, w, span), cov = at - w->kv_head * p->n_covs;
        product(w->scratch, dim, w->query, dim, 1, w->n, p->key_cov + at * dim * dim, dim, 16, dim, dim, 0);
        for (int64_t t = 0; t < w->n; t++) {
            const float by_std = b->by_std[span * TILE + t];
            add_scaled(b->by_query + t * dim, w->scratch + t * dim, by_std, dim);
            for (int64_t i = 0; i < dim; i += WIDTH)
                store(w->scratch + t * dim + i, load(w->query + t * dim + i) * splat(0.5f * by_std));
        }
        product(s->key_cov + cov * dim * dim, dim, w->query, 1, dim, dim, w->scratch, dim, 16, w->n, dim, 1);
        for (int64_t t = 0; t < w->n; t++)
            for (int64_t i = 0; i < wide; i += WIDTH)
                store(w->scratch + t * wide + i, load(b->grads + t * wide + i) * splat(w->moved[span * TILE + t]));
        product(b->by_query, dim, w->scratch, wide, 1, w->n, g->key_value_cov_t + at * dim * wide, dim, 16, wide, dim, 1);
        product(s->key_value_cov + cov * dim * wide, wide, w->query, 1, dim, dim, w->scratch, wide, 16, w->n, wide, 1);
    }
}

static void tile_backward(const RoutedCall *p, const Gradients *g, Tile *w, const Sums *s, GradTile *b) {
    const int64_t dim = p->dim, wide = p->value_dim, columns = p->sink_columns + w->clusters;
    const float *values = g->value_columns + w->kv_head * p->n_columns * wide;
    prescore_load_queries(p, w);
    prescore_begin_tile(p, w);
    for (int64_t t = 0; t < w->n; t++) {
        w->threshold[t] = p->threshold[w->index[t]];
        memcpy(b->grads + t * wide, g->grad + w->index[t] * wide, sizeof(float) * (size_t)wide);
    }
    memset(b->by_query, 0, sizeof(float) * (size_t)(w->n * dim));
    prescore_begin_search(p, w);
    int64_t block = 0;
    do {
        block = prescore_search(p, w, block);
        for (int64_t t = 0; t < w->n; t++)
            if (p->lse[w->index[t]] != -INFINITY) hits_backward(p, g, w, s, t, b->by_query + t * dim);
    } while (block);
    product(b->along, w->padded, b->grads, wide, 1, w->n, values, 16, wide * 16, wide, w->columns, 0);
    pull(p, w, b);
    for (int64_t t = 0; t < w->n; t++) column_gradients(p, g, w, b, t);
    product(b->by_query, dim, b->move, w->padded, 1, w->n, g->column_keys + w->kv_head * p->n_columns * dim, dim, 16, columns, dim, 1);
    product(s->column_key, dim, b->move, 1, w->padded, columns, w->query, dim, 16, w->n, dim, 1);
    product(s->column_value, wide, w->logits, 1, w->padded, columns, b->grads, wide, 16, w->n, wide, 1);
    covariances_backward(p, g, w, s, b);
    for (int64_t t = 0; t < w->n; t++) {
        if (p->lse[w->index[t]] == -INFINITY) continue;
        add_scaled(g->query + w->index[t] * dim, b->by_query + t * dim, p->scale, dim);
    }
}

static Sums sums_of(const RoutedCall *p, const Gradients *g, int64_t kv_head, int64_t part) {
    const int64_t own = part * p->kv_heads + kv_head, dim = p->dim, wide = p->value_dim;
    return (Sums){
        .key = g->key + own * g->n_keys * dim,
        .value = g->value + own * g->n_keys * wide,
        .column_key = g->column_key + own * p->n_columns * dim,
        .column_value = g->column_value + own * p->n_columns * wide,
        .key_cov = g->key_cov + own * p->n_covs * dim * dim,
        .key_value_cov = g->key_value_cov + own * p->n_covs * dim * wide,
    };
}

/* A tile with its arrays after it; NULL where there is no memory. */
static GradTile *new_grad_tile(const RoutedCall *p, const Tile *w) {
    const int64_t spans = p->n_clusters / p->clusters_per_span + 1;
    GradTile *b = malloc(sizeof(GradTile) + sizeof(float) * (size_t)(TILE * (2 * w->padded + MAX_DIM + 2 * spans)));
    if (!b) return NULL;
    b->along = (float *)(b + 1);
    b->move = b->along + TILE * w->padded;
    b->grads = b->move + TILE * w->padded;
    b->by_std = b->grads + TILE * MAX_DIM;
    b->pulled = b->by_std + TILE * spans;
    return b;
}

typedef struct {
    const RoutedCall *p;
    const Gradients *g;
    int failed;
} Backward;

static void run_parts(void *of, Jobs *jobs) {
    Backward *backward = of;
    const RoutedCall *p = backward->p;
    const Gradients *g = backward->g;
    const int64_t tiles = (p->n_query + TILE - 1) / TILE;
    Tile *w = prescore_new_tile(p, NULL);
    GradTile *b = w ? new_grad_tile(p, w) : NULL;
    if (!b) __atomic_store_n(&backward->failed, 1, __ATOMIC_RELAXED);
    for (int64_t job; b && (job = next_job(jobs)) >= 0;) {
        const int64_t kv_head = job % p->kv_heads, part = job / p->kv_heads;
        const Sums s = sums_of(p, g, kv_head, part);
        for (int64_t tile = part; tile < tiles; tile += g->parts) {
            const int64_t begin = tile * TILE, stop = begin + TILE < p->n_query ? begin + TILE : p->n_query;
            for (int64_t done = begin; done < stop;) {
                done = next_tile(p, w, kv_head, done, stop);
                if (w->clusters) tile_backward(p, g, w, &s, b);
            }
        }
    }
    free(b);
    free(w);
}

/* Returns 0, or 1 where there was no memory. */
PRESCORE_EXPORT int prescore_routed_backward(const RoutedCall *p, const Gradients *g) {
    Backward of = {p, g, 0};
    prescore_run(p->kv_heads * g->parts, run_parts, &of);
    return of.failed;
}
