/* Routed attention with a sampled rest: what is left of a node is estimated from every sixteenth of its keys.
 *
 * The estimate is unbiased, whatever the keys are like, and its terms are small, because large ones are read by
 * themselves; so the spread of the terms says how far the result may be off. The samples are met before the search, and
 * say how light the keys must be that it looks for; a query for which no search will do is told so, and finds nothing.
 * Queries may take part or not.
 */
#include "routed.h"

#define MOST_AIMS 16
#define SHADOWS 8 /* random projections of values */

/* Must equal `Samples` in routed/compiled/buffers.py. */
typedef struct {
    const uint8_t *active;      /* [lanes, n_query]: queries that take part */
    const float *aim;           /* [lanes, n_query]: the limit to search with; inf = the samples choose it */
    const int32_t *place;       /* [node_room]: which key of each sixteen */
    const float *columns;       /* [lanes, more / 16, dim, 16] keys */
    const float *values;        /* [lanes, more, value_dim] */
    const float *value_columns; /* [lanes, more / 16, value_dim, 16] */
    const float *norms;         /* [lanes, more]: squares of the values' lengths */
    const float *coarse;        /* [lanes, node_room, 2]: what a unit of the codes of the nodes up to here is worth */
    const float *signs;         /* [SHADOWS, value_dim]: what values are projected on */
    const float *shadows;       /* [lanes, more / 16, SHADOWS, 16]: the values' projections */
    int64_t each, stride;       /* samples of a node, keys that each stands for */
    int64_t aims;               /* limits to choose from, each twice as far below what is known */
    float allowed;              /* square of the relative error that is aimed at */
    float most_rows;            /* share of the keys in nodes from which on single rows are not worth reading */
    float most_off;             /* deviation of coded logits from which on no search is trusted */
    float *variance, *fourth;   /* [lanes, n_query]: sums of squares of the terms' lengths, and of their squares */
    float *overlap;             /* [lanes, n_query]: sum of the squares of all products of two terms, estimated */
    uint8_t *further;           /* [lanes, n_query]: whether the limit is below the first one, or infinite */
} Samples;

/* What a thread needs besides. */
typedef struct {
    float *weights; /* [TILE, sink_room + more]: of sinks and samples, before any search */
    float *along;   /* [TILE, more]: products of the samples' values with an output */
    float outputs[TILE * MOST_DIM], square[TILE], lse[TILE];
} Guess;

INLINE int64_t filled(int64_t samples) { return (samples + 15) / 16 * 16; }

/* Results as if nothing were to be found: near keys, sinks and samples. */
static void guess_outputs(const Problem *p, const Samples *s, Work *w, Guess *g) {
    const int64_t samples = w->nodes * s->each, end = filled(samples), step = p->sink_room + p->more, wide = p->value_dim;
    const floats stands_for = splat(logf((float)s->stride));
    for (int64_t t = 0; t < w->n; t++) {
        const float *logits = w->logits + t * w->padded, near = p->lse[w->index[t]];
        float *own = g->weights + t * step;
        floats top = splat(near), mass = splat(0);
        for (int64_t i = samples; i < end; i++) w->logits[t * w->padded + p->room + i] = -INFINITY;
        for (int64_t c = 0; c < p->sink_room; c += WIDTH) top = larger(top, load(logits + c));
        for (int64_t c = 0; c < end; c += WIDTH) top = larger(top, load(logits + p->room + c) + stands_for);
        const float peak = largest(top);
        for (int64_t c = 0; c < p->sink_room; c += WIDTH) {
            const floats x = vexp(load(logits + c) - splat(peak));
            store(own + c, x);
            mass += x;
        }
        for (int64_t c = 0; c < end; c += WIDTH) {
            const floats x = vexp(load(logits + p->room + c) + stands_for - splat(peak));
            store(own + p->sink_room + c, x);
            mass += x;
        }
        const float known = expf(near - peak), all = total(mass) + known;
        g->lse[t] = peak + logf(all);
        const floats part = splat(1.0f / all), share = splat(known / all);
        for (int64_t c = 0; c < p->sink_room + end; c += WIDTH) store(own + c, load(own + c) * part);
        const float *output = p->output + w->index[t] * wide;
        for (int64_t i = 0; i < wide; i += WIDTH) store(g->outputs + t * wide + i, load(output + i) * share);
    }
    const float *values = s->values + w->lane * p->more * wide;
    product(g->outputs, wide, g->weights, step, 1, w->n, p->column_values + w->lane * p->room * wide, wide, p->sinks, wide, 1);
    product(g->outputs, wide, g->weights + p->sink_room, step, 1, w->n, values, wide, samples, wide, 1);
}

