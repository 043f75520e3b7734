/* Which far keys a query reads.
 *
 * Every query compares the centroids of all subclusters, sixteen side by side. It compares the sixteen int8 keys of those that
 * lie within reach of its threshold, and reads the keys that reach it.
 */
#include "int8.h"
#include "routed.h"

/* Logits of the centroids that sixteen subclusters belong to, `each` to a cluster. */
INLINE void logits_of_block(const float *logits, int64_t block, int64_t each, floats *to) {
#if defined(__AVX512F__)
    if (each == 8) {
        to[0] = (floats)_mm512_mask_blend_ps(0xff00, _mm512_set1_ps(logits[2 * block]), _mm512_set1_ps(logits[2 * block + 1]));
        return;
    }
#endif
    float own[16];
    for (int64_t i = 0; i < 16; i++) own[i] = logits[(16 * block + i) / each];
    for (int k = 0; k < PER_BLOCK; k++) to[k] = load(own + k * WIDTH);
}

/* Search some blocks of sixteen subclusters for one query; returns how many numbers it compared. */
INLINE int64_t search_blocks(const RoutedCall *p, Tile *w, int64_t t, int64_t first, int64_t stop, const int64_t quarter) {
    const int64_t each = p->cluster_size / 16, visible = w->clusters * each, n_blocks = (p->n_clusters * each + 15) / 16;
    const int64_t bytes = 64 * quarter;
    const float *logits = w->logits + t * w->padded + p->sink_columns;
    const float least = w->least[t], unit = w->int8_scale[t], inverse = 1.0f / unit;
    const floats std = splat(w->std_of_spread[t]), search_stds = splat(p->search_stds), heavy_stds = splat(p->heavy_stds);
    const floats margin = splat(p->margin);
    int32_t query[MAX_DIM / 4], *hits = w->hits + t * MAX_HITS, *cluster_hits = w->cluster_hits + t * w->padded + p->sink_columns;
    int32_t n_hits = 0;
    int64_t compared = 0;
    memcpy(query, w->int8 + t * p->dim, (size_t)(4 * quarter));
    for (int64_t block = first; block < stop; block++) {
        const int64_t at = w->kv_head * n_blocks + block;
        floats centroids[PER_BLOCK], offset[PER_BLOCK];
        unsigned within = 0;
        logits_of_block(logits, block, each, centroids);
        int8_products(p->sub_int8 + at * bytes, query, w->int8_start[t], quarter, offset);
        for (int k = 0; k < PER_BLOCK; k++) {
            const floats s = std * load(p->spread + at * 16 + k * WIDTH);
            const floats reach = larger(search_stds * s, heavy_stds * s - margin);
            const floats x = offset[k] * load(p->sub_scales + at * 16 + k * WIDTH) * splat(unit);
            within |= at_least(x + (centroids[k] + reach), splat(least)) << (k * WIDTH);
        }
        const int64_t n = visible - 16 * block;
        if (n < 16) within &= (1u << n) - 1;
        compared += n < 16 ? n : 16;
        for (; within; within &= within - 1) {
            const int64_t own = 16 * block + __builtin_ctz(within), cluster = own / each;
            const int64_t here = w->kv_head * p->n_clusters * each + own;
            /* int8 keys are differences from the centroid */
            const floats distance = splat((least - logits[cluster]) * inverse);
            unsigned above = 0;
            int8_products(p->int8 + here * bytes, query, w->int8_start[t], quarter, offset);
            for (int k = 0; k < PER_BLOCK; k++)
                above |= at_least(offset[k] * load(p->scales + here * 16 + k * WIDTH), distance) << (k * WIDTH);
            compared += 16;
            if (!above) continue; /* often */
            n_hits = append_rows(hits, n_hits, p->positions + here * 16, above);
            cluster_hits[cluster] += __builtin_popcount(above);
        }
    }
    w->n_hits[t] = n_hits;
    return compared;
}

/* Before the first search of a tile: nothing was found. */
void prescore_begin_search(const RoutedCall *p, Tile *w) {
    const int64_t cov = w->kv_head * p->n_covs + (w->clusters - 1) / p->clusters_per_cov;
    float trace = 0;
    for (int64_t i = 0; i < p->dim; i++) trace += p->key_cov[(cov * p->dim + i) * p->dim + i];
    const float root = sqrtf(trace > MIN_STD * MIN_STD ? trace : MIN_STD * MIN_STD);
    for (int64_t t = 0; t < w->n; t++) {
        const float lowered = p->heavy_int8_error * w->std[t] - p->margin;
        w->least[t] = w->threshold[t] - (lowered > 0 ? lowered : 0);
        w->std_of_spread[t] = w->std[t] / root;
        w->n_hits[t] = 0;
        memset(w->cluster_hits + t * w->padded, 0, sizeof(int32_t) * (size_t)w->columns);
    }
}

/* Search the next subclusters for all queries of a tile; returns where to go on, 0 at the end. */
int64_t prescore_search(const RoutedCall *p, Tile *w, int64_t block) {
    const int64_t blocks = (w->clusters * p->cluster_size / 16 + 15) / 16;
    const int64_t stop = block + BLOCKS_AT_ONCE < blocks ? block + BLOCKS_AT_ONCE : blocks;
    int64_t compared = 0;
    for (int64_t t = 0; t < w->n; t++) {
        if (!(w->threshold[t] < INFINITY)) continue;
        if (p->dim == 64) /* compiled for the head dimensions that most models have */
            compared += search_blocks(p, w, t, block, stop, 16);
        else if (p->dim == 128)
            compared += search_blocks(p, w, t, block, stop, 32);
        else
            compared += search_blocks(p, w, t, block, stop, p->dim / 4);
    }
#pragma omp atomic
    p->counts[0] += compared;
    return stop < blocks ? stop : 0;
}
