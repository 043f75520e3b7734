/* Routed attention with a sampled rest: what is left of a node is weighed by its codes, and every sixteenth of its keys says
 * how far off that is.
 *
 * The estimate is nearly unbiased, whatever the keys are like: what codes and means say is added for all keys and taken away
 * again for the samples, in whose place their true weights and values stand. Large terms are read by themselves; so the
 * spread of the terms says how far the result may be off. The samples are met before the search, and say how light the
 * keys must be that it looks for; a query for which no search will do is told so, and finds nothing. Queries may take part
 * or not.
 */
#include "sampled.h"

/* The largest logit of everything that a query counts. */
static float highest_of(const Problem *p, const Samples *s, const Work *w, const Rest *r, int64_t t) {
    const int64_t found = w->n_found[t], samples = filled(w->nodes * s->each);
    const float *logits = w->logits + t * w->padded;
    float *own = r->rows + t * w->found_room, highest = p->lse[w->index[t]];
    if (w->limit[t] > highest) highest = w->limit[t];
    for (int64_t i = found; i < (found + WIDTH - 1) / WIDTH * WIDTH; i++) own[i] = -INFINITY;
    floats top = splat(highest);
    for (int64_t i = 0; i < found; i += WIDTH) top = larger(top, load(own + i));
    for (int64_t c = 0; c < p->sink_room; c += WIDTH) top = larger(top, load(logits + c));
    for (int64_t c = 0; c < samples; c += WIDTH) top = larger(top, load(logits + p->room + c));
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

/* Weights of a node's mean, of its samples, and `off`; rows that were read are taken out of the mean. Returns what all
 * keys that are not read weigh by their codes. */
INLINE float weigh_node(const Problem *p, const Samples *s, Work *w, Rest *r, int64_t t, int64_t node, float unit, float *rows) {
    const int64_t each = s->each, hits = w->hits[t * w->padded + p->sink_room + node], at = t * p->node_room + node;
    const float left = (float)(p->leaf - hits), used = r->used[at], unread = r->unread[at] * unit;
    const float *coded = r->coded + t * p->more + node * each;
    float *drawn = w->logits + t * w->padded + p->room + node * each, *off = r->off + t * p->more + node * each;
    const float mean = left > 0 ? unread / left : 0, stands_for = used > 0 ? left / used : 0;
    const float share = used > 0 ? 2 * mean - r->shown[at] * unit / used : mean;
    for (int64_t i = 0; i < each; i++) {
        const float counts = coded[i] >= 0 ? stands_for : 0.0f, weight = drawn[i];
        off[i] = counts * (weight - coded[i] * unit);
        drawn[i] = counts * (weight - mean);
    }
    for (int64_t i = 0; i < hits; i++) rows[i] -= share;
    w->logits[t * w->padded + p->sink_room + node] = share * (float)p->leaf;
    r->alone[at] = used > 0 ? 0 : unread;
    return unread;
}

/* One softmax over everything: leaves weights of columns and samples in `logits` and those of rows in `rows`, and what was
 * read elsewhere in the output, not yet divided by the mass that is returned. */
static float weigh_query(const Problem *p, const Samples *s, Work *w, Rest *r, int64_t t, float *highest) {
    const int64_t at = w->index[t], wide = p->value_dim, found = w->n_found[t], samples = w->nodes * s->each;
    float *logits = w->logits + t * w->padded, *own = r->rows + t * w->found_room;
    const float peak = *highest = highest_of(p, s, w, r, t), unit = expf(w->limit[t] - peak);
    const floats near = splat(expf(p->lse[at] - peak));
    float mass = near[0] + weigh_all(logits, p->sink_room, peak) + weigh_all(own, found, peak);
    weigh_all(logits + p->room, filled(samples), peak);
    for (int64_t node = 0, done = 0; node < w->nodes; node++) {
        mass += weigh_node(p, s, w, r, t, node, unit, own + done);
        done += w->hits[t * w->padded + p->sink_room + node];
    }
    float *off = r->off + t * p->more;
    floats more = splat(0);
    for (int64_t i = samples; i < filled(samples); i++) logits[p->room + i] = off[i] = 0;
    for (int64_t i = 0; i < samples; i += WIDTH) more += load(off + i);
    mass += total(more);
    if (!(mass > 0)) return 0;
    float *output = p->output + at * wide;
    for (int64_t i = 0; i < wide; i += WIDTH) store(output + i, load(output + i) * near);
    return mass;
}

/* Add the rows that were read, node by node: queries of a tile read many of the same. */
static void add_values(const Problem *p, const Work *w, const Rest *r, const float *mass) {
    int64_t done[TILE] = {0};
    for (int64_t node = 0; node < w->nodes; node++)
        for (int64_t t = 0; t < w->n; t++) {
            const int64_t hits = w->hits[t * w->padded + p->sink_room + node], at = t * w->found_room + done[t];
            if (mass[t] == 0 || hits == 0) continue;
            add_rows(p->output + w->index[t] * p->value_dim, &p->value, w->lane, w->found + at, r->rows + at, hits, p->value_dim);
            done[t] += hits;
        }
}

/* Queries that are worth it; the others keep what lies near, and nothing is known about them. */
static int64_t weigh_tile(const Problem *p, const Samples *s, Work *w, Rest *r) {
    const int64_t wide = p->value_dim, samples = w->nodes * s->each;
    const int32_t most = most_rows(p, s, w);
    int64_t read = 0;
    float mass[TILE], peak[TILE], *sums = w->moment;
    for (int64_t t = 0; t < w->n; t++) {
        read += samples;
        mass[t] = 0;
        if (w->limit[t] == INFINITY || w->n_found[t] > most) continue;
        mass[t] = weigh_query(p, s, w, r, t, peak + t);
        read += w->n_found[t];
    }
    add_values(p, w, r, mass);
    product(sums, wide, w->logits, w->padded, 1, w->n, p->column_values + w->lane * p->room * wide, wide,
            p->sink_room + w->nodes, wide, 0);
    product(sums, wide, w->logits + p->room, w->padded, 1, w->n, s->values + w->lane * p->more * wide, wide, samples, wide, 1);
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
        prescore_measure(p, s, w, r, t, mass[t]);
    }
    return read;
}