/* Products of outputs with the values of all samples, and the squares of the outputs' lengths. */
static void measure_away(const Problem *p, const Samples *s, Work *w, Guess *g) {
    const int64_t wide = p->value_dim, blocks = p->more / 16, used = filled(w->nodes * s->each) / 16;
    const float *across = s->value_columns + w->lane * blocks * wide * 16;
    for (int64_t b = 0; b < used; b++)
        product(g->along + 16 * b, p->more, g->outputs, wide, 1, w->n, across + b * wide * 16, 16, wide, 16, 0);
    for (int64_t t = 0; t < w->n; t++) {
        g->square[t] = dot(g->outputs + t * wide, g->outputs + t * wide, wide);
        /* what lies behind belongs to nodes that are not seen */
        for (int64_t i = w->nodes * s->each; i < 16 * used; i++) g->along[t * p->more + i] = INFINITY;
    }
}

INLINE floats away_from(const Problem *p, const Samples *s, const Work *w, const Guess *g, int64_t t, int64_t c) {
    const floats apart = load(s->norms + w->lane * p->more + c) - splat(2.0f) * load(g->along + t * p->more + c);
    floats away = larger(apart + splat(g->square[t]), splat(0.0f));
    const int64_t known = w->nodes * s->each - c; /* behind them lie samples of nodes that the query does not see */
    for (int64_t i = known < 0 ? 0 : known; i < WIDTH; i++) away[i] = 0;
    return away;
}

/* By how much coded logits are off. */
static float code_error(const Problem *p, const Samples *s, const Work *w, int64_t t) {
    const float *coarse = s->coarse + (w->lane * p->node_room + w->nodes - 1) * 2;
    float square = 0;
    for (int half = 0; half < 2; half++) {
        const float off = w->lift[2 * t + half] / p->margin * w->code_scale[t] * coarse[half];
        square += off * off;
    }
    return sqrtf(square);
}

/* The highest limit under which the samples that stay below it spread little enough; inf where none does, or where so
 * many keys would be read that reading everything is faster. */
static float choose_limit(const Problem *p, const Samples *s, const Work *w, const Guess *g, int64_t t) {
    if (code_error(p, s, w, t) > s->most_off) return INFINITY;
    const int64_t end = filled(w->nodes * s->each), step = p->sink_room + p->more;
    const float *logits = w->logits + t * w->padded + p->room, *weights = g->weights + t * step + p->sink_room;
    floats spread[MOST_AIMS], above[MOST_AIMS], apart = splat(0);
    for (int j = 0; j < s->aims; j++) spread[j] = above[j] = splat(0);
    for (int64_t c = 0; c < end; c += WIDTH) {
        const floats away = away_from(p, s, w, g, t, c), weight = load(weights + c), x = load(logits + c);
        const floats term = weight * weight * away;
        apart += away;
        for (int j = 0; j < s->aims; j++) {
            const ints read = x >= splat(w->limit[t] - (float)j * 0.69314718f);
            spread[j] += choose(read, splat(0.0f), term);
            above[j] += choose(read, splat(1.0f), splat(0.0f));
        }
    }
    const float mean = total(apart) / (float)(w->nodes * s->each), stands_for = (float)s->stride;
    for (int j = 0; j < s->aims; j++) {
        const float limit = w->limit[t] - (float)j * 0.69314718f, unseen = expf(limit - g->lse[t]);
        if (total(above[j]) > s->most_rows * (float)(w->nodes * s->each)) return INFINITY;
        if (total(spread[j]) + stands_for * unseen * unseen * mean <= s->allowed * g->square[t]) return limit;
    }
    return INFINITY;
}

/* Which limit each query searches with. */
static void take_aim(const Problem *p, const Samples *s, Work *w, Guess *g) {
    int open = 0;
    for (int64_t t = 0; t < w->n; t++) {
        prescore_set_limit(p, w, t);
        open |= s->aim[w->index[t]] == INFINITY;
    }
    if (open) {
        guess_outputs(p, s, w, g);
        measure_away(p, s, w, g);
    }
    for (int64_t t = 0; t < w->n; t++) {
        const float aim = s->aim[w->index[t]], limit = aim == INFINITY ? choose_limit(p, s, w, g, t) : aim;
        s->further[w->index[t]] = limit != w->limit[t];
        p->limit[w->index[t]] = w->limit[t] = limit;
    }
}

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
    for (int64_t i = w->nodes * s->each; i < filled(w->nodes * s->each); i++) samples[i] = -INFINITY;
}

