/* Routed attention, forward, a tile of queries of one KV head at a time.
 *
 * For each query: read the local keys; score sinks and centroids; search int8 keys and read the far keys above the threshold;
 * let a corrected centroid represent the unread keys of each cluster. One softmax over all of it.
 */
#include "centroids.h"
#include "int8.h"
#include "routed.h"

#define AHEAD 64         /* keys that are prefetched before they are read */
#define MAX_SHIFT 20.0f  /* how far a logit may lie above the shift of its query */

static void *aligned(char **at, size_t bytes) {
    void *here = *at;
    *at += (bytes + 63) / 64 * 64;
    return here;
}

/* A thread's memory; NULL where there is none. */
Tile *prescore_new_tile(const RoutedCall *p, const LocalKeys *local) {
    const int64_t padded = p->n_columns + 16, tile = p->n_query < TILE ? p->n_query : TILE;
    const int64_t spans = p->n_clusters ? p->n_clusters / p->clusters_per_span + 1 : 1;
    const size_t columns = sizeof(float) * (size_t)(tile * padded), numbers = sizeof(float) * (size_t)(TILE * spans);
    char *at = aligned_alloc(64, (sizeof(Tile) + 2 * columns + 4 * numbers + 64 * 8) / 64 * 64);
    if (!at) return NULL;
    Tile *w = aligned(&at, sizeof(Tile));
    w->padded = padded;
    w->logits = aligned(&at, columns);
    w->cluster_hits = aligned(&at, columns);
    w->std = aligned(&at, numbers);
    w->least = aligned(&at, numbers);
    w->reach = aligned(&at, numbers);
    w->moved = aligned(&at, numbers);
    w->local = local;
    return w;
}

/* A query as whole numbers from -127 to 127. */
static void quantize_query(Tile *w, int64_t t, int64_t dim, float unit) {
    const float *own = w->query + t * dim;
    int8_t *int8 = (int8_t *)w->int8 + t * dim;
    int32_t sum = 0;
    for (int64_t i = 0; i < dim; i += WIDTH) { /* 1.5 * 2^23 rounds to an integer */
        const ints number = (ints)(load(own + i) / splat(unit) + splat(12582912.0f)) - (ints)splat(12582912.0f);
        const bytes narrow = __builtin_convertvector(number, bytes);
        memcpy(int8 + i, &narrow, sizeof narrow);
    }
    for (int64_t i = 0; i < dim; i++) sum += int8[i];
    w->int8_start[t] = -KEY_ZERO * sum;
}

void prescore_load_queries(const RoutedCall *p, Tile *w) {
    const int64_t dim = p->dim;
    for (int64_t t = 0; t < w->n; t++) {
        const int64_t at = w->index[t];
        const int64_t offset = row_offset(&p->query, at / p->length, at % p->length);
        if (half_products(p)) memcpy(w->pairs + t * dim / 2, (const uint16_t *)p->query.data + offset, (size_t)(2 * dim));
        float *own = w->query + t * dim;
        floats most = splat(1e-30f);
        for (int64_t i = 0; i < dim; i += WIDTH) {
            floats x = load_row(&p->query, offset, i) * splat(p->scale);
            store(own + i, x);
            most = larger(most, larger(x, -x));
        }
        const float unit = largest(most) / 127.0f;
        w->int8_scale[t] = unit;
        w->int8_per_unit[t] = 1.0f / unit;
        quantize_query(w, t, dim, unit);
    }
}

/* Logits of the columns, and `sqrt(q' V q)` of each query and span. */
void prescore_begin_tile(const RoutedCall *p, Tile *w) {
    const int64_t dim = p->dim, blocks = p->n_columns / 16;
    const float *columns = p->columns + w->kv_head * blocks * dim * 16;
    product(w->logits, w->padded, w->query, dim, 1, w->n, columns, 16, dim * 16, dim, w->columns, 0);
    for (int64_t t = 0; t < w->n; t++) {
        float *logits = w->logits + t * w->padded;
        for (int64_t i = p->sinks; i < p->sink_columns; i++) logits[i] = -INFINITY;
        for (int64_t i = p->sink_columns + w->clusters; i < w->columns; i++) logits[i] = -INFINITY;
    }
    for (int64_t span = 0; span < w->spans; span++) {
        product(w->scratch, dim, w->query, dim, 1, w->n, p->key_cov + cov_of(p, w, span) * dim * dim, dim, 16, dim, dim, 0);
        for (int64_t t = 0; t < w->n; t++) {
            const float square = dot(w->query + t * dim, w->scratch + t * dim, dim), most = MAX_STD * MAX_STD;
            const float s = sqrtf(square < 0 ? 0 : square <= most ? square : most); /* NaN counts as large */
            w->std[span * TILE + t] = s > MIN_STD ? s : MIN_STD;
        }
    }
}

