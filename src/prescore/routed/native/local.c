/* Local keys, read exactly.
 *
 * The local keys of a query lie between its `local_start` and `local_stop`. They are loaded once for all tiles, keys sixteen
 * side by side, and then weighed some hundred at a time with a running maximum.
 */
#include "routed.h"

static void find_span(const RoutedCall *p, LocalKeys *local) {
    local->begin = INT64_MAX;
    local->stop = 0;
    for (int64_t i = 0; i < p->kv_heads * p->length; i++) {
        if (p->local_stop[i] <= p->local_start[i]) continue;
        local->begin = p->local_start[i] < local->begin ? p->local_start[i] : local->begin;
        local->stop = p->local_stop[i] > local->stop ? p->local_stop[i] : local->stop;
    }
    if (local->begin > local->stop) local->begin = local->stop;
    local->blocks = (local->stop - local->begin + 15) / 16;
}

/* The key that is the local key of this number. */
INLINE int64_t local_row(const LocalKeys *local, int64_t row) { return local->rows ? local->rows[row] : local->begin + row; }

/* Four rows as columns, `to[16 * i + k] = rows[k][i]`. */
INLINE void transpose_four(const float *const *rows, float *to, int64_t dim) {
#if defined(__SSE2__)
    for (int64_t i = 0; i < dim; i += 4) {
        __m128 a = _mm_loadu_ps(rows[0] + i), b = _mm_loadu_ps(rows[1] + i);
        __m128 c = _mm_loadu_ps(rows[2] + i), d = _mm_loadu_ps(rows[3] + i);
        _MM_TRANSPOSE4_PS(a, b, c, d);
        _mm_storeu_ps(to + 16 * i, a);
        _mm_storeu_ps(to + 16 * (i + 1), b);
        _mm_storeu_ps(to + 16 * (i + 2), c);
        _mm_storeu_ps(to + 16 * (i + 3), d);
    }
#elif defined(__aarch64__)
    for (int64_t i = 0; i < dim; i += 4) {
        const float32x4_t a = vld1q_f32(rows[0] + i), b = vld1q_f32(rows[1] + i), c = vld1q_f32(rows[2] + i), d = vld1q_f32(rows[3] + i);
        const float64x2_t even = vreinterpretq_f64_f32(vtrn1q_f32(a, b)), odd = vreinterpretq_f64_f32(vtrn2q_f32(a, b));
        const float64x2_t even2 = vreinterpretq_f64_f32(vtrn1q_f32(c, d)), odd2 = vreinterpretq_f64_f32(vtrn2q_f32(c, d));
        vst1q_f32(to + 16 * i, vreinterpretq_f32_f64(vtrn1q_f64(even, even2)));
        vst1q_f32(to + 16 * (i + 1), vreinterpretq_f32_f64(vtrn1q_f64(odd, odd2)));
        vst1q_f32(to + 16 * (i + 2), vreinterpretq_f32_f64(vtrn2q_f64(even, even2)));
        vst1q_f32(to + 16 * (i + 3), vreinterpretq_f32_f64(vtrn2q_f64(odd, odd2)));
    }
#else
    for (int64_t i = 0; i < dim; i++)
        for (int64_t k = 0; k < 4; k++) to[16 * i + k] = rows[k][i];
#endif
}

/* Pairs of bfloat16: two dimensions of a key, and the same dimension of two values. */
static void load_half_block(const RoutedCall *p, const LocalKeys *local, int64_t kv_head, int64_t block) {
    const int64_t pairs = p->dim / 2, wide = p->value_dim, rows = local->stop - local->begin, first = 16 * block;
    const float zeros[MAX_DIM / 2] = {0};
    float *keys = local->keys + (kv_head * local->blocks + block) * pairs * 16;
    for (int64_t k = 0; k < 16; k += 4) {
        const float *four[4];
        for (int64_t j = 0; j < 4; j++) {
            const int64_t row = first + k + j;
            four[j] = zeros;
            if (row < rows) four[j] = (const float *)((const uint16_t *)p->key.data + row_offset(&p->key, kv_head, local_row(local, row)));
        }
        transpose_four(four, keys + k, pairs);
    }
    for (int64_t k = 0; k < 16; k += 2) {
        const uint16_t *two[2];
        uint16_t *to = (uint16_t *)(local->values + ((kv_head * local->blocks + block) * 8 + k / 2) * wide);
        for (int64_t j = 0; j < 2; j++) {
            const int64_t row = first + k + j;
            two[j] = (const uint16_t *)zeros;
            if (row < rows) two[j] = (const uint16_t *)p->value.data + row_offset(&p->value, kv_head, local_row(local, row));
        }
        for (int64_t i = 0; i < wide; i++) {
            to[2 * i] = two[0][i];
            to[2 * i + 1] = two[1][i];
        }
    }
}

