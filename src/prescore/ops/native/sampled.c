/* Routed attention with sampled unread keys, for `tolerance`.
 *
 * The unread keys of a cluster are weighed by their int4 logits, and every sixteenth key is a sample that says how far off
 * this is. The estimate is nearly unbiased: int4 weights and centroids are added for all keys and taken away for the samples,
 * whose true weights and values replace them. Heavy keys are read, so the variance of the terms says how far the result may
 * be off. The samples are scored before the search and choose its threshold. Queries may take part or not.
 */
#include "sampled.h"

/* The largest logit of a query. */
static float highest_of(const RoutedCall *p, const Samples *s, const Tile *w, const SampledTile *r, int64_t t) {
    const int64_t hits = w->n_hits[t], samples = filled(w->clusters * s->each);
    const float *logits = w->logits + t * w->padded;
    float *own = r->rows + t * w->max_hits, highest = p->lse[w->index[t]];
    if (w->threshold[t] > highest) highest = w->threshold[t];
    for (int64_t i = hits; i < (hits + WIDTH - 1) / WIDTH * WIDTH; i++) own[i] = -INFINITY;
    floats top = splat(highest);
    for (int64_t i = 0; i < hits; i += WIDTH) top = larger(top, load(own + i));
    for (int64_t c = 0; c < p->sink_columns; c += WIDTH) top = larger(top, load(logits + c));
    for (int64_t c = 0; c < samples; c += WIDTH) top = larger(top, load(logits + p->n_columns + c));
    return largest(top);
}

/* exp(x - peak) of some numbers, in place; returns their sum. */
static float weigh_all(float *x, int64_t n, float peak) {
    floats sum = splat(0);
    for (int64_t i = 0; i < n; i += WIDTH) {
        const floats own = vexp(load(x + i) - splat(peak));
        store(x + i, own);
        sum += own;
    }
    return total(sum);
}

/* Weights of a centroid, of its samples, and `off`; keys read are taken out of the mean. Returns the int4 weight of all unread
 * keys. */
INLINE float weigh_cluster(const RoutedCall *p, const Samples *s, Tile *w, SampledTile *r, int64_t t, int64_t cluster, float unit, float *rows) {
    const int64_t each = s->each, cluster_hits = w->cluster_hits[t * w->padded + p->sink_columns + cluster], at = t * p->n_clusters + cluster;
    const float left = (float)(p->cluster_size - cluster_hits), used = r->used[at], unread = r->unread[at] * unit;
    const float *by_int4 = r->by_int4 + t * p->extra_columns + cluster * each;
    float *drawn = w->logits + t * w->padded + p->n_columns + cluster * each, *off = r->off + t * p->extra_columns + cluster * each;
    const float mean = left > 0 ? unread / left : 0, stands_for = used > 0 ? left / used : 0;
    const float share = used > 0 ? 2 * mean - r->shown[at] * unit / used : mean;
    for (int64_t i = 0; i < each; i++) {
        const float counts = by_int4[i] >= 0 ? stands_for : 0.0f, weight = drawn[i];
        off[i] = counts * (weight - by_int4[i] * unit);
        drawn[i] = counts * (weight - mean);
    }
    for (int64_t i = 0; i < cluster_hits; i++) rows[i] -= share;
    w->logits[t * w->padded + p->sink_columns + cluster] = share * (float)p->cluster_size;
    r->alone[at] = used > 0 ? 0 : unread;
    return unread;
}

/* One softmax over everything: leaves weights of columns and samples in `logits`, those of keys read in `rows`, and local keys
 * in the output, not yet divided by the mass that is returned. */