/* How far the log mass of a cluster of a span lies above the logit of its centroid. Behind more than `mass_keys` far keys a share of
 * them counts, at least `mass_share`. */
float prescore_mass_of_cluster(const RoutedCall *p, const Tile *w, int64_t span, int64_t t) {
    const float s = w->std[span * TILE + t], gain = 0.5f * s * s, size = (float)p->cluster_size;
    const float all = p->mass_keys / ((float)w->clusters * size), share = fmaxf(p->mass_share, all * sqrtf(all));
    return logf(size * fminf(share, 1.0f)) + fminf(gain, p->max_mass_gain);
}

/* The logit from which on far keys are read: `min_weight` of the mass estimated before the search. Sinks count little. */
void prescore_set_threshold(const RoutedCall *p, Tile *w, int64_t t) {
    const float *logits = w->logits + t * w->padded, elsewhere = p->lse[w->index[t]];
    const floats part = splat(p->log_sink_weight);
    floats top = splat(elsewhere), sum = splat(0);
    int64_t c = 0;
    for (; c < p->sink_columns; c += WIDTH) top = larger(top, load(logits + c) + part);
    for (int64_t span = 0; span < w->spans; span++) {
        const floats behind = splat(prescore_mass_of_cluster(p, w, span, t));
        for (; c < span_end(p, w, span); c += WIDTH) top = larger(top, load(logits + c) + behind);
    }
    const floats peak = splat(largest(top));
    for (c = 0; c < p->sink_columns; c += WIDTH) sum += vexp(load(logits + c) + part - peak);
    for (int64_t span = 0; span < w->spans; span++) {
        const floats behind = splat(prescore_mass_of_cluster(p, w, span, t)) - peak;
        for (; c < span_end(p, w, span); c += WIDTH) sum += vexp(load(logits + c) + behind);
    }
    w->shift[t] = peak[0]; /* about the largest logit; more is done where a key read lies far above */
    w->threshold[t] = peak[0] + logf(total(sum) + expf(elsewhere - peak[0])) - p->log_inverse;
    p->threshold[w->index[t]] = w->threshold[t];
}

/* Keys read lie anywhere in memory: prefetch the first ones of the next query. */
static void prefetch_hits(const RoutedCall *p, const Tile *w, int64_t t) {
    const float least = w->threshold[t] + p->exact_margin;
    for (int64_t i = 0; i < AHEAD && i < w->n_hits[t]; i++) {
        const int64_t row = w->hits[t * MAX_HITS + i];
        prefetch_row(&p->far_value, row_offset(&p->far_value, w->kv_head, row), p->value_dim);
        if (w->hit_logits[t * MAX_HITS + i] >= least) prefetch_row(&p->far_key, row_offset(&p->far_key, w->kv_head, row), p->dim);
    }
}

/* Logits of the heavy keys that a query found, from the keys themselves; int8 logits are good enough for the others. Returns the
 * largest logit. */
