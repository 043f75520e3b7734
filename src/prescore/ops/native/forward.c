/* Routed attention, forward, a tile of queries of one KV head at a time.
 *
 * For each query: read the local keys; score sinks and centroids; search int4 keys and read the far keys above the threshold;
 * let a corrected centroid represent the unread keys of each cluster. One softmax over all of it.
 */
#include "routed.h"
#include "centroids.h"

#define AHEAD 16 /* keys that are prefetched before they are read */

static void *aligned(char **at, size_t bytes) {
    void *here = *at;
    *at += (bytes + 63) / 64 * 64;
    return here;
}

/* A thread's memory; NULL where there is none. */
Tile *prescore_new_tile(const RoutedCall *p, const LocalKeys *local) {
    const int64_t padded = p->n_columns + 16, hits = p->n_clusters * p->cluster_size + 16;
    const int64_t tile = p->n_query < TILE ? p->n_query : TILE;
    const size_t number = sizeof(float);
    const size_t sizes = sizeof(Tile) + number * (size_t)(3 * tile * padded + hits + tile * hits) + 64 * 8;
    char *at = aligned_alloc(64, (sizes + 63) / 64 * 64);
    if (!at) return NULL;
    Tile *w = aligned(&at, sizeof(Tile));
    w->padded = padded;
    w->max_hits = hits;
    w->logits = aligned(&at, number * (size_t)(tile * padded));
    w->move = aligned(&at, number * (size_t)(tile * padded));
    w->cluster_hits = aligned(&at, number * (size_t)(tile * padded));
    w->local = local;
    w->hit_logits = aligned(&at, number * (size_t)hits);
    w->hits = aligned(&at, number * (size_t)(tile * hits));
    return w;
}

/* Corrected logits of the centroids, and how far their values move: logits within a cluster are taken as normal around that
 * of the centroid, and cut off at the threshold. */
void prescore_correct_centroids(const RoutedCall *p, Tile *w, int64_t t) {
    const float s = w->std[t];
    const floats one = splat(1.0f), threshold = splat(w->threshold[t]), part = splat(1.0f / s);
    float *logits = w->logits + t * w->padded, *moves = w->move + t * w->padded;
    const int32_t *cluster_hits = w->cluster_hits + t * w->padded;
    memset(moves, 0, sizeof(float) * (size_t)p->sink_columns);
    for (int64_t c = p->sink_columns; c < w->columns; c += WIDTH) {
        floats x = load(logits + c), gain, move;
        correct((threshold - x) * part, s, &gain, &move);
        store(moves + c, move);
        floats left = splat((float)p->cluster_size) - __builtin_convertvector(*(const ints *)(cluster_hits + c), floats);
        x = x + gain + vlog(larger(left, one));
        store(logits + c, choose(left > splat(0.0f), x, splat(-INFINITY)));
    }
    for (int64_t c = p->sink_columns + w->clusters; c < w->columns; c++) logits[c] = -INFINITY;
}

/* A query as whole numbers from -31 to 31, and the sums of both halves. */
static void quantize_query(Tile *w, int64_t t, int64_t dim, float unit) {
    const float *own = w->query + t * dim;
    int8_t *int4 = w->int6 + t * dim;
    int32_t sums[2] = {0, 0};
    for (int64_t i = 0; i < dim; i += WIDTH) { /* 1.5 * 2^23 rounds to an integer */
        const ints code = (ints)(load(own + i) / splat(unit) + splat(12582912.0f)) - (ints)splat(12582912.0f);
        const bytes narrow = __builtin_convertvector(code, bytes);
        memcpy(int4 + i, &narrow, sizeof narrow);
    }
    for (int64_t i = 0; i < dim; i++) sums[i >= dim / 2] += int4[i];
    memcpy(w->int6_sum + 2 * t, sums, sizeof sums);
}

void prescore_load_queries(const RoutedCall *p, Tile *w) {
    const int64_t dim = p->dim;
    for (int64_t t = 0; t < w->n; t++) {
        const int64_t at = w->index[t];
        const int64_t offset = row_offset(&p->query, at / p->length, at % p->length);
        float *own = w->query + t * dim;
        floats most = splat(1e-30f);
        for (int64_t i = 0; i < dim; i += WIDTH) {
            floats x = load_row(&p->query, offset, i) * splat(p->scale);
            store(own + i, x);
            most = larger(most, larger(x, -x));
        }
        const float unit = largest(most) / 31.0f;
        w->int6_scale[t] = unit;
        quantize_query(w, t, dim, unit);
    }
}

