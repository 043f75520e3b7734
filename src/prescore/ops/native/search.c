/* Which far keys a query reads.
 *
 * In clusters within reach of its threshold a query compares the centroids of the subclusters, sixteen side by side; in
 * subclusters within reach it compares the sixteen int8 keys; and it reads the keys that reach the threshold.
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
#else
    if (each % WIDTH == 0) {
        for (int k = 0; k < PER_BLOCK; k++) to[k] = splat(logits[(uint32_t)(16 * block + k * WIDTH) / (uint32_t)each]);
        return;
    }
#endif
    float own[16];
    for (int64_t i = 0; i < 16; i++) own[i] = logits[(16 * block + i) / each];
    for (int k = 0; k < PER_BLOCK; k++) to[k] = load(own + k * WIDTH);
}

/* Search a block of sixteen subclusters for one query; returns how many keys and centroids it compared. */
INLINE int64_t search_block(const RoutedCall *p, Tile *w, int64_t t, int64_t block, const int64_t quarter) {
    const int64_t each = p->cluster_size / 16, visible = w->clusters * each - 16 * block, bytes = 64 * quarter;
    const int64_t at = w->kv_head * ((p->n_clusters * each + 15) / 16) + block, here = w->kv_head * p->n_clusters * each + 16 * block;
    const float *logits = w->logits + t * w->padded + p->sink_columns;
    const float least = w->least[t], unit = w->int8_scale[t];
    const floats reach = splat(w->reach[t]);
    int32_t query[MAX_DIM / 4], *hits = w->hits + t * MAX_HITS, *cluster_hits = w->cluster_hits + t * w->padded + p->sink_columns;
    float *hit_logits = w->hit_logits + t * MAX_HITS;
    int32_t n_hits = w->n_hits[t];
    floats centroids[PER_BLOCK], offset[PER_BLOCK];
    unsigned near = 0, within = 0;
    logits_of_block(logits, block, each, centroids);
    for (int k = 0; k < PER_BLOCK; k++)
        near |= at_least(load(p->radius + at * 16 + k * WIDTH) * reach + centroids[k], splat(least)) << (k * WIDTH);
    if (visible < 16) near &= (1u << visible) - 1;
    if (!near) return 0;
    memcpy(query, w->int8 + t * p->dim, (size_t)(4 * quarter));
    int8_products(p->sub_int8 + at * bytes, query, w->int8_start[t], quarter, offset);
    for (int k = 0; k < PER_BLOCK; k++) {
        const floats x = offset[k] * (load(p->sub_scales + at * 16 + k * WIDTH) * splat(unit)) + centroids[k];
        within |= at_least(load(p->spread + at * 16 + k * WIDTH) * reach + x, splat(least)) << (k * WIDTH);
    }
    within &= near;
    const int64_t compared = __builtin_popcount(near) + 16 * __builtin_popcount(within);
    for (; within; within &= within - 1) {
        const int64_t i = __builtin_ctz(within), cluster = (uint32_t)(16 * block + i) / (uint32_t)each;
        /* int8 keys are differences from the centroid */
        const floats centroid = splat(logits[cluster]);
        unsigned above = 0;
        int8_products(p->int8 + (here + i) * bytes, query, w->int8_start[t], quarter, offset);
        for (int k = 0; k < PER_BLOCK; k++) {
            offset[k] = offset[k] * (load(p->scales + (here + i) * 16 + k * WIDTH) * splat(unit)) + centroid;
            above |= at_least(offset[k], splat(least)) << (k * WIDTH);
        }
        const int32_t before = n_hits; /* no branch: whether there is a hit cannot be predicted */
        n_hits = append_hits(hits, hit_logits, before, p->positions + (here + i) * 16, offset, above);
        cluster_hits[cluster] += n_hits - before;
    }
    w->n_hits[t] = n_hits;
    return compared;
}

/* The same for all queries of a tile: the keys of a block stay in cache. */
INLINE int64_t search_blocks(const RoutedCall *p, Tile *w, int64_t first, int64_t stop, const int64_t quarter) {
    int64_t compared = 0;
    memset(w->n_hits, 0, sizeof w->n_hits);
    for (int64_t block = first; block < stop; block++)
        for (int64_t t = 0; t < w->n; t++)
            if (w->threshold[t] < INFINITY) compared += search_block(p, w, t, block, quarter);
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
        const float heavy = p->heavy_stds - p->margin / w->std[t];
        const float reach = (heavy > p->search_stds ? heavy : p->search_stds) * w->std[t];
        w->reach[t] = reach / root;
        w->n_hits[t] = 0;
        memset(w->cluster_hits + t * w->padded, 0, sizeof(int32_t) * (size_t)w->columns);
    }
}

/* Search the next subclusters for all queries of a tile; returns where to go on, 0 at the end. */
int64_t prescore_search(const RoutedCall *p, Tile *w, int64_t block) {
    const int64_t blocks = (w->clusters * p->cluster_size / 16 + 15) / 16;
    const int64_t stop = block + BLOCKS_AT_ONCE < blocks ? block + BLOCKS_AT_ONCE : blocks;
    int64_t compared;
    if (p->dim == 64) /* compiled for the head dimensions that most models have */
        compared = search_blocks(p, w, block, stop, 16);
    else if (p->dim == 128)
        compared = search_blocks(p, w, block, stop, 32);
    else
        compared = search_blocks(p, w, block, stop, p->dim / 4);
#pragma omp atomic
    p->counts[0] += compared;
    return stop < blocks ? stop : 0;
}