/* The mean square of the products of two different projections of the terms' second moment: for random signs it is the
 * sum of the squares of all products of two terms, which says in how many directions they point. */
static float measure_overlap(const Problem *p, const Samples *s, const Work *w, const Guess *g, int64_t t, float mass) {
    const int64_t wide = p->value_dim, end = filled(w->nodes * s->each);
    const float *shadows = s->shadows + w->lane * p->more * SHADOWS, *weights = w->logits + t * w->padded + p->room;
    float own[SHADOWS], sum = 0;
    floats pairs[SHADOWS][SHADOWS];
    for (int a = 0; a < SHADOWS; a++) {
        own[a] = dot(s->signs + a * wide, g->outputs + t * wide, wide);
        for (int b = 0; b < a; b++) pairs[a][b] = splat(0);
    }
    for (int64_t c = 0; c < end; c += WIDTH) {
        const float *block = shadows + c / 16 * 16 * SHADOWS + c % 16;
        const floats weight = load(weights + c) * splat(1.0f / mass);
        floats term[SHADOWS];
        for (int a = 0; a < SHADOWS; a++) term[a] = weight * (load(block + 16 * a) - splat(own[a]));
        for (int a = 0; a < SHADOWS; a++)
            for (int b = 0; b < a; b++) pairs[a][b] += term[a] * term[b];
    }
    for (int a = 0; a < SHADOWS; a++)
        for (int b = 0; b < a; b++) sum += total(pairs[a][b]) * total(pairs[a][b]);
    return sum / (SHADOWS * (SHADOWS - 1) / 2);
}

/* How far the terms spread, from weights that are not yet divided by `mass`. */
static void measure_spread(const Problem *p, const Samples *s, Work *w, const Guess *g, int64_t t, float mass) {
    const int64_t at = w->index[t], wide = p->value_dim, end = filled(w->nodes * s->each);
    const float *output = g->outputs + t * wide, *weights = w->logits + t * w->padded;
    floats second = splat(0), fourth = splat(0), apart = splat(0);
    for (int64_t c = 0; c < end; c += WIDTH) {
        const floats weight = load(weights + p->room + c) * splat(1.0f / mass), away = away_from(p, s, w, g, t, c);
        const floats term = weight * weight * away;
        second += term;
        fourth += term * term;
        apart += away;
    }
    /* a key at the limit that no sample shows: what it may weigh, drawn as often as any other; nothing that was estimated */
    const float unseen = expf(w->limit[t] - p->lse[at]);
    const float hidden = (float)s->stride * unseen * unseen * total(apart) / (float)(w->nodes * s->each);
    float all = total(second) + hidden, squares = total(fourth);
    float overlap = measure_overlap(p, s, w, g, t, mass) + hidden * hidden;
    for (int64_t node = 0; node < w->nodes; node++) {
        const float weight = weights[p->sink_room + node] / mass;
        if (weight <= 0) continue;
        const float *mean = p->column_values + (w->lane * p->room + p->sink_room + node) * wide;
        const float away = dot(mean, mean, wide) - 2 * dot(mean, output, wide) + g->square[t];
        const float term = weight * weight * (away > 0 ? away : 0);
        all += term;
        squares += term * term;
        overlap += term * term;
    }
    s->overlap[at] = overlap;
    s->variance[at] = all;
    s->fourth[at] = squares;
}

