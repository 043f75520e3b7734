/* How far the terms of a sampled rest spread. */
#include "sampled.h"

/* The mean square of the products of two different projections of the terms' second moment: for random signs it is the
 * sum of the squares of all products of two terms, which says in how many directions they point. */
static float measure_overlap(const Problem *p, const Samples *s, const Work *w, const Rest *r, int64_t t, float mass) {
    const int64_t wide = p->value_dim, end = filled(w->nodes * s->each);
    const float *shadows = s->shadows + w->lane * p->more * 2 * SHADOWS, *off = r->off + t * p->more;
    const float *weights = w->logits + t * w->padded + p->room;
    float own[SHADOWS], sum = 0;
    floats pairs[SHADOWS][SHADOWS];
    for (int a = 0; a < SHADOWS; a++) {
        own[a] = dot(s->signs + a * wide, r->outputs + t * wide, wide);
        for (int b = 0; b < a; b++) pairs[a][b] = splat(0);
    }
    for (int64_t c = 0; c < end; c += WIDTH) {
        const float *block = shadows + c / 16 * 32 * SHADOWS + c % 16;
        const floats within = load(weights + c) * splat(1.0f / mass), whole = load(off + c) * splat(1.0f / mass);
        floats term[SHADOWS];
        for (int a = 0; a < SHADOWS; a++)
            term[a] = within * load(block + 16 * a) + whole * (load(block + 16 * (SHADOWS + a)) - splat(own[a]));
        for (int a = 0; a < SHADOWS; a++)
            for (int b = 0; b < a; b++) pairs[a][b] += term[a] * term[b];
    }
    for (int a = 0; a < SHADOWS; a++)
        for (int b = 0; b < a; b++) sum += total(pairs[a][b]) * total(pairs[a][b]);
    return sum / (SHADOWS * (SHADOWS - 1) / 2);
}

/* Squares of the distances of the nodes' means from an output, for each sample of a node; and the sum of the terms of nodes
 * that no sample stands for, as if their keys were off together, with that of their squares. */
static void measure_nodes(const Problem *p, const Samples *s, const Work *w, const Rest *r, int64_t t, float part, float *sums) {
    const int64_t wide = p->value_dim, each = s->each;
    const float *output = r->outputs + t * wide, *apart = s->apart + w->lane * p->more;
    float *away = r->drawn + t * p->more;
    sums[0] = sums[1] = 0;
    for (int64_t node = 0; node < w->nodes; node++) {
        const float *mean = p->column_values + (w->lane * p->room + p->sink_room + node) * wide;
        const float alone = r->alone[t * p->node_room + node];
        floats sum = splat(0);
        for (int64_t i = 0; i < wide; i += WIDTH) {
            const floats x = load(mean + i) - load(output + i);
            sum += x * x;
        }
        const float square = total(sum);
        for (int64_t i = 0; i < each; i++) away[node * each + i] = square;
        if (alone <= 0) continue;
        float usual = 0;
        for (int64_t i = 0; i < each; i++) usual += apart[node * each + i];
        const float term = alone * alone * usual / (float)each * part;
        sums[0] += term;
        sums[1] += term * term;
    }
    for (int64_t i = w->nodes * each; i < filled(w->nodes * each); i++) away[i] = 0;
}

/* From weights that are not yet divided by `mass`. A sample stands for keys whose values differ from their node's mean,
 * and which weigh more or less than their codes say. */
void prescore_measure(const Problem *p, const Samples *s, const Work *w, const Rest *r, int64_t t, float mass) {
    const int64_t at = w->index[t], end = filled(w->nodes * s->each);
    const float *weights = w->logits + t * w->padded + p->room, *off = r->off + t * p->more;
    const float *apart = s->apart + w->lane * p->more, *away = r->drawn + t * p->more, part = 1 / (mass * mass);
    /* a key at the limit that no sample shows: what it may weigh, drawn as often as any other; nothing that was estimated */
    const float unseen = expf(w->limit[t] - p->lse[at]);
    const float hidden = (float)s->stride * unseen * unseen * s->usual[w->lane * p->node_room + w->nodes - 1];
    float alone[2];
    measure_nodes(p, s, w, r, t, part, alone);
    floats second = splat(0), fourth = splat(0);
    for (int64_t c = 0; c < end; c += WIDTH) {
        const floats own = load(weights + c), whole = load(off + c);
        const floats term = (own * own * load(apart + c) + whole * whole * load(away + c)) * splat(part);
        second += term;
        fourth += term * term;
    }
    s->overlap[at] = measure_overlap(p, s, w, r, t, mass) + alone[1] + hidden * hidden;
    s->variance[at] = total(second) + alone[0] + hidden;
    s->fourth[at] = total(fourth) + alone[1];
}
