/* The threshold that a query with samples searches with. */
#include "sampled.h"

/* Outputs estimated without a search: local keys, sinks and samples. */
static void guess_outputs(const RoutedCall *p, const Samples *s, Tile *w, SampledTile *r) {
    const int64_t samples = w->clusters * s->each, end = filled(samples), wide = p->value_dim;
    const floats stands_for = splat(logf((float)s->stride));
    float *weights = w->move; /* not needed yet: [TILE, padded] */
    for (int64_t t = 0; t < w->n; t++) {
        const float *logits = w->logits + t * w->padded, local = p->lse[w->index[t]];
        float *columns = weights + t * w->padded, *own = r->drawn + t * p->extra_columns;
        floats top = splat(local), mass = splat(0);
        for (int64_t c = 0; c < p->sink_columns; c += WIDTH) top = larger(top, load(logits + c));
        for (int64_t c = 0; c < end; c += WIDTH) top = larger(top, load(logits + p->n_columns + c) + stands_for);
        const float peak = largest(top);
        for (int64_t c = 0; c < p->sink_columns; c += WIDTH) {
            const floats x = vexp(load(logits + c) - splat(peak));
            store(columns + c, x);
            mass += x;
        }
        for (int64_t c = 0; c < end; c += WIDTH) {
            const floats x = vexp(load(logits + p->n_columns + c) + stands_for - splat(peak));
            store(own + c, x);
            mass += x;
        }
        const float local_mass = expf(local - peak), all = total(mass) + local_mass;
        const floats part = splat(1.0f / all), share = splat(local_mass / all);
        r->lse[t] = peak + logf(all);
        for (int64_t c = 0; c < p->sink_columns; c += WIDTH) store(columns + c, load(columns + c) * part);
        for (int64_t c = 0; c < end; c += WIDTH) store(own + c, load(own + c) * part);
        const float *output = p->output + w->index[t] * wide;
        for (int64_t i = 0; i < wide; i += WIDTH) store(r->outputs + t * wide + i, load(output + i) * share);
    }
    const float *values = s->values + w->kv_head * p->extra_columns * wide;
    product(r->outputs, wide, weights, w->padded, 1, w->n, p->column_values + w->kv_head * p->n_columns * wide, wide, p->sinks, wide, 1);
    product(r->outputs, wide, r->drawn, p->extra_columns, 1, w->n, values, wide, samples, wide, 1);
    for (int64_t t = 0; t < w->n; t++) r->square[t] = dot(r->outputs + t * wide, r->outputs + t * wide, wide);
}

/* Standard deviation of the error of int4 logits. */
static float int4_error(const RoutedCall *p, const Samples *s, const Tile *w, const SampledTile *r, int64_t t) {
    const float *int4_unit = s->int4_unit + (w->kv_head * p->n_clusters + w->clusters - 1) * 2;
    float square = 0;
    for (int half = 0; half < 2; half++) {
        const float off = r->uncertain[2 * t + half] * w->int6_scale[t] * int4_unit[half];
        square += off * off;
    }
    return sqrtf(square);
}

/* Number of samples above a threshold, and the sum of the terms of the others. */
INLINE float variance_below(const float *logits, const float *terms, int64_t n, float threshold, float *above) {
    floats variance = splat(0), read = splat(0);
    for (int64_t c = 0; c < n; c += WIDTH) {
        const floats x = load(logits + c), term = load(terms + c);
#if defined(__AVX512F__)
        const __mmask16 over = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(threshold), _CMP_GE_OQ);
        variance = (floats)_mm512_mask_add_ps((__m512)variance, (__mmask16)~over, (__m512)variance, (__m512)term);
        read = (floats)_mm512_mask_add_ps((__m512)read, over, (__m512)read, _mm512_set1_ps(1.0f));
#else
        const ints over = x >= splat(threshold);
        variance += choose(over, splat(0.0f), term);
        read += choose(over, splat(1.0f), splat(0.0f));
#endif
    }
    *above = total(read);
    return total(variance);
}

/* The highest threshold below which the samples vary little enough; inf where there is none, or where so many keys would be
 * read that reading every key is faster. */
static float choose_threshold(const RoutedCall *p, const Samples *s, const Tile *w, const SampledTile *r, int64_t t) {
    if (int4_error(p, s, w, r, t) > s->max_int4_error) return INFINITY;
    const int64_t samples = w->clusters * s->each, end = filled(samples);
    const float *logits = w->logits + t * w->padded + p->n_columns, *distance2 = s->distance2 + w->kv_head * p->extra_columns;
    const float mean_distance2 = s->mean_distance2[w->kv_head * p->n_clusters + w->clusters - 1];
    const float uneven = s->below * (1 - expf(-w->std[t] * w->std[t]));
    float *terms = r->drawn + t * p->extra_columns; /* weights, until now */
    for (int64_t c = 0; c < end; c += WIDTH) store(terms + c, load(terms + c) * load(terms + c) * load(distance2 + c));
    for (int j = 0; j < s->n_thresholds; j++) {
        float above;
        const float threshold = w->threshold[t] - (float)j * s->step, unseen = expf(threshold - r->lse[t]);
        const float variance = variance_below(logits, terms, end, threshold, &above);
        if (above > s->max_hit_share * (float)samples) return INFINITY;
        if (uneven * variance + (float)s->stride * unseen * unseen * mean_distance2 <= s->allowed * r->square[t]) return threshold;
    }
    return INFINITY;
}

/* The threshold of each query. */
void prescore_choose_thresholds(const RoutedCall *p, const Samples *s, Tile *w, SampledTile *r) {
    int open = 0;
    for (int64_t t = 0; t < w->n; t++) {
        prescore_set_threshold(p, w, t);
        open |= s->target[w->index[t]] == INFINITY;
    }
    if (open) guess_outputs(p, s, w, r);
    for (int64_t t = 0; t < w->n; t++) {
        const float target = s->target[w->index[t]], threshold = target == INFINITY ? choose_threshold(p, s, w, r, t) : target;
        s->refined[w->index[t]] = threshold != w->threshold[t];
        p->threshold[w->index[t]] = w->threshold[t] = threshold;
    }
}