static void load_block(const RoutedCall *p, const LocalKeys *local, int64_t kv_head, int64_t block) {
    const int64_t dim = p->dim, wide = p->value_dim, rows = local->stop - local->begin, first = 16 * block;
    float *keys = local->keys + (kv_head * local->blocks + block) * dim * 16, own[4][MAX_DIM];
    for (int64_t k = 0; k < 16; k += 4) {
        const float *four[4];
        for (int64_t j = 0; j < 4; j++) {
            const int64_t row = first + k + j, offset = row < rows ? row_offset(&p->key, kv_head, local_row(local, row)) : 0;
            four[j] = own[j];
            if (row < rows && p->key.type == FLOAT32)
                four[j] = (const float *)p->key.data + offset;
            else
                for (int64_t i = 0; i < dim; i += WIDTH)
                    store(own[j] + i, row < rows ? load_row(&p->key, offset, i) : splat(0.0f));
        }
        transpose_four(four, keys + k, dim);
    }
    if (!local->values) return;
    for (int64_t k = first; k < first + 16 && k < rows; k++) {
        const int64_t offset = row_offset(&p->value, kv_head, local_row(local, k));
        float *to = local->values + (kv_head * rows + k) * wide;
        for (int64_t i = 0; i < wide; i += WIDTH) store(to + i, load_row(&p->value, offset, i));
    }
}

/* Sixteen local keys of a KV head and their values. */
void prescore_load_local_block(const RoutedCall *p, const LocalKeys *local, int64_t kv_head, int64_t block) {
    (local->half ? load_half_block : load_block)(p, local, kv_head, block);
}

#define BLOCKS_PER_JOB 64 /* of sixteen keys */

typedef struct {
    const RoutedCall *p;
    LocalKeys *local;
} Loading;

static void load_blocks(void *of, Jobs *jobs) {
    const RoutedCall *p = ((const Loading *)of)->p;
    LocalKeys *local = ((const Loading *)of)->local;
    for (int64_t job; (job = next_job(jobs)) >= 0;) {
        const int64_t begin = job * BLOCKS_PER_JOB, all = p->kv_heads * local->blocks;
        for (int64_t i = begin; i < all && i < begin + BLOCKS_PER_JOB; i++)
            prescore_load_local_block(p, local, i / local->blocks, i % local->blocks);
    }
}

/* Load the local keys of all queries; returns 1 where there is no memory. */
int prescore_load_local(const RoutedCall *p, LocalKeys *local) {
    local->rows = NULL;
    find_span(p, local);
    local->half = half_products(p);
    const int64_t numbers = p->kv_heads * local->blocks * p->dim * 16;
    const int64_t rows = p->kv_heads * (local->half ? local->blocks * 8 : local->stop - local->begin);
    const int converted = p->value.type != FLOAT32;
    local->keys = aligned_alloc(64, sizeof(float) * (size_t)(numbers + 16));
    local->values = converted ? malloc(sizeof(float) * (size_t)(rows * p->value_dim + 1)) : NULL;
    if (!local->keys || (converted && !local->values)) return 1;
    Loading of = {p, local};
    prescore_run((p->kv_heads * local->blocks + BLOCKS_PER_JOB - 1) / BLOCKS_PER_JOB, load_blocks, &of);
    return 0;
}

void prescore_free_local(LocalKeys *local) {
    free(local->keys);
    free(local->values);
}

/* Weights of a query for some local keys, in place of their logits, under a new maximum; sums under the old one are scaled.
 * Keys outside of `begin` to `stop` weigh nothing. */