/* Logits of the columns, and `sqrt(q' V q)` and `C' q` of each query. */
void prescore_begin_tile(const RoutedCall *p, Tile *w) {
    const int64_t dim = p->dim, wide = p->value_dim, blocks = p->n_columns / 16;
    const float *columns = p->columns + w->kv_head * blocks * dim * 16;
    for (int64_t b = 0; b < w->columns / 16; b++)
        product(w->logits + 16 * b, w->padded, w->query, dim, 1, w->n, columns + b * dim * 16, 16, dim, 16, 0);
    for (int64_t t = 0; t < w->n; t++) {
        float *logits = w->logits + t * w->padded;
        for (int64_t i = p->sinks; i < p->sink_columns; i++) logits[i] = -INFINITY;
        for (int64_t i = p->sink_columns + w->clusters; i < w->columns; i++) logits[i] = -INFINITY;
    }
    const int64_t cov = w->kv_head * p->n_covs + (w->clusters - 1) / p->clusters_per_cov;
    product(w->moment, dim, w->query, dim, 1, w->n, p->key_cov + cov * dim * dim, dim, dim, dim, 0);
    product(w->direction, wide, w->query, dim, 1, w->n, p->key_value_cov + cov * dim * wide, wide, dim, wide, 0);
    for (int64_t t = 0; t < w->n; t++) {
        const float square = dot(w->query + t * dim, w->moment + t * dim, dim), most = MAX_STD * MAX_STD;
        const float s = sqrtf(square < 0 ? 0 : square <= most ? square : most); /* NaN counts as large */
        w->std[t] = s > MIN_STD ? s : MIN_STD;
    }
}

/* The logit from which on far keys are read: `min_weight` of the mass estimated before the search. Sinks count little. */
void prescore_set_threshold(const RoutedCall *p, Tile *w, int64_t t) {
    const float *logits = w->logits + t * w->padded, s = w->std[t], elsewhere = p->lse[w->index[t]];
    const float gain = 0.5f * s * s < p->max_mass_gain ? 0.5f * s * s : p->max_mass_gain;
    const floats behind = splat(logf((float)p->cluster_size) + gain), part = splat(p->log_sink_weight);
    floats top = splat(elsewhere), sum = splat(0);
    for (int64_t c = 0; c < p->sink_columns; c += WIDTH) top = larger(top, load(logits + c) + part);
    for (int64_t c = p->sink_columns; c < w->columns; c += WIDTH) top = larger(top, load(logits + c) + behind);
    const floats peak = splat(largest(top));
    for (int64_t c = 0; c < p->sink_columns; c += WIDTH) sum += vexp(load(logits + c) + part - peak);
    for (int64_t c = p->sink_columns; c < w->columns; c += WIDTH) sum += vexp(load(logits + c) + behind - peak);
    w->threshold[t] = peak[0] + logf(total(sum) + expf(elsewhere - peak[0])) - p->log_inverse;
    p->threshold[w->index[t]] = w->threshold[t];
}

/* Keys read lie anywhere in memory: prefetch the next ones, also those of the next query. */
static void prefetch_hits(const RoutedCall *p, const Tile *w, const int32_t *rows, int64_t first, int64_t stop) {
    for (int64_t i = first; i < first + AHEAD && i < stop; i++) {
        prefetch_row(&p->key, row_offset(&p->key, w->kv_head, rows[i]), p->dim);
        prefetch_row(&p->value, row_offset(&p->value, w->kv_head, rows[i]), p->value_dim);
    }
}

/* One softmax over local keys, keys read and columns. Leaves weights of columns in `logits` and everything else in the output,
 * not yet divided by the mass that is returned. */
