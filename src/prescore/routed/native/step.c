/* Exact attention of a decode step: a few queries of a KV head that all see every key.
 *
 * Keys and values are read once for all query heads that share them, and in parts, so that threads have work. It is bound by
 * the memory that they lie in.
 */
#include "routed.h"

#define STEP_KEYS 64 /* whose logits are weighed at a time */
#define PART_KEYS 256 /* fewest of a part */
#define PARALLEL 65536 /* products from which on threads pay */

/* Must equal `StepCall` in routed/native/__init__.py. */
typedef struct {
    const void *query, *key, *value; /* the query is [batch, kv_heads, n_query, dim] without gaps */
    float *output;                   /* [batch, kv_heads, n_query, value_dim] */
    int64_t key_step[3], value_step[3]; /* numbers between sequences, KV heads and keys */
    int64_t batch, kv_heads, n_query, n_keys, dim, value_dim, type;
    float scale;
} StepCall;

INLINE floats load_number(const int type, const void *data, int64_t at) {
    if (type == FLOAT32) return load((const float *)data + at);
    return type == BFLOAT16 ? from_bfloat16((const uint16_t *)data + at) : from_float16((const uint16_t *)data + at);
}

/* Keys `begin` to `stop` of a KV head: sums of values, and of weights under the largest logit, of each query. */
INLINE void attend_keys(const int type, const StepCall *p, int64_t head, int64_t begin, int64_t stop, float *sums, float *mass, float *peak) {
    const int64_t n = p->n_query, dim = p->dim, wide = p->value_dim, sequence = head / p->kv_heads, own = head % p->kv_heads;
    const int64_t keys = sequence * p->key_step[0] + own * p->key_step[1], values = sequence * p->value_step[0] + own * p->value_step[1];
    float query[TILE * MAX_DIM], weights[TILE * STEP_KEYS], rows[4][MAX_DIM];
    for (int64_t i = 0; i < n * dim; i += WIDTH) store(query + i, load_number(type, p->query, head * n * dim + i) * splat(p->scale));
    for (int64_t i = 0; i < n * wide; i++) sums[i] = 0;
    for (int64_t t = 0; t < n; t++) {
        mass[t] = 0;
        peak[t] = -INFINITY;
    }
    for (int64_t row = begin; row < stop; row += STEP_KEYS) {
        const int64_t some = stop - row < STEP_KEYS ? stop - row : STEP_KEYS, filled = (some + 15) / 16 * 16;
        for (int64_t c = 0; c < some; c++) {
            for (int64_t i = 0; i < dim; i += WIDTH) store(rows[0] + i, load_number(type, p->key, keys + (row + c) * p->key_step[2] + i));
            for (int64_t t = 0; t < n; t++) weights[t * STEP_KEYS + c] = dot(query + t * dim, rows[0], dim);
        }
        for (int64_t t = 0; t < n; t++) {
            float *logits = weights + t * STEP_KEYS;
            for (int64_t c = some; c < filled; c++) logits[c] = -INFINITY;
            floats top = splat(peak[t]), added = splat(0);
            for (int64_t c = 0; c < filled; c += WIDTH) top = larger(top, load(logits + c));
            const float highest = largest(top), scale = peak[t] == highest ? 1.0f : expf(peak[t] - highest);
            for (int64_t c = 0; c < filled; c += WIDTH) {
                const floats x = vexp(load(logits + c) - splat(highest));
                store(logits + c, x);
                added += x;
            }
            mass[t] = mass[t] * scale + total(added);
            peak[t] = highest;
            for (int64_t i = 0; scale != 1.0f && i < wide; i += WIDTH) store(sums + t * wide + i, load(sums + t * wide + i) * splat(scale));
        }
        for (int64_t c = 0; c < some; c += 4) {
            const int64_t of = some - c < 4 ? some - c : 4;
            for (int64_t j = 0; j < 4; j++) /* the weights of keys past the last are 0 */
                for (int64_t i = 0; i < wide; i += WIDTH)
                    store(rows[j] + i, load_number(type, p->value, values + (row + c + (j < of ? j : 0)) * p->value_step[2] + i));
            for (int64_t t = 0; t < n; t++) {
                const float *four = weights + t * STEP_KEYS + c;
                float *to = sums + t * wide;
                for (int64_t i = 0; i < wide; i += WIDTH) {
                    const floats first = load(rows[0] + i) * splat(four[0]) + load(rows[1] + i) * splat(four[1]);
                    store(to + i, load(to + i) + (first + (load(rows[2] + i) * splat(four[2]) + load(rows[3] + i) * splat(four[3]))));
                }
            }
        }
    }
}

/* A step whose keys are split into parts: `size` numbers of each part of a head in `scratch`. */
typedef struct {
    const StepCall *p;
    int64_t parts, size;
    float *scratch;
} Parts;

static void attend_parts(void *of, Jobs *jobs) {
    const Parts *s = of;
    const StepCall *p = s->p;
    for (int64_t job; (job = next_job(jobs)) >= 0;) {
        const int64_t part = job % s->parts, head = job / s->parts;
        const int64_t begin = p->n_keys * part / s->parts, stop = p->n_keys * (part + 1) / s->parts;
        float *sums = s->scratch + job * s->size, *mass = sums + p->n_query * p->value_dim, *peak = mass + p->n_query;
        if (p->type == FLOAT32)
            attend_keys(FLOAT32, p, head, begin, stop, sums, mass, peak);
        else if (p->type == BFLOAT16)
            attend_keys(BFLOAT16, p, head, begin, stop, sums, mass, peak);
        else
            attend_keys(FLOAT16, p, head, begin, stop, sums, mass, peak);
    }
}

PRESCORE_EXPORT int prescore_exact_step(const StepCall *p) {
    const int64_t heads = p->batch * p->kv_heads, threads = prescore_threads(), n = p->n_query, wide = p->value_dim;
    const int64_t most = (p->n_keys + PART_KEYS - 1) / PART_KEYS, wanted = (4 * threads + heads - 1) / heads;
    const int64_t parts = most < wanted ? most : wanted, step = n * (wide + 2);
    float *scratch = malloc(sizeof(float) * (size_t)(heads * parts * step + 1));
    if (!scratch) return 1;
    Parts of = {p, parts, step, scratch};
    Jobs all = {0, heads * parts};
    if (heads * p->n_keys * n * p->dim > PARALLEL)
        prescore_run(all.stop, attend_parts, &of);
    else
        attend_parts(&of, &all);
    for (int64_t head = 0; head < heads; head++)
        for (int64_t t = 0; t < n; t++) {
            const float *first = scratch + head * parts * step;
            float *to = p->output + (head * n + t) * wide, top = -INFINITY, all = 0;
            for (int64_t part = 0; part < parts; part++) top = fmaxf(top, first[part * step + n * (wide + 1) + t]);
            for (int64_t i = 0; i < wide; i++) to[i] = 0;
            for (int64_t part = 0; part < parts; part++) {
                const float *own = first + part * step, scale = expf(own[n * (wide + 1) + t] - top);
                all += own[n * wide + t] * scale;
                for (int64_t i = 0; i < wide; i += WIDTH) store(to + i, load(to + i) + load(own + t * wide + i) * splat(scale));
            }
            for (int64_t i = 0; i < wide; i += WIDTH) store(to + i, load(to + i) * splat(1.0f / all));
        }
    free(scratch);
    return 0;
}