INLINE void weigh_keys(float *logits, int64_t n, int64_t begin, int64_t stop, float *peak, float *mass, float *sum,
                       int64_t wide, const float factor) {
    if (stop <= begin) {
        memset(logits, 0, sizeof(float) * (size_t)n);
        return;
    }
    for (int64_t c = 0; c < begin; c++) logits[c] = -INFINITY;
    for (int64_t c = stop; c < n; c++) logits[c] = -INFINITY;
    floats top = splat(*peak), added = splat(0);
    for (int64_t c = 0; c < n; c += WIDTH) top = larger(top, load(logits + c) * splat(factor));
    const float highest = largest(top), scale = *peak == highest ? 1.0f : expf(*peak - highest);
    for (int64_t c = 0; c < n; c += WIDTH) {
        const floats x = vexp(load(logits + c) * splat(factor) - splat(highest));
        store(logits + c, x);
        added += x;
    }
    *mass = *mass * scale + total(added);
    *peak = highest;
    if (scale == 1.0f) return;
    for (int64_t i = 0; i < wide; i += WIDTH) store(sum + i, load(sum + i) * splat(scale));
}

/* Weights as pairs of bfloat16, in place. */
INLINE void round_pairs(float *weights, int64_t n) {
#if defined(__AVX512BF16__)
    for (int64_t c = 0; c < n; c += 32) {
        const __m512 second = c + 16 < n ? (__m512)load(weights + c + 16) : _mm512_setzero_ps();
        store(weights + c / 2, (floats)_mm512_cvtne2ps_pbh(second, (__m512)load(weights + c)));
    }
#else
    (void)weights;
    (void)n;
#endif
}

/* Output and log-sum-exp of the local keys of a tile; 0 and -inf where there are none. */
void prescore_attend_local(const RoutedCall *p, Tile *w) {
    const LocalKeys *local = w->local;
    const int64_t dim = p->dim, wide = p->value_dim, rows = local->stop - local->begin;
    const int32_t *first = p->local_start, *stop = p->local_stop;
    int64_t begin = rows, end = 0, place[TILE];
    float peak[TILE], mass[TILE], *sums = w->local_sums, *weights = w->local_weights;
    for (int64_t t = 0; t < w->n; t++) {
        place[t] = place_of(p, w->kv_head, w->index[t] - w->kv_head * p->n_query);
        peak[t] = -INFINITY;
        mass[t] = 0;
        if (stop[place[t]] <= first[place[t]]) continue;
        begin = first[place[t]] - local->begin < begin ? first[place[t]] - local->begin : begin;
        end = stop[place[t]] - local->begin > end ? stop[place[t]] - local->begin : end;
    }
    memset(sums, 0, sizeof(float) * (size_t)(w->n * wide));
    for (int64_t row = begin / 16 * 16; row < end; row += LOCAL_KEYS) {
        const int64_t some = end - row < LOCAL_KEYS ? end - row : LOCAL_KEYS, filled = (some + 15) / 16 * 16;
        const float *keys = local->keys + (w->kv_head * local->blocks + row / 16) * (local->half ? dim * 8 : dim * 16);
        if (local->half)
            any_product(1, weights, LOCAL_KEYS, w->pairs, dim / 2, 1, w->n, keys, 16, dim * 8, dim / 2, filled, 0);
        else
            product(weights, LOCAL_KEYS, w->query, dim, 1, w->n, keys, 16, dim * 16, dim, filled, 0);
        for (int64_t t = 0; t < w->n; t++) {
            const int64_t from = first[place[t]] - local->begin - row, to = stop[place[t]] - local->begin - row;
            weigh_keys(weights + t * LOCAL_KEYS, filled, from > 0 ? from : 0, to < filled ? to : filled, peak + t, mass + t,
                       sums + t * wide, wide, local->half ? p->scale : 1.0f);
            if (local->half) round_pairs(weights + t * LOCAL_KEYS, filled);
        }
        if (local->half) {
            const float *pairs = local->values + (w->kv_head * local->blocks * 8 + row / 2) * wide;
            any_product(1, sums, wide, weights, LOCAL_KEYS, 1, w->n, pairs, wide, 16, filled / 2, wide, 1);
            continue;
        }
        const float *values = local->values ? local->values + (w->kv_head * rows + row) * wide
                                           : (const float *)p->value.data + row_offset(&p->value, w->kv_head, local->begin + row);
        product(sums, wide, weights, LOCAL_KEYS, 1, w->n, values, local->values ? wide : p->value.step, 16, some, wide, 1);
    }
    for (int64_t t = 0; t < w->n; t++) {
        float *output = p->output + w->index[t] * wide;
        const floats part = splat(mass[t] == 0 ? 0.0f : 1.0f / mass[t]);
        for (int64_t i = 0; i < wide; i += WIDTH) store(output + i, load(sums + t * wide + i) * part);
        p->lse[w->index[t]] = mass[t] == 0 ? -INFINITY : peak[t] + logf(mass[t]);
    }
}