float prescore_read_hits(const RoutedCall *p, Tile *w, int64_t t, float *highest) {
    const int64_t at = w->index[t], wide = p->value_dim, hits = w->n_hits[t];
    const int32_t *rows = w->hits + t * w->max_hits;
    float *logits = w->logits + t * w->padded, *own = w->hit_logits, peak = p->lse[at];
    floats top = splat(peak);
    for (int64_t i = 0; i < hits; i += AHEAD) {
        prefetch_hits(p, w, rows, i + AHEAD, hits);
        row_dots(own + i, &p->key, w->kv_head, rows + i, hits - i < AHEAD ? hits - i : AHEAD, w->query + t * p->dim, p->dim);
    }
    for (int64_t i = hits; i < (hits + WIDTH - 1) / WIDTH * WIDTH; i++) own[i] = -INFINITY;
    for (int64_t i = 0; i < hits; i += WIDTH) top = larger(top, load(own + i));
    for (int64_t c = 0; c < w->columns; c += WIDTH) top = larger(top, load(logits + c));
    *highest = peak = largest(top);
    if (peak == -INFINITY) return 0;
    floats mass = splat(0), moved = splat(0);
    for (int64_t c = 0; c < w->columns; c += WIDTH) {
        floats x = vexp(load(logits + c) - splat(peak));
        store(logits + c, x);
        mass += x;
        moved += x * load(w->move + t * w->padded + c);
    }
    for (int64_t i = 0; i < hits; i += WIDTH) {
        floats x = vexp(load(own + i) - splat(peak));
        store(own + i, x);
        mass += x;
    }
    float *output = p->output + at * wide, sum[MAX_DIM];
    const floats local = splat(expf(p->lse[at] - peak)), along = splat(total(moved));
    for (int64_t i = 0; i < wide; i += WIDTH)
        store(sum + i, load(output + i) * local + load(w->direction + t * wide + i) * along);
    add_rows(sum, &p->value, w->kv_head, rows, own, hits, wide);
    memcpy(output, sum, sizeof(float) * (size_t)wide);
    return total(mass) + local[0];
}

static int64_t run_tile(const RoutedCall *p, Tile *w) {
    const int64_t wide = p->value_dim;
    int64_t read = 0;
    prescore_load_queries(p, w);
    prescore_attend_local(p, w);
    if (w->clusters == 0) return 0; /* nothing is far; sinks are local keys here */
    prescore_begin_tile(p, w);
    for (int64_t t = 0; t < w->n; t++) prescore_set_threshold(p, w, t);
    prescore_find_keys(p, w);
    for (int64_t t = 0; t < w->n; t++) prescore_correct_centroids(p, w, t);
    float mass[TILE], peak[TILE];
    for (int64_t t = 0; t < w->n; t++) {
        if (t + 1 < w->n) prefetch_hits(p, w, w->hits + (t + 1) * w->max_hits, 0, w->n_hits[t + 1]);
        mass[t] = prescore_read_hits(p, w, t, peak + t);
        read += w->n_hits[t];
    }
    float *sums = w->moment; /* no longer needed: MAX_DIM numbers a query */
    product(sums, wide, w->logits, w->padded, 1, w->n, p->column_values + w->kv_head * p->n_columns * wide, wide,
            p->sink_columns + w->clusters, wide, 0);
    for (int64_t t = 0; t < w->n; t++) {
        if (peak[t] == -INFINITY) continue;
        float *output = p->output + w->index[t] * wide;
        const floats part = splat(1.0f / mass[t]);
        for (int64_t i = 0; i < wide; i += WIDTH) store(output + i, (load(output + i) + load(sums + t * wide + i)) * part);
        p->lse[w->index[t]] = peak[t] + logf(mass[t]);
    }
    return read;
}

/* Returns 0, or 1 where there was no memory. */
PRESCORE_EXPORT int prescore_routed_forward(const RoutedCall *p) {
    const int64_t tiles = (p->n_query + TILE - 1) / TILE;
    LocalKeys local = {0};
    int failed = prescore_load_local(p, &local);
#pragma omp parallel num_threads(prescore_threads()) if (tiles * p->kv_heads > 1)
    {
        Tile *w = failed ? NULL : prescore_new_tile(p, &local);
        int64_t read = 0;
        if (!w) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t job = 0; job < tiles * p->kv_heads; job++) {
            /* The last queries see most and go first, so that no thread is left alone with them. One KV head after the other:
             * its int4 keys stay in cache. */
            const int64_t kv_head = job / tiles, begin = (tiles - 1 - job % tiles) * TILE;
            const int64_t stop = begin + TILE < p->n_query ? begin + TILE : p->n_query;
            for (int64_t done = begin; w && done < stop;) {
                done = next_tile(p, w, kv_head, done, stop);
                read += run_tile(p, w);
            }
        }
        free(w);
#pragma omp atomic
        p->counts[1] += read;
    }
    prescore_free_local(&local);
    return failed;
}