/* One softmax for every query that is worth it; the others keep what lies near, and nothing is known about them. */
static int64_t weigh_tile(const Problem *p, const Samples *s, Work *w, Guess *g) {
    const int64_t wide = p->value_dim, samples = w->nodes * s->each;
    const int32_t most = (int32_t)(s->most_rows * (float)(w->nodes * p->leaf));
    int64_t read = 0;
    float mass[TILE], peak[TILE], *sums = w->moment;
    memset(w->drift, 0, sizeof(float) * (size_t)(w->n * wide));
    w->columns = p->room + filled(samples);
    for (int64_t t = 0; t < w->n; t++) {
        read += samples;
        mass[t] = 0;
        memset(w->move + t * w->padded, 0, sizeof(float) * (size_t)w->columns);
        if (w->limit[t] == INFINITY || w->n_found[t] > most) continue;
        count_samples(p, s, w, t);
        mass[t] = prescore_read_rows(p, w, t, peak + t);
        read += w->n_found[t];
    }
    product(sums, wide, w->logits, w->padded, 1, w->n, p->column_values + w->lane * p->room * wide, wide,
            p->sink_room + w->nodes, wide, 0);
    product(sums, wide, w->logits + p->room, w->padded, 1, w->n, s->values + w->lane * p->more * wide, wide, samples, wide, 1);
    for (int64_t t = 0; t < w->n; t++) {
        if (mass[t] == 0) continue;
        float *output = p->output + w->index[t] * wide;
        const floats part = splat(1.0f / mass[t]);
        for (int64_t i = 0; i < wide; i += WIDTH) {
            floats x = (load(output + i) + load(sums + t * wide + i)) * part;
            store(output + i, x);
            store(g->outputs + t * wide + i, x);
        }
        p->lse[w->index[t]] = peak[t] + logf(mass[t]);
    }
    measure_away(p, s, w, g);
    for (int64_t t = 0; t < w->n; t++) {
        if (mass[t] == 0)
            s->variance[w->index[t]] = s->fourth[w->index[t]] = s->overlap[w->index[t]] = INFINITY;
        else
            measure_spread(p, s, w, g, t, mass[t]);
    }
    return read;
}

/* Returns how many rows were read, samples included. */
static int64_t run_tile(const Problem *p, const Samples *s, Work *w, Guess *g) {
    const int64_t dim = p->dim, blocks = p->more / 16;
    prescore_take_queries(p, w);
    prescore_begin_tile(p, w);
    const float *columns = s->columns + w->lane * blocks * dim * 16;
    for (int64_t b = 0; b < filled(w->nodes * s->each) / 16; b++)
        product(w->logits + p->room + 16 * b, w->padded, w->query, dim, 1, w->n, columns + b * dim * 16, 16, dim, 16, 0);
    take_aim(p, s, w, g);
    prescore_find_rows(p, w);
    return weigh_tile(p, s, w, g);
}

/* The next queries of a lane that take part and see the same nodes; returns where to go on. */
static int64_t next_active(const Problem *p, const Samples *s, Work *w, int64_t lane, int64_t begin, int64_t stop) {
    const uint8_t *active = s->active + lane * p->n_query;
    w->lane = lane;
    w->n = 0;
    for (; begin < stop && w->n < TILE; begin++) {
        const int32_t visible = p->visible[place_of(p, lane, begin)];
        if (!active[begin] || visible == 0) continue;
        if (w->n && visible != w->nodes) break;
        w->nodes = visible;
        w->index[w->n++] = lane * p->n_query + begin;
    }
    w->columns = (p->sink_room + (w->n ? w->nodes : 0) + 15) / 16 * 16;
    return begin;
}

static Guess *new_guess(const Problem *p) {
    const size_t weights = (size_t)(TILE * (p->sink_room + p->more)), along = (size_t)(TILE * p->more);
    Guess *g = malloc(sizeof(Guess) + sizeof(float) * (weights + along + 16));
    if (!g) return NULL;
    g->weights = (float *)(g + 1);
    g->along = g->weights + weights;
    return g;
}

/* Returns 0, or 1 where there was no memory. */
PRESCORE_EXPORT int prescore_routed_sampled(const Problem *p, const Samples *s) {
    const int64_t span = 8 * TILE, spans = (p->n_query + span - 1) / span;
    int failed = 0;
#pragma omp parallel num_threads(prescore_threads()) if (spans * p->lanes > 1)
    {
        Work *w = prescore_new_work(p, NULL);
        Guess *g = w ? new_guess(p) : NULL;
        int64_t read = 0;
        if (!g) {
#pragma omp atomic write
            failed = 1;
        } else {
            w->place = s->place;
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t job = 0; job < spans * p->lanes; job++) {
            const int64_t lane = job % p->lanes, begin = (spans - 1 - job / p->lanes) * span;
            const int64_t stop = begin + span < p->n_query ? begin + span : p->n_query;
            for (int64_t done = begin; g && done < stop;) {
                done = next_active(p, s, w, lane, done, stop);
                if (w->n) read += run_tile(p, s, w, g);
            }
        }
        free(g);
        free(w);
#pragma omp atomic
        p->counts[1] += read;
    }
    return failed;
}