/* By how much sums of codes are off: a key's number by a uniform part of a unit. */
static void doubt_codes(const Problem *p, const Work *w, Rest *r) {
    for (int64_t t = 0; t < w->n; t++)
        for (int half = 0; half < 2; half++) {
            const float *part = w->query + t * p->dim + half * p->dim / 2;
            float square = 0;
            for (int64_t i = 0; i < p->dim / 2; i++) square += part[i] * part[i];
            r->uncertain[2 * t + half] = sqrtf(square / 12.0f) / w->code_scale[t];
        }
}

/* Returns how many rows were read, samples included. */
static int64_t run_tile(const Problem *p, const Samples *s, Work *w, Rest *r) {
    const int64_t dim = p->dim, samples = w->nodes * s->each;
    prescore_take_queries(p, w);
    doubt_codes(p, w, r);
    prescore_begin_tile(p, w);
    const float *columns = s->columns + w->lane * p->more * dim;
    for (int64_t b = 0; b < filled(samples) / 16; b++)
        product(w->logits + p->room + 16 * b, w->padded, w->query, dim, 1, w->n, columns + b * dim * 16, 16, dim, 16, 0);
    for (int64_t t = 0; t < w->n; t++) /* what lies behind belongs to nodes that are not seen */
        for (int64_t i = samples; i < filled(samples); i++) w->logits[t * w->padded + p->room + i] = -INFINITY;
    prescore_aim(p, s, w, r);
    prescore_search_all(p, s, w, r);
    return weigh_tile(p, s, w, r);
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

static Rest *new_rest(const Problem *p, const Work *w) {
    const int64_t tile = p->n_query < TILE ? p->n_query : TILE;
    const size_t samples = (size_t)(tile * p->more), nodes = (size_t)(tile * p->node_room);
    const size_t rows = (size_t)(tile * w->found_room);
    Rest *r = malloc(sizeof(Rest) + sizeof(float) * (3 * samples + 4 * nodes + rows + 16));
    if (!r) return NULL;
    r->drawn = (float *)(r + 1);
    r->coded = r->drawn + samples;
    r->off = r->coded + samples;
    r->unread = r->off + samples;
    r->shown = r->unread + nodes;
    r->used = r->shown + nodes;
    r->alone = r->used + nodes;
    r->rows = r->alone + nodes;
    return r;
}

/* Returns 0, or 1 where there was no memory. */
PRESCORE_EXPORT int prescore_routed_sampled(const Problem *p, const Samples *s) {
    const int64_t span = 8 * TILE, spans = (p->n_query + span - 1) / span;
    int failed = 0;
#pragma omp parallel num_threads(prescore_threads()) if (spans * p->lanes > 1)
    {
        Work *w = prescore_new_work(p, NULL);
        Rest *r = w ? new_rest(p, w) : NULL;
        int64_t read = 0;
        if (!r) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t job = 0; job < spans * p->lanes; job++) {
            const int64_t lane = job % p->lanes, begin = (spans - 1 - job / p->lanes) * span;
            const int64_t stop = begin + span < p->n_query ? begin + span : p->n_query;
            for (int64_t done = begin; r && done < stop;) {
                done = next_active(p, s, w, lane, done, stop);
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
