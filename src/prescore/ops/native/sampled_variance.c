/* The variance of a result with sampled unread keys. */
#include "sampled.h"

/* The mean square of the products of two different projections of the terms' second moment: for random signs it is the
 * sum of the squares of all products of two terms, which says in how many directions they point. */
static float measure_overlap(const RoutedCall *p, const Samples *s, const Tile *w, const SampledTile *r, int64_t t, float mass) {
    const int64_t wide = p->value_dim, end = filled(w->clusters * s->each);
    const float *projected = s->projected + w->kv_head * p->extra_columns * 2 * PROJECTIONS, *off = r->off + t * p->extra_columns;
    const float *weights = w->logits + t * w->padded + p->n_columns;
    float own[PROJECTIONS], sum = 0;
    floats pairs[PROJECTIONS][PROJECTIONS];
    for (int a = 0; a < PROJECTIONS; a++) {
        own[a] = dot(s->signs + a * wide, r->outputs + t * wide, wide);
        for (int b = 0; b < a; b++) pairs[a][b] = splat(0);
    }
    for (int64_t c = 0; c < end; c += WIDTH) {
        const float *block = projected + c / 16 * 32 * PROJECTIONS + c % 16;
        const floats within = load(weights + c) * splat(1.0f / mass), whole = load(off + c) * splat(1.0f / mass);
        floats term[PROJECTIONS];
        for (int a = 0; a < PROJECTIONS; a++)
            term[a] = within * load(block + 16 * a) + whole * (load(block + 16 * (PROJECTIONS + a)) - splat(own[a]));
        for (int a = 0; a < PROJECTIONS; a++)
            for (int b = 0; b < a; b++) pairs[a][b] += term[a] * term[b];
    }
    for (int a = 0; a < PROJECTIONS; a++)
        for (int b = 0; b < a; b++) sum += total(pairs[a][b]) * total(pairs[a][b]);
    return sum / (PROJECTIONS * (PROJECTIONS - 1) / 2);
}

/* Squared distances of the centroids from an output, for each sample; returns the sum of the terms of clusters without one. */
static void measure_centroids(const RoutedCall *p, const Samples *s, const Tile *w, const SampledTile *r, int64_t t, float part, float *sums) {
    const int64_t wide = p->value_dim, each = s->each;
    const float *output = r->outputs + t * wide, *distance2 = s->distance2 + w->kv_head * p->extra_columns;
    float *away = r->drawn + t * p->extra_columns;
    sums[0] = sums[1] = 0;
    for (int64_t cluster = 0; cluster < w->clusters; cluster++) {
        const float *mean = p->column_values + (w->kv_head * p->n_columns + p->sink_columns + cluster) * wide;
        const float alone = r->alone[t * p->n_clusters + cluster];
        floats sum = splat(0);
        for (int64_t i = 0; i < wide; i += WIDTH) {
            const floats x = load(mean + i) - load(output + i);
            sum += x * x;
        }
        const float square = total(sum);
        for (int64_t i = 0; i < each; i++) away[cluster * each + i] = square;
        if (alone <= 0) continue;
        float mean_distance2 = 0;
        for (int64_t i = 0; i < each; i++) mean_distance2 += distance2[cluster * each + i];
        const float term = alone * alone * mean_distance2 / (float)each * part;
        sums[0] += term;
        sums[1] += term * term;
    }
    for (int64_t i = w->clusters * each; i < filled(w->clusters * each); i++) away[i] = 0;
}

/* From weights that are not yet divided by `mass`. A sample represents keys whose values differ from their centroid, and whose
 * weights differ from their int4 weights. */
void prescore_measure_variance(const RoutedCall *p, const Samples *s, const Tile *w, const SampledTile *r, int64_t t, float mass) {
    const int64_t at = w->index[t], end = filled(w->clusters * s->each);
    const float *weights = w->logits + t * w->padded + p->n_columns, *off = r->off + t * p->extra_columns;
    const float *distance2 = s->distance2 + w->kv_head * p->extra_columns, *away = r->drawn + t * p->extra_columns, part = 1 / (mass * mass);
    /* a key at the threshold that no sample shows: what it may weigh, as often as any other */
    const float unseen = expf(w->threshold[t] - p->lse[at]);
    const float hidden = (float)s->stride * unseen * unseen * s->mean_distance2[w->kv_head * p->n_clusters + w->clusters - 1];
    float alone[2];
    measure_centroids(p, s, w, r, t, part, alone);
    floats second = splat(0), fourth = splat(0);
    for (int64_t c = 0; c < end; c += WIDTH) {
        const floats own = load(weights + c), whole = load(off + c);
        const floats term = (own * own * load(distance2 + c) + whole * whole * load(away + c)) * splat(part);
        second += term;
        fourth += term * term;
    }
    s->overlap[at] = measure_overlap(p, s, w, r, t, mass) + alone[1] + hidden * hidden;
    s->variance[at] = total(second) + alone[0] + hidden;
    s->fourth[at] = total(fourth) + alone[1];
}
