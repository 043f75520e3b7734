/* How light the keys must be that a query with samples looks for, before it looks. */
#include "sampled.h"

/* Results as if nothing were to be found: near keys, sinks and samples. */
static void guess_outputs(const Problem *p, const Samples *s, Work *w, Rest *r) {
    const int64_t samples = w->nodes * s->each, end = filled(samples), wide = p->value_dim;
    const floats stands_for = splat(logf((float)s->stride));
    float *weights = w->move; /* not needed yet: [TILE, padded] */
    for (int64_t t = 0; t < w->n; t++) {
        const float *logits = w->logits + t * w->padded, near = p->lse[w->index[t]];
        float *columns = weights + t * w->padded, *own = r->drawn + t * p->more;
        floats top = splat(near), mass = splat(0);
        for (int64_t c = 0; c < p->sink_room; c += WIDTH) top = larger(top, load(logits + c));
        for (int64_t c = 0; c < end; c += WIDTH) top = larger(top, load(logits + p->room + c) + stands_for);
        const float peak = largest(top);
        for (int64_t c = 0; c < p->sink_room; c += WIDTH) {
            const floats x = vexp(load(logits + c) - splat(peak));
            store(columns + c, x);
            mass += x;
        }
        for (int64_t c = 0; c < end; c += WIDTH) {
            const floats x = vexp(load(logits + p->room + c) + stands_for - splat(peak));
            store(own + c, x);
            mass += x;
        }
        const float known = expf(near - peak), all = total(mass) + known;
        const floats part = splat(1.0f / all), share = splat(known / all);
        r->lse[t] = peak + logf(all);
        for (int64_t c = 0; c < p->sink_room; c += WIDTH) store(columns + c, load(columns + c) * part);
        for (int64_t c = 0; c < end; c += WIDTH) store(own + c, load(own + c) * part);
        const float *output = p->output + w->index[t] * wide;
        for (int64_t i = 0; i < wide; i += WIDTH) store(r->outputs + t * wide + i, load(output + i) * share);
    }
    const float *values = s->values + w->lane * p->more * wide;
    product(r->outputs, wide, weights, w->padded, 1, w->n, p->column_values + w->lane * p->room * wide, wide, p->sinks, wide, 1);
    product(r->outputs, wide, r->drawn, p->more, 1, w->n, values, wide, samples, wide, 1);
    for (int64_t t = 0; t < w->n; t++) r->square[t] = dot(r->outputs + t * wide, r->outputs + t * wide, wide);
}

/* By how much coded logits are off. */
static float code_error(const Problem *p, const Samples *s, const Work *w, const Rest *r, int64_t t) {
    const float *coarse = s->coarse + (w->lane * p->node_room + w->nodes - 1) * 2;
    float square = 0;
    for (int half = 0; half < 2; half++) {
        const float off = r->uncertain[2 * t + half] * w->code_scale[t] * coarse[half];
        square += off * off;
    }
    return sqrtf(square);
}

/* Samples from a limit on, and the sum of the terms of the others. */
INLINE float spread_below(const float *logits, const float *terms, int64_t n, float limit, float *above) {
    floats spread = splat(0), read = splat(0);
    for (int64_t c = 0; c < n; c += WIDTH) {
        const floats x = load(logits + c), term = load(terms + c);
#if defined(__AVX512F__)
        const __mmask16 over = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(limit), _CMP_GE_OQ);
        spread = (floats)_mm512_mask_add_ps((__m512)spread, (__mmask16)~over, (__m512)spread, (__m512)term);
        read = (floats)_mm512_mask_add_ps((__m512)read, over, (__m512)read, _mm512_set1_ps(1.0f));
#else
        const ints over = x >= splat(limit);
        spread += choose(over, splat(0.0f), term);
        read += choose(over, splat(1.0f), splat(0.0f));
#endif
    }
    *above = total(read);
    return total(spread);
}

/* The highest limit under which the samples that stay below it spread little enough; inf where none does, or where so
 * many keys would be read that reading everything is faster. */
static float choose_limit(const Problem *p, const Samples *s, const Work *w, const Rest *r, int64_t t) {
    if (code_error(p, s, w, r, t) > s->most_off) return INFINITY;
    const int64_t samples = w->nodes * s->each, end = filled(samples);
    const float *logits = w->logits + t * w->padded + p->room, *apart = s->apart + w->lane * p->more;
    const float usual = s->usual[w->lane * p->node_room + w->nodes - 1];
    const float uneven = s->below * (1 - expf(-w->spread[t] * w->spread[t]));
    float *terms = r->drawn + t * p->more; /* weights, until now */
    for (int64_t c = 0; c < end; c += WIDTH) store(terms + c, load(terms + c) * load(terms + c) * load(apart + c));
    for (int j = 0; j < s->aims; j++) {
        float above;
        const float limit = w->limit[t] - (float)j * s->step, unseen = expf(limit - r->lse[t]);
        const float spread = spread_below(logits, terms, end, limit, &above);
        if (above > s->most_rows * (float)samples) return INFINITY;
        if (uneven * spread + (float)s->stride * unseen * unseen * usual <= s->allowed * r->square[t]) return limit;
    }
    return INFINITY;
}

/* Which limit each query searches with. */
void prescore_aim(const Problem *p, const Samples *s, Work *w, Rest *r) {
    int open = 0;
    for (int64_t t = 0; t < w->n; t++) {
        prescore_set_limit(p, w, t);
        open |= s->aim[w->index[t]] == INFINITY;
    }
    if (open) guess_outputs(p, s, w, r);
    for (int64_t t = 0; t < w->n; t++) {
        const float aim = s->aim[w->index[t]], limit = aim == INFINITY ? choose_limit(p, s, w, r, t) : aim;
        s->further[w->index[t]] = limit != w->limit[t];
        p->limit[w->index[t]] = w->limit[t] = limit;
    }
}
