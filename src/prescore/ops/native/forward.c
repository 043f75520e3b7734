/* Routed attention, forward.
 *
 * For each query: read what lies near; score sinks and nodes; read the rows that may matter by themselves; let a stand-in
 * carry what is left of each node. Results are folded into the query's running output and log-sum-exp.
 */
#include "routed.h"
#include "stand_ins.h"

#define AHEAD 16 /* rows that are fetched before they are read */

static void *aligned(char **at, size_t bytes) {
    void *here = *at;
    *at += (bytes + 63) / 64 * 64;
    return here;
}

/* A thread's memory; NULL where there is none. */
Work *prescore_new_work(const Problem *p, const Near *near) {
    const int64_t padded = p->room + p->more + 16, found = p->node_room * p->leaf + 16;
    const int64_t tile = p->n_query < TILE ? p->n_query : TILE;
    const size_t number = sizeof(float);
    const size_t sizes = sizeof(Work) + number * (size_t)(3 * tile * padded + found + tile * found) + 64 * 8;
    char *at = aligned_alloc(64, (sizes + 63) / 64 * 64);
    if (!at) return NULL;
    Work *w = aligned(&at, sizeof(Work));
    w->padded = padded;
    w->found_room = found;
    w->logits = aligned(&at, number * (size_t)(tile * padded));
    w->move = aligned(&at, number * (size_t)(tile * padded));
    w->hits = aligned(&at, number * (size_t)(tile * padded));
    w->near = near;
    w->row_logits = aligned(&at, number * (size_t)found);
    w->found = aligned(&at, number * (size_t)(tile * found));
    return w;
}

/* Logits of stand-ins from those of the nodes' means, and how far their values move: as if logits behind each were
 * normal around it, those from the limit on being read by themselves. */
void prescore_correct_columns(const Problem *p, Work *w, int64_t t) {
    const float s = w->spread[t];
    const floats one = splat(1.0f), limit = splat(w->limit[t]), part = splat(1.0f / s);
    float *logits = w->logits + t * w->padded, *moves = w->move + t * w->padded;
    const int32_t *hits = w->hits + t * w->padded;
    memset(moves, 0, sizeof(float) * (size_t)p->sink_room);
    for (int64_t c = p->sink_room; c < w->columns; c += WIDTH) {
        floats x = load(logits + c), gain, move;
        correct((limit - x) * part, s, &gain, &move);
        store(moves + c, move);
        floats left = splat((float)p->leaf) - __builtin_convertvector(*(const ints *)(hits + c), floats);
        x = x + gain + vlog(larger(left, one));
        store(logits + c, choose(left > splat(0.0f), x, splat(-INFINITY)));
    }
    for (int64_t c = p->sink_room + w->nodes; c < w->columns; c++) logits[c] = -INFINITY;
}

/* A query in whole numbers of six bits, and the sums of both halves. */
static void encode_query(Work *w, int64_t t, int64_t dim, float unit) {
    const float *own = w->query + t * dim;
    int8_t *codes = w->code + t * dim;
    int32_t sums[2] = {0, 0};
    for (int64_t i = 0; i < dim; i += WIDTH) { /* 1.5 * 2^23 rounds to an integer */
        const ints code = (ints)(load(own + i) / splat(unit) + splat(12582912.0f)) - (ints)splat(12582912.0f);
        const bytes narrow = __builtin_convertvector(code, bytes);
        memcpy(codes + i, &narrow, sizeof narrow);
    }
    for (int64_t i = 0; i < dim; i++) sums[i >= dim / 2] += codes[i];
    memcpy(w->code_sum + 2 * t, sums, sizeof sums);
}

void prescore_take_queries(const Problem *p, Work *w) {
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
        w->code_scale[t] = unit;
        encode_query(w, t, dim, unit);
    }
}

/* Logits of the columns, and the spread and drift of each query. */
void prescore_begin_tile(const Problem *p, Work *w) {
    const int64_t dim = p->dim, wide = p->value_dim, blocks = p->room / 16;
    const float *columns = p->columns + w->lane * blocks * dim * 16;
    for (int64_t b = 0; b < w->columns / 16; b++)
        product(w->logits + 16 * b, w->padded, w->query, dim, 1, w->n, columns + b * dim * 16, 16, dim, 16, 0);
    for (int64_t t = 0; t < w->n; t++) {
        float *logits = w->logits + t * w->padded;
        for (int64_t i = p->sinks; i < p->sink_room; i++) logits[i] = -INFINITY;
        for (int64_t i = p->sink_room + w->nodes; i < w->columns; i++) logits[i] = -INFINITY;
    }
    const int64_t pool = w->lane * p->pools + (w->nodes - 1) / p->nodes_per_pool;
    product(w->moment, dim, w->query, dim, 1, w->n, p->spread + pool * dim * dim, dim, dim, dim, 0);
    product(w->drift, wide, w->query, dim, 1, w->n, p->drift + pool * dim * wide, wide, dim, wide, 0);
    for (int64_t t = 0; t < w->n; t++) {
        const float square = dot(w->query + t * dim, w->moment + t * dim, dim), most = MOST_SPREAD * MOST_SPREAD;
        const float s = sqrtf(square < 0 ? 0 : square <= most ? square : most); /* what is no number is large */
        w->spread[t] = s > LEAST_SPREAD ? s : LEAST_SPREAD;
    }
}

