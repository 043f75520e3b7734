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
    float by_std[TILE];             /* of each query's standard deviation, divided by it */
    float moved[TILE];              /* weights of the centroids times their moves, summed */
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
 * standard deviation and of the direction. */
static float centroid_gradients(const RoutedCall *p, const Gradients *g, Tile *w, GradTile *b, int64_t t) {
    const int64_t at = w->index[t];
    const float s = w->std[t], gain_of_std = 0.5f * s * s;
    const floats one = splat(1.0f), part = splat(1.0f / s), threshold = splat(w->threshold[t]), far = splat(1e30f);
    const floats lse = splat(p->lse[at]), product = splat(g->product[at]), mass = splat(estimated_mass(p, w, t));
    const floats behind = splat(prescore_mass_of_cluster(p, w, t));
    const floats pulled_grad = splat(dot(b->grads + t * p->value_dim, w->direction + t * p->value_dim, p->value_dim));
    float *logits = w->logits + t * w->padded, *moves = b->move + t * w->padded, *along = b->along + t * w->padded;
    const int32_t *cluster_hits = w->cluster_hits + t * w->padded;
    floats by_threshold = splat(0), by_std = splat(0), moved = splat(0), shares = splat(0);
    for (int64_t c = p->sink_columns; c < w->columns; c += WIDTH) {
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
    const float by_threshold_total = total(by_threshold), mass_gain = gain_of_std < p->max_mass_gain ? s : 0.0f;
    const float by_std_total = total(by_std) + by_threshold_total * total(shares) * mass_gain;
    b->by_std[t] = s > MIN_STD ? by_std_total / s : 0.0f;
    b->moved[t] = total(moved);
    return by_threshold_total;
}

/* Weights of the columns of a query, and the gradients of their logits, in place of `logits` and `move`. */
static void column_gradients(const RoutedCall *p, const Gradients *g, Tile *w, GradTile *b, int64_t t) {
    float *logits = w->logits + t * w->padded, *moves = b->move + t * w->padded, by_threshold_total = 0;
    b->by_std[t] = b->moved[t] = 0;
    if (p->lse[w->index[t]] == -INFINITY) { /* saw nothing */
        memset(logits, 0, sizeof(float) * (size_t)w->columns);
        memset(moves, 0, sizeof(float) * (size_t)w->columns);
    } else {
        sink_gradients(p, g, w, b, t);
        by_threshold_total = centroid_gradients(p, g, w, b, t);
        if (by_threshold_total != 0) add_scaled(moves, b->along + t * w->padded, by_threshold_total, w->columns);
    }
    g->threshold[w->index[t]] = by_threshold_total;
}

/* Through `sqrt(q' V q)` and `C' q` of each query; overwrites `moment` and `direction`. */
static void covariances_backward(const RoutedCall *p, const Gradients *g, Tile *w, const Sums *s, GradTile *b) {
    const int64_t dim = p->dim, wide = p->value_dim, cov = (w->clusters - 1) / p->clusters_per_cov;
    for (int64_t t = 0; t < w->n; t++) {
        float *half = w->moment + t * dim, *pulled = w->direction + t * wide;
        add_scaled(b->by_query + t * dim, half, b->by_std[t], dim);
        const floats by_std = splat(0.5f * b->by_std[t]), moved = splat(b->moved[t]);
        for (int64_t i = 0; i < dim; i += WIDTH) store(half + i, load(w->query + t * dim + i) * by_std);
        for (int64_t i = 0; i < wide; i += WIDTH) store(pulled + i, load(b->grads + t * wide + i) * moved);
    }
    const float *converted = g->key_value_cov_t + (w->kv_head * p->n_covs + cov) * dim * wide;
    product(b->by_query, dim, w->direction, wide, 1, w->n, converted, dim, 16, wide, dim, 1);
    product(s->key_cov + cov * dim * dim, dim, w->query, 1, dim, dim, w->moment, dim, 16, w->n, dim, 1);
    product(s->key_value_cov + cov * dim * wide, wide, w->query, 1, dim, dim, w->direction, wide, 16, w->n, wide, 1);
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
static GradTile *new_grad_tile(const Tile *w) {
    GradTile *b = malloc(sizeof(GradTile) + sizeof(float) * (size_t)(TILE * (2 * w->padded + MAX_DIM)));
    if (!b) return NULL;
    b->along = (float *)(b + 1);
    b->move = b->along + TILE * w->padded;
    b->grads = b->move + TILE * w->padded;
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
    GradTile *b = w ? new_grad_tile(w) : NULL;
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