float prescore_exact_logits(const RoutedCall *p, Tile *w, int64_t t) {
    const int64_t hits = w->n_hits[t], filled = (hits + WIDTH - 1) / WIDTH * WIDTH;
    float *own = w->hit_logits + t * MAX_HITS, exact[MAX_HITS];
    int32_t rows[MAX_HITS], places[MAX_HITS], n = 0;
    const float least = w->threshold[t] + p->exact_margin;
    floats top = splat(-INFINITY);
    for (int64_t i = hits; i < filled; i++) own[i] = -INFINITY;
    for (int64_t i = 0; i < filled; i += WIDTH) top = larger(top, load(own + i));
    if (largest(top) < least) return largest(top); /* mostly */
    for (int64_t i = 0; i < filled; i += WIDTH)
        for (unsigned heavy = at_least(load(own + i), splat(least)); heavy; heavy &= heavy - 1) {
            places[n] = (int32_t)i + __builtin_ctz(heavy);
            rows[n] = w->hits[t * MAX_HITS + places[n]];
            n++;
        }
#if defined(__AVX512BF16__)
    if (half_products(p) && p->far_key.type == BFLOAT16)
        half_dots(exact, &p->far_key, w->kv_head, rows, n, w->pairs + t * p->dim / 2, p->dim, p->scale);
    else
#endif
        row_dots(exact, &p->far_key, w->kv_head, rows, n, w->query + t * p->dim, p->dim);
    for (int32_t i = 0; i < n; i++) own[places[i]] = exact[i];
    top = splat(-INFINITY); /* an int8 logit may lie far above the exact one that replaced it */
    for (int64_t i = 0; i < filled; i += WIDTH) top = larger(top, load(own + i));
    return largest(top);
}

/* Add the keys that a query found: weights to its mass, values to its sums. */
static void read_hits(const RoutedCall *p, Tile *w, int64_t t) {
    const int64_t wide = p->value_dim, hits = w->n_hits[t];
    const int32_t *rows = w->hits + t * MAX_HITS;
    float *own = w->hit_logits + t * MAX_HITS, *sums = w->sums + t * wide;
    floats mass = splat(0);
    const float peak = prescore_exact_logits(p, w, t);
    if (!(peak <= w->shift[t] + MAX_SHIFT)) { /* far above what was expected, or NaN */
        const float scale = expf(w->shift[t] - peak);
        for (int64_t i = 0; i < wide; i += WIDTH) store(sums + i, load(sums + i) * splat(scale));
        w->mass[t] *= scale;
        w->shift[t] = peak;
    }
    for (int64_t i = 0; i < hits; i += WIDTH) {
        const floats x = vexp(load(own + i) - splat(w->shift[t]));
        store(own + i, x);
        mass += x;
    }
    w->mass[t] += total(mass);
#if defined(__AVX512BF16__)
    if (half_products(p) && p->far_value.type == BFLOAT16) {
        add_half_rows(sums, &p->far_value, w->kv_head, rows, own, hits, wide);
        return;
    }
#endif
    add_rows(sums, &p->far_value, w->kv_head, rows, own, hits, wide);
}

/* Find far keys, some clusters at a time, and read them for all queries of the tile while they are in cache. */
static int64_t attend_far(const RoutedCall *p, Tile *w) {
    int64_t read = 0;
    prescore_begin_search(p, w);
    memset(w->mass, 0, sizeof w->mass);
    memset(w->sums, 0, sizeof(float) * (size_t)(w->n * p->value_dim));
    int64_t block = 0;
    do {
        block = prescore_search(p, w, block);
        for (int64_t t = 0; t < w->n; t++) {
            if (t + 1 < w->n) prefetch_hits(p, w, t + 1);
            if (w->n_hits[t]) read_hits(p, w, t);
            read += w->n_hits[t];
        }
    } while (block);
    return read;
}

/* Weights of sinks and centroids of a query, in place of their logits, and how far the values of each span move along its direction.
 *
 * Logits within a cluster are taken as normal around that of the centroid, and cut off at the threshold. */
static void weigh_columns(const RoutedCall *p, Tile *w, int64_t t) {
    const floats threshold = splat(w->threshold[t]), shift = splat(w->shift[t]);
    const floats size = splat((float)p->cluster_size);
    const int32_t *cluster_hits = w->cluster_hits + t * w->padded;
    float *logits = w->logits + t * w->padded;
    floats mass = splat(0);
    int64_t c = 0;
    for (; c < p->sink_columns; c += WIDTH) {
        const floats x = vexp(load(logits + c) - shift);
        store(logits + c, x);
        mass += x;
    }
    for (int64_t span = 0; span < w->spans; span++) {
        const float s = w->std[span * TILE + t];
        const floats part = splat(1.0f / s);
        floats moved = splat(0);
        for (; c < span_end(p, w, span); c += WIDTH) {
            const floats x = load(logits + c), left = size - __builtin_convertvector(*(const ints *)(cluster_hits + c), floats);
            floats factor, move;
            correct((threshold - x) * part, s, &factor, &move);
            const floats weight = left * factor * vexp(x - shift); /* -inf in empty columns */
            store(logits + c, weight);
            mass += weight;
            moved += weight * move;
        }
        w->moved[span * TILE + t] = total(moved);
    }
    w->mass[t] += total(mass);
}

