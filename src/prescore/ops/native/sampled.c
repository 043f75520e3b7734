/* Routed attention with a sampled rest: what is left of a node is estimated from every sixteenth of its keys.
 *
 * The estimate is unbiased, whatever the keys are like, and its terms are small, because large ones are read by
 * themselves; so the spread of the terms says how far the result may be off. Queries may take part or not.
 */
#include "routed.h"

/* Must equal `Samples` in routed/compiled/buffers.py. */
typedef struct {
    const uint8_t *active;      /* [lanes, n_query]: queries that take part */
    const int32_t *place;       /* [node_room]: which key of each sixteen */
    const float *columns;       /* [lanes, more / 16, dim, 16] keys */
    const float *values;        /* [lanes, more, value_dim] */
    const float *value_columns; /* [lanes, more / 16, value_dim, 16] */
    const float *norms;         /* [lanes, more]: squares of the values' lengths */
    int64_t each, stride;       /* samples of a node, keys that each stands for */
    float *variance, *fourth;   /* [lanes, n_query]: sums of squares of the terms' lengths, and of their squares */
} Samples;

/* Logits of the samples of a query, each counting as many keys as it stands for; a node none of whose samples is left
 * keeps its mean. */
static void count_samples(const Problem *p, const Samples *s, Work *w, int64_t t) {
    float *nodes = w->logits + t * w->padded + p->sink_room, *samples = w->logits + t * w->padded + p->room;
    const int32_t *hits = w->hits + t * w->padded + p->sink_room, *read = w->sampled + t * w->padded + p->sink_room;
    for (int64_t node = 0; node < w->nodes; node++) {
        const float left = (float)(p->leaf - hits[node]);
        const int64_t used = s->each - __builtin_popcount((unsigned)read[node]);
        float *own = samples + node * s->each;
        if (left > 0 && used == 0)
            nodes[node] += logf(left);
        else
            nodes[node] = -INFINITY;
        const float weight = left > 0 && used ? logf(left / (float)used) : -INFINITY;
        for (int64_t i = 0; i < s->each; i++) own[i] = (read[node] >> i) & 1 ? -INFINITY : own[i] + weight;
    }
    for (int64_t i = p->sink_room + w->nodes; i < p->room; i++) w->logits[t * w->padded + i] = -INFINITY;
    for (int64_t i = w->nodes * s->each; i < (w->nodes * s->each + 15) / 16 * 16; i++) samples[i] = -INFINITY;
}

/* Squares of the distances between some values and an output, given their norms and products with it: summed. */
static float sum_apart(const float *norms, const float *along, float square, int64_t n) {
    floats sum = splat(0);
    int64_t c = 0;
    for (; c + WIDTH <= n; c += WIDTH)
        sum += larger(load(norms + c) - splat(2.0f) * load(along + c) + splat(square), splat(0.0f));
    float all = total(sum);
    for (; c < n; c++) { /* behind them lie samples of nodes that the query does not see */
        const float away = norms[c] - 2.0f * along[c] + square;
        all += away > 0 ? away : 0;
    }
    return all;
}

/* How far the terms spread, from weights that are not yet divided by `mass`. */
static void measure_spread(const Problem *p, const Samples *s, Work *w, int64_t t, const float *along, float mass) {
    const int64_t at = w->index[t], wide = p->value_dim, n = w->nodes * s->each;
    const float *output = p->output + at * wide, square = dot(output, output, wide);
    const float *weights = w->logits + t * w->padded, *norms = s->norms + w->lane * p->more;
    floats second = splat(0), fourth = splat(0);
    for (int64_t c = 0; c < n; c += WIDTH) { /* those behind the last weigh nothing */
        const floats weight = load(weights + p->room + c) * splat(1.0f / mass);
        const floats away = load(norms + c) - splat(2.0f) * load(along + c) + splat(square);
        const floats term = weight * weight * larger(away, splat(0.0f));
        second += term;
        fourth += term * term;
    }
    /* a key at the limit that no sample shows: what it may weigh, drawn as often as any other */
    const float unseen = expf(w->limit[t] - p->lse[at]);
    const float hidden = (float)s->stride * unseen * unseen * sum_apart(norms, along, square, n) / (float)n;
    float all = total(second) + hidden, squares = total(fourth) + hidden * hidden;
    for (int64_t node = 0; node < w->nodes; node++) {
        const float weight = weights[p->sink_room + node] / mass;
        if (weight <= 0) continue;
        const float *mean = p->column_values + (w->lane * p->room + p->sink_room + node) * wide;
        const float away = dot(mean, mean, wide) - 2 * dot(mean, output, wide) + square;
        const float term = weight * weight * (away > 0 ? away : 0);
        all += term;
        squares += term * term;
    }
    s->variance[at] = all;
    s->fourth[at] = squares;
}

