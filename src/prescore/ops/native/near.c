/* What queries read in any case: rows near them, exactly.
 *
 * A tile of queries reads rows that lie side by side, those of one query between its `first` and its `stop`. They are
 * taken up once for all tiles, keys sixteen side by side; then weighed some hundred at a time, with a running maximum.
 */
#include "routed.h"

static void find_span(const Problem *p, Near *near) {
    near->begin = INT64_MAX;
    near->stop = 0;
    for (int64_t i = 0; i < p->lanes * p->length; i++) {
        if (p->stop[i] <= p->first[i]) continue;
        near->begin = p->first[i] < near->begin ? p->first[i] : near->begin;
        near->stop = p->stop[i] > near->stop ? p->stop[i] : near->stop;
    }
    if (near->begin > near->stop) near->begin = near->stop;
    near->blocks = (near->stop - near->begin + 15) / 16;
}

/* Four rows as columns, `to[16 * i + k] = rows[k][i]`. */
INLINE void turn_four(const float *const *rows, float *to, int64_t dim) {
#if defined(__SSE__)
    for (int64_t i = 0; i < dim; i += 4) {
        __m128 a = _mm_loadu_ps(rows[0] + i), b = _mm_loadu_ps(rows[1] + i);
        __m128 c = _mm_loadu_ps(rows[2] + i), d = _mm_loadu_ps(rows[3] + i);
        _MM_TRANSPOSE4_PS(a, b, c, d);
        _mm_storeu_ps(to + 16 * i, a);
        _mm_storeu_ps(to + 16 * (i + 1), b);
        _mm_storeu_ps(to + 16 * (i + 2), c);
        _mm_storeu_ps(to + 16 * (i + 3), d);
    }
#else
    for (int64_t i = 0; i < dim; i++)
        for (int64_t k = 0; k < 4; k++) to[16 * i + k] = rows[k][i];
#endif
}

static void take_block(const Problem *p, const Near *near, int64_t lane, int64_t block) {
    const int64_t dim = p->dim, wide = p->value_dim, rows = near->stop - near->begin, first = 16 * block;
    float *keys = near->keys + (lane * near->blocks + block) * dim * 16, own[4][MOST_DIM];
    for (int64_t k = 0; k < 16; k += 4) {
        const float *four[4];
        for (int64_t j = 0; j < 4; j++) {
            const int64_t row = first + k + j, offset = row_offset(&p->key, lane, near->begin + row);
            four[j] = own[j];
            if (row < rows && p->key.type == FLOAT32)
                four[j] = (const float *)p->key.data + offset;
            else
                for (int64_t i = 0; i < dim; i += WIDTH)
                    store(own[j] + i, row < rows ? load_row(&p->key, offset, i) : splat(0.0f));
        }
        turn_four(four, keys + k, dim);
    }
    if (!near->values) return;
    for (int64_t k = first; k < first + 16 && k < rows; k++) {
        const int64_t offset = row_offset(&p->value, lane, near->begin + k);
        float *to = near->values + (lane * rows + k) * wide;
        for (int64_t i = 0; i < wide; i += WIDTH) store(to + i, load_row(&p->value, offset, i));
    }
}

/* Take up all rows that some query reads; returns 1 where there is no memory. */
int prescore_take_near(const Problem *p, Near *near) {
    find_span(p, near);
    const int64_t numbers = p->lanes * near->blocks * p->dim * 16, rows = p->lanes * (near->stop - near->begin);
    const int turned = p->value.type != FLOAT32;
    near->keys = aligned_alloc(64, sizeof(float) * (size_t)(numbers + 16));
    near->values = turned ? malloc(sizeof(float) * (size_t)(rows * p->value_dim + 1)) : NULL;
    if (!near->keys || (turned && !near->values)) return 1;
#pragma omp parallel for schedule(static) num_threads(prescore_threads()) if (near->blocks * p->lanes > 64)
    for (int64_t job = 0; job < p->lanes * near->blocks; job++)
        take_block(p, near, job / near->blocks, job % near->blocks);
    return 0;
}

void prescore_free_near(Near *near) {
    free(near->keys);
    free(near->values);
}

/* Weights of a query for some rows behind `row`, in place of their logits, under a new maximum; what was summed under
 * the old one is scaled. Rows outside of its own weigh nothing. */