/* Move the values of the centroids of each span along its direction. */
static void move_values(const RoutedCall *p, Tile *w) {
    const int64_t dim = p->dim, wide = p->value_dim;
    for (int64_t span = 0; span < w->spans; span++) {
        for (int64_t t = 0; t < w->n; t++)
            for (int64_t i = 0; i < dim; i += WIDTH)
                store(w->scratch + t * dim + i, load(w->query + t * dim + i) * splat(w->moved[span * TILE + t]));
        product(w->sums, wide, w->scratch, dim, 1, w->n, p->key_value_cov + cov_of(p, w, span) * dim * wide, wide, 16, dim, wide, 1);
    }
}

static int64_t run_tile(const RoutedCall *p, Tile *w) {
    const int64_t wide = p->value_dim;
    prescore_load_queries(p, w);
    prescore_attend_local(p, w);
    if (w->clusters == 0) return 0; /* nothing is far; sinks are local keys here */
    prescore_begin_tile(p, w);
    for (int64_t t = 0; t < w->n; t++) prescore_set_threshold(p, w, t);
    const int64_t read = attend_far(p, w);
    for (int64_t t = 0; t < w->n; t++) weigh_columns(p, w, t);
    move_values(p, w);
    product(w->sums, wide, w->logits, w->padded, 1, w->n, p->column_values + w->kv_head * p->n_columns * wide, wide, 16,
            p->sink_columns + w->clusters, wide, 1);
    for (int64_t t = 0; t < w->n; t++) {
        if (w->shift[t] == -INFINITY) continue; /* saw nothing */
        float *output = p->output + w->index[t] * wide, *lse = p->lse + w->index[t];
        const float local = expf(*lse - w->shift[t]), mass = w->mass[t] + local;
        for (int64_t i = 0; i < wide; i += WIDTH)
            store(output + i, (load(output + i) * splat(local) + load(w->sums + t * wide + i)) * splat(1.0f / mass));
        *lse = w->shift[t] + logf(mass);
    }
    return read;
}

typedef struct {
    const RoutedCall *p;
    LocalKeys local;
    int64_t tiles; /* of a KV head */
    int failed;
} Forward;

static void run_tiles(void *of, Jobs *jobs) {
    Forward *f = of;
    const RoutedCall *p = f->p;
    Tile *w = prescore_new_tile(p, &f->local);
    int64_t read = 0;
    if (!w) __atomic_store_n(&f->failed, 1, __ATOMIC_RELAXED);
    for (int64_t job; w && (job = next_job(jobs)) >= 0;) {
        /* The last queries see most and go first, so that no thread is left alone with them. One KV head after the other: its
         * int8 keys stay in cache. */
        const int64_t kv_head = job / f->tiles, begin = (f->tiles - 1 - job % f->tiles) * TILE;
        const int64_t stop = begin + TILE < p->n_query ? begin + TILE : p->n_query;
        for (int64_t done = begin; done < stop;) {
            done = next_tile(p, w, kv_head, done, stop);
            read += run_tile(p, w);
        }
    }
    free(w);
    __atomic_fetch_add(&p->counts[1], read, __ATOMIC_RELAXED);
}

/* Returns 0, or 1 where there was no memory. */
PRESCORE_EXPORT int prescore_routed_forward(const RoutedCall *p) {
    Forward f = {.p = p, .tiles = (p->n_query + TILE - 1) / TILE};
    f.failed = prescore_load_local(p, &f.local);
    if (!f.failed) prescore_run(f.tiles * p->kv_heads, run_tiles, &f);
    prescore_free_local(&f.local);
    return f.failed;
}