static int64_t run_tile(const Problem *p, const Samples *s, Work *w, float *along) {
    const int64_t dim = p->dim, wide = p->value_dim, samples = w->nodes * s->each, blocks = p->more / 16;
    int64_t read = 0;
    prescore_begin_tile(p, w);
    for (int64_t t = 0; t < w->n; t++)
        if (p->first) prescore_read_fixed(p, w, t);
    for (int64_t t = 0; t < w->n; t++) prescore_set_limit(p, w, t);
    prescore_find_rows(p, w);
    const float *columns = s->columns + w->lane * blocks * dim * 16, *across = s->value_columns + w->lane * blocks * wide * 16;
    for (int64_t b = 0; b < (samples + 15) / 16; b++)
        product(w->logits + p->room + 16 * b, w->padded, w->query, dim, 1, w->n, columns + b * dim * 16, 16, dim, 16, 0);
    memset(w->drift, 0, sizeof(float) * (size_t)(w->n * wide));
    w->columns = p->room + (samples + 15) / 16 * 16;
    float mass[TILE], peak[TILE], *sums = w->moment;
    for (int64_t t = 0; t < w->n; t++) {
        memset(w->move + t * w->padded, 0, sizeof(float) * (size_t)w->columns);
        count_samples(p, s, w, t);
        mass[t] = prescore_read_rows(p, w, t, peak + t);
        read += w->n_found[t];
    }
    product(sums, wide, w->logits, w->padded, 1, w->n, p->column_values + w->lane * p->room * wide, wide,
            p->sink_room + w->nodes, wide, 0);
    product(sums, wide, w->logits + p->room, w->padded, 1, w->n, s->values + w->lane * p->more * wide, wide, samples, wide, 1);
    float outputs[TILE * MOST_DIM];
    for (int64_t t = 0; t < w->n; t++) {
        float *output = p->output + w->index[t] * wide;
        const floats part = splat(1.0f / mass[t]);
        for (int64_t i = 0; i < wide; i += WIDTH) {
            floats x = (load(output + i) + load(sums + t * wide + i)) * part;
            store(output + i, x);
            store(outputs + t * wide + i, x);
        }
        p->lse[w->index[t]] = peak[t] + logf(mass[t]);
    }
    for (int64_t b = 0; b < (samples + 15) / 16; b++)
        product(along + 16 * b, p->more, outputs, wide, 1, w->n, across + b * wide * 16, 16, wide, 16, 0);
    for (int64_t t = 0; t < w->n; t++) measure_spread(p, s, w, t, along + t * p->more, mass[t]);
    return read;
}

/* The next queries of a lane that take part and see the same nodes; returns where to go on. */
static int64_t next_active(const Problem *p, const Samples *s, Work *w, int64_t lane, int64_t begin, int64_t stop) {
    const int32_t *visible = p->visible + lane * p->n_query;
    const uint8_t *active = s->active + lane * p->n_query;
    w->lane = lane;
    w->n = 0;
    for (; begin < stop && w->n < TILE; begin++) {
        if (!active[begin] || visible[begin] == 0) continue;
        if (w->n && visible[begin] != w->nodes) break;
        w->nodes = visible[begin];
        w->index[w->n++] = lane * p->n_query + begin;
    }
    w->columns = (p->sink_room + (w->n ? w->nodes : 0) + 15) / 16 * 16;
    return begin;
}

/* Returns 0, or 1 where there was no memory. */
PRESCORE_EXPORT int prescore_routed_sampled(const Problem *p, const Samples *s) {
    const int64_t span = 8 * TILE, spans = (p->n_query + span - 1) / span;
    int failed = 0;
#pragma omp parallel num_threads(prescore_threads()) if (spans * p->lanes > 1)
    {
        Work *w = prescore_new_work(p);
        float *along = w ? malloc(sizeof(float) * (size_t)(TILE * p->more + 16)) : NULL;
        int64_t read = 0;
        if (!along) {
#pragma omp atomic write
            failed = 1;
        } else {
            w->place = s->place;
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t job = 0; job < spans * p->lanes; job++) {
            const int64_t lane = job % p->lanes, begin = (spans - 1 - job / p->lanes) * span;
            const int64_t stop = begin + span < p->n_query ? begin + span : p->n_query;
            for (int64_t done = begin; along && done < stop;) {
                done = next_active(p, s, w, lane, done, stop);
                if (w->n) read += run_tile(p, s, w, along);
            }
        }
        free(along);
        free(w);
#pragma omp atomic
        p->counts[1] += read;
    }
    return failed;
}