INLINE void weigh_rows(float *logits, int64_t n, int64_t begin, int64_t stop, float *peak, float *mass, float *sum,
                       int64_t wide) {
    if (stop <= begin) {
        memset(logits, 0, sizeof(float) * (size_t)n);
        return;
    }
    for (int64_t c = 0; c < begin; c++) logits[c] = -INFINITY;
    for (int64_t c = stop; c < n; c++) logits[c] = -INFINITY;
    floats top = splat(*peak), added = splat(0);
    for (int64_t c = 0; c < n; c += WIDTH) top = larger(top, load(logits + c));
    const float highest = largest(top), scale = *peak == highest ? 1.0f : expf(*peak - highest);
    for (int64_t c = 0; c < n; c += WIDTH) {
        const floats x = vexp(load(logits + c) - splat(highest));
        store(logits + c, x);
        added += x;
    }
    *mass = *mass * scale + total(added);
    *peak = highest;
    if (scale == 1.0f) return;
    for (int64_t i = 0; i < wide; i += WIDTH) store(sum + i, load(sum + i) * splat(scale));
}

/* Output and log-sum-exp of what the queries of a tile read in any case; 0 and -inf where that is nothing. */
void prescore_read_near(const Problem *p, Work *w) {
    const Near *near = w->near;
    const int64_t dim = p->dim, wide = p->value_dim, rows = near->stop - near->begin;
    const int32_t *first = p->first, *stop = p->stop;
    int64_t begin = rows, end = 0, place[TILE];
    float peak[TILE], mass[TILE], *sums = w->near_sums, *weights = w->near_weights;
    for (int64_t t = 0; t < w->n; t++) {
        place[t] = place_of(p, w->lane, w->index[t] - w->lane * p->n_query);
        peak[t] = -INFINITY;
        mass[t] = 0;
        if (stop[place[t]] <= first[place[t]]) continue;
        begin = first[place[t]] - near->begin < begin ? first[place[t]] - near->begin : begin;
        end = stop[place[t]] - near->begin > end ? stop[place[t]] - near->begin : end;
    }
    memset(sums, 0, sizeof(float) * (size_t)(w->n * wide));
    for (int64_t row = begin / 16 * 16; row < end; row += NEAR_ROWS) {
        const int64_t some = end - row < NEAR_ROWS ? end - row : NEAR_ROWS, filled = (some + 15) / 16 * 16;
        const float *keys = near->keys + (w->lane * near->blocks + row / 16) * dim * 16;
        for (int64_t b = 0; b < filled / 16; b++)
            product(weights + 16 * b, NEAR_ROWS, w->query, dim, 1, w->n, keys + b * dim * 16, 16, dim, 16, 0);
        for (int64_t t = 0; t < w->n; t++) {
            const int64_t from = first[place[t]] - near->begin - row, to = stop[place[t]] - near->begin - row;
            weigh_rows(weights + t * NEAR_ROWS, filled, from > 0 ? from : 0, to < filled ? to : filled, peak + t, mass + t,
                       sums + t * wide, wide);
        }
        const float *values = near->values ? near->values + (w->lane * rows + row) * wide
                                           : (const float *)p->value.data + row_offset(&p->value, w->lane, near->begin + row);
        product(sums, wide, weights, NEAR_ROWS, 1, w->n, values, near->values ? wide : p->value.step, some, wide, 1);
    }
    for (int64_t t = 0; t < w->n; t++) {
        float *output = p->output + w->index[t] * wide;
        const floats part = splat(mass[t] == 0 ? 0.0f : 1.0f / mass[t]);
        for (int64_t i = 0; i < wide; i += WIDTH) store(output + i, load(sums + t * wide + i) * part);
        p->lse[w->index[t]] = mass[t] == 0 ? -INFINITY : peak[t] + logf(mass[t]);
    }
}

/* The near part alone; returns 0, or 1 where there was no memory. */
PRESCORE_EXPORT int prescore_routed_near(const Problem *p) {
    const int64_t tiles = (p->n_query + TILE - 1) / TILE;
    Near near = {0};
    int failed = prescore_take_near(p, &near);
#pragma omp parallel num_threads(prescore_threads()) if (tiles * p->lanes > 1)
    {
        Work *w = failed ? NULL : prescore_new_work(p, &near);
        if (!w) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t job = 0; job < tiles * p->lanes; job++) {
            const int64_t lane = job % p->lanes, begin = job / p->lanes * TILE;
            const int64_t stop = begin + TILE < p->n_query ? begin + TILE : p->n_query;
            for (int64_t done = begin; w && done < stop;) {
                done = next_tile(p, w, lane, done, stop);
                prescore_take_queries(p, w);
                prescore_read_near(p, w);
            }
        }
        free(w);
    }
    prescore_free_near(&near);
    return failed;
}