/* From which logit on keys are read by themselves: a share of all that is known before any search. Sinks count little. */
void prescore_set_limit(const Problem *p, Work *w, int64_t t) {
    const float *logits = w->logits + t * w->padded, s = w->spread[t], elsewhere = p->lse[w->index[t]];
    const float gain = 0.5f * s * s < p->most_known_gain ? 0.5f * s * s : p->most_known_gain;
    const floats behind = splat(logf((float)p->leaf) + gain), part = splat(p->log_sink_part);
    floats top = splat(elsewhere), sum = splat(0);
    for (int64_t c = 0; c < p->sink_room; c += WIDTH) top = larger(top, load(logits + c) + part);
    for (int64_t c = p->sink_room; c < w->columns; c += WIDTH) top = larger(top, load(logits + c) + behind);
    const floats peak = splat(largest(top));
    for (int64_t c = 0; c < p->sink_room; c += WIDTH) sum += vexp(load(logits + c) + part - peak);
    for (int64_t c = p->sink_room; c < w->columns; c += WIDTH) sum += vexp(load(logits + c) + behind - peak);
    w->limit[t] = peak[0] + logf(total(sum) + expf(elsewhere - peak[0])) - p->log_share;
    p->limit[w->index[t]] = w->limit[t];
}

/* Rows lie anywhere: the next ones, also those of the next query, are on their way while some are read. */
static void fetch_rows(const Problem *p, const Work *w, const int32_t *rows, int64_t first, int64_t stop) {
    for (int64_t i = first; i < first + AHEAD && i < stop; i++) {
        fetch_row(&p->key, row_offset(&p->key, w->lane, rows[i]), p->dim);
        fetch_row(&p->value, row_offset(&p->value, w->lane, rows[i]), p->value_dim);
    }
}

/* One softmax over what was read elsewhere, the rows found and the columns: leaves weights of columns in `logits`, and
 * everything else in the output, not yet divided by the mass that is returned. */
float prescore_read_rows(const Problem *p, Work *w, int64_t t, float *highest) {
    const int64_t at = w->index[t], wide = p->value_dim, found = w->n_found[t];
    const int32_t *rows = w->found + t * w->found_room;
    float *logits = w->logits + t * w->padded, *own = w->row_logits, peak = p->lse[at];
    floats top = splat(peak);
    for (int64_t i = 0; i < found; i += AHEAD) {
        fetch_rows(p, w, rows, i + AHEAD, found);
        row_dots(own + i, &p->key, w->lane, rows + i, found - i < AHEAD ? found - i : AHEAD, w->query + t * p->dim, p->dim);
    }
    for (int64_t i = found; i < (found + WIDTH - 1) / WIDTH * WIDTH; i++) own[i] = -INFINITY;
    for (int64_t i = 0; i < found; i += WIDTH) top = larger(top, load(own + i));
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
    for (int64_t i = 0; i < found; i += WIDTH) {
        floats x = vexp(load(own + i) - splat(peak));
        store(own + i, x);
        mass += x;
    }
    float *output = p->output + at * wide, sum[MOST_DIM];
    const floats near = splat(expf(p->lse[at] - peak)), along = splat(total(moved));
    for (int64_t i = 0; i < wide; i += WIDTH)
        store(sum + i, load(output + i) * near + load(w->drift + t * wide + i) * along);
    add_rows(sum, &p->value, w->lane, rows, own, found, wide);
    memcpy(output, sum, sizeof(float) * (size_t)wide);
    return total(mass) + near[0];
}

static int64_t run_tile(const Problem *p, Work *w) {
    const int64_t wide = p->value_dim;
    int64_t read = 0;
    prescore_take_queries(p, w);
    prescore_read_near(p, w);
    if (w->nodes == 0) return 0; /* nothing is far, and sinks lie near */
    prescore_begin_tile(p, w);
    for (int64_t t = 0; t < w->n; t++) prescore_set_limit(p, w, t);
    prescore_find_rows(p, w);
    for (int64_t t = 0; t < w->n; t++) prescore_correct_columns(p, w, t);
    float mass[TILE], peak[TILE];
    for (int64_t t = 0; t < w->n; t++) {
        if (t + 1 < w->n) fetch_rows(p, w, w->found + (t + 1) * w->found_room, 0, w->n_found[t + 1]);
        mass[t] = prescore_read_rows(p, w, t, peak + t);
        read += w->n_found[t];
    }
    float *sums = w->moment; /* done with: at most MOST_DIM numbers a query */
    product(sums, wide, w->logits, w->padded, 1, w->n, p->column_values + w->lane * p->room * wide, wide,
            p->sink_room + w->nodes, wide, 0);
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
PRESCORE_EXPORT int prescore_routed_forward(const Problem *p) {
    const int64_t tiles = (p->n_query + TILE - 1) / TILE;
    Near near = {0};
    int failed = prescore_take_near(p, &near);
#pragma omp parallel num_threads(prescore_threads()) if (tiles * p->lanes > 1)
    {
        Work *w = failed ? NULL : prescore_new_work(p, &near);
        int64_t read = 0;
        if (!w) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t job = 0; job < tiles * p->lanes; job++) {
            /* the last queries see most: first, so that no thread is left alone with them; and lane after lane, whose
             * codes and rows then stay in cache */
            const int64_t lane = job / tiles, begin = (tiles - 1 - job % tiles) * TILE;
            const int64_t stop = begin + TILE < p->n_query ? begin + TILE : p->n_query;
            for (int64_t done = begin; w && done < stop;) {
                done = next_tile(p, w, lane, done, stop);
                read += run_tile(p, w);
            }
        }
        free(w);
#pragma omp atomic
        p->counts[1] += read;
    }
    prescore_free_near(&near);
    return failed;
}