static float weigh_query(const RoutedCall *p, const Samples *s, Tile *w, SampledTile *r, int64_t t, float *highest) {
    const int64_t at = w->index[t], wide = p->value_dim, hits = w->n_hits[t], samples = w->clusters * s->each;
    float *logits = w->logits + t * w->padded, *own = r->rows + t * w->max_hits;
    const float peak = *highest = highest_of(p, s, w, r, t), unit = expf(w->threshold[t] - peak);
    const floats local = splat(expf(p->lse[at] - peak));
    float mass = local[0] + weigh_all(logits, p->sink_columns, peak) + weigh_all(own, hits, peak);
    weigh_all(logits + p->n_columns, filled(samples), peak);
    for (int64_t cluster = 0, done = 0; cluster < w->clusters; cluster++) {
        mass += weigh_cluster(p, s, w, r, t, cluster, unit, own + done);
        done += w->cluster_hits[t * w->padded + p->sink_columns + cluster];
    }
    float *off = r->off + t * p->extra_columns;
    floats more = splat(0);
    for (int64_t i = samples; i < filled(samples); i++) logits[p->n_columns + i] = off[i] = 0;
    for (int64_t i = 0; i < samples; i += WIDTH) more += load(off + i);
    mass += total(more);
    if (!(mass > 0)) return 0;
    float *output = p->output + at * wide;
    for (int64_t i = 0; i < wide; i += WIDTH) store(output + i, load(output + i) * local);
    return mass;
}

/* Add the values of the keys read, cluster by cluster: queries of a tile read many of the same. */
static void add_values(const RoutedCall *p, const Tile *w, const SampledTile *r, const float *mass) {
    int64_t done[TILE] = {0};
    for (int64_t cluster = 0; cluster < w->clusters; cluster++)
        for (int64_t t = 0; t < w->n; t++) {
            const int64_t cluster_hits = w->cluster_hits[t * w->padded + p->sink_columns + cluster], at = t * w->max_hits + done[t];
            if (mass[t] == 0 || cluster_hits == 0) continue;
            add_rows(p->output + w->index[t] * p->value_dim, &p->value, w->kv_head, w->hits + at, r->rows + at, cluster_hits, p->value_dim);
            done[t] += cluster_hits;
        }
}

/* Queries whose search is worth it; the others keep their local result, and their error is unknown. */
static int64_t weigh_tile(const RoutedCall *p, const Samples *s, Tile *w, SampledTile *r) {
    const int64_t wide = p->value_dim, samples = w->clusters * s->each;
    const int32_t most = max_hit_share(p, s, w);
    int64_t read = 0;
    float mass[TILE], peak[TILE], *sums = w->moment;
    for (int64_t t = 0; t < w->n; t++) {
        read += samples;
        mass[t] = 0;
        if (w->threshold[t] == INFINITY || w->n_hits[t] > most) continue;
        mass[t] = weigh_query(p, s, w, r, t, peak + t);
        read += w->n_hits[t];
    }
    add_values(p, w, r, mass);
    product(sums, wide, w->logits, w->padded, 1, w->n, p->column_values + w->kv_head * p->n_columns * wide, wide,
            p->sink_columns + w->clusters, wide, 0);
    product(sums, wide, w->logits + p->n_columns, w->padded, 1, w->n, s->values + w->kv_head * p->extra_columns * wide, wide, samples, wide, 1);
    for (int64_t t = 0; t < w->n; t++) {
        const int64_t at = w->index[t];
        if (mass[t] == 0) {
            s->variance[at] = s->fourth[at] = s->overlap[at] = INFINITY;
            continue;
        }
        float *output = p->output + at * wide;
        const floats part = splat(1.0f / mass[t]);
        for (int64_t i = 0; i < wide; i += WIDTH) {
            floats x = (load(output + i) + load(sums + t * wide + i)) * part;
            store(output + i, x);
            store(r->outputs + t * wide + i, x);
        }
        p->lse[at] = peak[t] + logf(mass[t]);
        prescore_measure_variance(p, s, w, r, t, mass[t]);
    }
    return read;
}

/* Standard deviation of int4 sums: the rounding of a number is uniform within a unit. */
static void int4_deviation(const RoutedCall *p, const Tile *w, SampledTile *r) {
    for (int64_t t = 0; t < w->n; t++)
        for (int half = 0; half < 2; half++) {
            const float *part = w->query + t * p->dim + half * p->dim / 2;
            float square = 0;
            for (int64_t i = 0; i < p->dim / 2; i++) square += part[i] * part[i];
            r->uncertain[2 * t + half] = sqrtf(square / 12.0f) / w->int6_scale[t];
        }
}

/* Returns how many keys were read, samples included. */
static int64_t run_tile(const RoutedCall *p, const Samples *s, Tile *w, SampledTile *r) {
    const int64_t dim = p->dim, samples = w->clusters * s->each;
    prescore_load_queries(p, w);
    int4_deviation(p, w, r);
    prescore_begin_tile(p, w);
    const float *columns = s->columns + w->kv_head * p->extra_columns * dim;
    for (int64_t b = 0; b < filled(samples) / 16; b++)
        product(w->logits + p->n_columns + 16 * b, w->padded, w->query, dim, 1, w->n, columns + b * dim * 16, 16, dim, 16, 0);
    for (int64_t t = 0; t < w->n; t++) /* later samples belong to clusters that are not visible */
        for (int64_t i = samples; i < filled(samples); i++) w->logits[t * w->padded + p->n_columns + i] = -INFINITY;
    prescore_choose_thresholds(p, s, w, r);
    prescore_search_all(p, s, w, r);
    return weigh_tile(p, s, w, r);
}

/* The next queries of a KV head that take part and see the same clusters; returns where to go on. */
static int64_t next_active(const RoutedCall *p, const Samples *s, Tile *w, int64_t kv_head, int64_t begin, int64_t stop) {
    const uint8_t *active = s->active + kv_head * p->n_query;
    w->kv_head = kv_head;
    w->n = 0;
    for (; begin < stop && w->n < TILE; begin++) {
        const int32_t visible = p->visible[place_of(p, kv_head, begin)];
        if (!active[begin] || visible == 0) continue;
        if (w->n && visible != w->clusters) break;
        w->clusters = visible;
        w->index[w->n++] = kv_head * p->n_query + begin;
    }
    w->columns = (p->sink_columns + (w->n ? w->clusters : 0) + 15) / 16 * 16;
    return begin;
}

static SampledTile *new_sampled_tile(const RoutedCall *p, const Tile *w) {
    const int64_t tile = p->n_query < TILE ? p->n_query : TILE;
    const size_t samples = (size_t)(tile * p->extra_columns), clusters = (size_t)(tile * p->n_clusters);
    const size_t rows = (size_t)(tile * w->max_hits);
    SampledTile *r = malloc(sizeof(SampledTile) + sizeof(float) * (3 * samples + 4 * clusters + rows + 16));
    if (!r) return NULL;
    r->drawn = (float *)(r + 1);
    r->by_int4 = r->drawn + samples;
    r->off = r->by_int4 + samples;
    r->unread = r->off + samples;
    r->shown = r->unread + clusters;
    r->used = r->shown + clusters;
    r->alone = r->used + clusters;
    r->rows = r->alone + clusters;
    return r;
}

/* Returns 0, or 1 where there was no memory. */
PRESCORE_EXPORT int prescore_routed_sampled(const RoutedCall *p, const Samples *s) {
    const int64_t span = 8 * TILE, spans = (p->n_query + span - 1) / span;
    int failed = 0;
#pragma omp parallel num_threads(prescore_threads()) if (spans * p->kv_heads > 1)
    {
        Tile *w = prescore_new_tile(p, NULL);
        SampledTile *r = w ? new_sampled_tile(p, w) : NULL;
        int64_t read = 0;
        if (!r) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t job = 0; job < spans * p->kv_heads; job++) {
            const int64_t kv_head = job % p->kv_heads, begin = (spans - 1 - job / p->kv_heads) * span;
            const int64_t stop = begin + span < p->n_query ? begin + span : p->n_query;
            for (int64_t done = begin; r && done < stop;) {
                done = next_active(p, s, w, kv_head, done, stop);
                if (w->n) read += run_tile(p, s, w, r);
            }
        }
        free(r);
        free(w);
#pragma omp atomic
        p->counts[1] += read;
    }
    return failed;
}
