/* Which far keys a query reads.
 *
 * In clusters within reach of its threshold a query compares the centroids of the subclusters, sixteen side by side; in
 * subclusters within reach it compares the sixteen int8 keys; and it reads the keys that reach the threshold.
 */
#include "int8.h"
#include "routed.h"

/* Sixteen subclusters of a KV head, and what the queries of a tile want of them. */
typedef struct {
    int64_t number, at, first, each;      /* of the block; where it lies among blocks and among subclusters; subclusters of a cluster */
    uint16_t near[TILE], within[TILE];    /* subclusters whose cluster, and which themselves, are within reach of a query, as bits */
} Block;

/* Logits of the centroids that the subclusters of a block belong to. */
INLINE void centroid_logits(const RoutedCall *p, const Tile *w, int64_t t, const Block *b, floats *to) {
    const float *logits = w->logits + t * w->padded + p->sink_columns;
#if defined(__AVX512F__)
    if (b->each == 8) {
        const float *two = logits + 2 * b->number;
        to[0] = (floats)_mm512_mask_blend_ps(0xff00, _mm512_set1_ps(two[0]), _mm512_set1_ps(two[1]));
        return;
    }
#else
    if (b->each % WIDTH == 0) {
        for (int k = 0; k < PER_BLOCK; k++) to[k] = splat(logits[(uint32_t)(16 * b->number + k * WIDTH) / (uint32_t)b->each]);
        return;
    }
#endif
    float own[16];
    for (int64_t i = 0; i < 16; i++) own[i] = logits[(16 * b->number + i) / b->each];
    for (int k = 0; k < PER_BLOCK; k++) to[k] = load(own + k * WIDTH);
}

/* Which subclusters belong to clusters within reach of a query. */
INLINE unsigned clusters_within_reach(const RoutedCall *p, const Tile *w, int64_t t, const Block *b) {
    const int64_t visible = w->clusters * b->each - 16 * b->number;
    floats centroids[PER_BLOCK];
    unsigned near = 0;
    centroid_logits(p, w, t, b, centroids);
    for (int k = 0; k < PER_BLOCK; k++)
        near |= at_least(load(p->radius + b->at * 16 + k * WIDTH) * splat(w->reach[t]) + centroids[k], splat(w->least[t])) << (k * WIDTH);
    return visible < 16 ? near & ((1u << visible) - 1) : near;
}

/* Products of sixteen rows with some queries of the tile. */
INLINE void products_of_tile(const Tile *w, const int n, const uint8_t *some, const uint8_t *rows, const int64_t quarter, floats *to) {
    const int32_t *query[GROUP];
    int32_t start[GROUP];
    for (int j = 0; j < n; j++) {
        query[j] = w->int8 + some[j] * quarter;
        start[j] = w->int8_start[some[j]];
    }
    int8_products(n, rows, query, start, quarter, to);
}

/* Which subclusters are within reach of some queries, by their centroids. */
INLINE void compare_centroids(const RoutedCall *p, const Tile *w, const int n, const uint8_t *some, Block *b, const int64_t quarter) {
    floats offset[GROUP * PER_BLOCK], centroids[PER_BLOCK];
    products_of_tile(w, n, some, p->sub_int8 + b->at * 64 * quarter, quarter, offset);
    for (int j = 0; j < n; j++) {
        const int64_t t = some[j];
        unsigned within = 0;
        centroid_logits(p, w, t, b, centroids);
        for (int k = 0; k < PER_BLOCK; k++) {
            const int64_t own = b->at * 16 + k * WIDTH;
            const floats x = offset[j * PER_BLOCK + k] * (load(p->sub_scales + own) * splat(w->int8_scale[t])) + centroids[k];
            within |= at_least(load(p->spread + own) * splat(w->reach[t]) + x, splat(w->least[t])) << (k * WIDTH);
        }
        b->within[t] = (uint16_t)within & b->near[t];
    }
}

/* Compare the sixteen keys of a subcluster for some queries, and append those that reach the threshold. */
INLINE void compare_keys(const RoutedCall *p, Tile *w, const int n, const uint8_t *some, int64_t at, int64_t cluster, const int64_t quarter) {
    floats x[GROUP * PER_BLOCK], scales[PER_BLOCK];
    unsigned above[GROUP], any = 0;
    products_of_tile(w, n, some, p->int8 + at * 64 * quarter, quarter, x);
    for (int k = 0; k < PER_BLOCK; k++) scales[k] = load(p->scales + at * 16 + k * WIDTH);
    for (int j = 0; j < n; j++) {
        const int64_t t = some[j];
        const floats centroid = splat(w->logits[t * w->padded + p->sink_columns + cluster]), unit = splat(w->int8_scale[t]);
        above[j] = 0;
        for (int k = 0; k < PER_BLOCK; k++) { /* int8 keys are differences from the centroid */
            floats *own = x + j * PER_BLOCK + k;
            *own = *own * (scales[k] * unit) + centroid;
            above[j] |= at_least(*own, splat(w->least[t])) << (k * WIDTH);
        }
        any |= (above[j] ? 1u : 0u) << j;
    }
    for (; any; any &= any - 1) {
        const int j = __builtin_ctz(any);
        const int64_t t = some[j];
        const int32_t before = w->n_hits[t];
        w->n_hits[t] = append_hits(w->hits + t * MAX_HITS, w->hit_logits + t * MAX_HITS, before, p->positions + at * 16,
                                   x + j * PER_BLOCK, above[j]);
        w->cluster_hits[t * w->padded + p->sink_columns + cluster] += w->n_hits[t] - before;
    }
}

/* `what(n, queries)` for the queries of a list, some at a time; `n` is a constant in each call. */
#define IN_GROUPS(what, list, count)                                              \
    do {                                                                          \
        int64_t done = 0;                                                         \
        for (; done + GROUP <= (count); done += GROUP) what(GROUP, (list) + done); \
        for (; done + 4 <= (count); done += 4) what(4, (list) + done);             \
        for (; done + 2 <= (count); done += 2) what(2, (list) + done);             \
        if (done < (count)) what(1, (list) + done);                               \
    } while (0)

/* The queries of a tile that search subcluster `i` of a block. */
INLINE int64_t searching(const Tile *w, const Block *b, int64_t i, uint8_t *list) {
    int64_t n = 0;
#if defined(__AVX512BW__)
    const __m512i bits_of = _mm512_loadu_si512(b->within);
    uint32_t queries = _mm512_test_epi16_mask(bits_of, _mm512_set1_epi16((short)(1 << i)));
    for (; queries; queries &= queries - 1) list[n++] = (uint8_t)__builtin_ctz(queries);
#else
    for (int64_t t = 0; t < w->n; t++) {
        list[n] = (uint8_t)t;
        n += b->within[t] >> i & 1;
    }
#endif
    return n;
}

/* Search a block for all queries of a tile; returns how many keys and centroids were compared. A subcluster is loaded once for
 * the queries that search it. */
INLINE int64_t search_block(const RoutedCall *p, Tile *w, int64_t number, const int64_t quarter) {
    Block b = {.number = number, .each = p->cluster_size / 16};
    uint8_t list[TILE];
    int64_t n = 0, compared = 0;
    b.at = w->kv_head * ((p->n_clusters * b.each + 15) / 16) + number;
    b.first = w->kv_head * p->n_clusters * b.each + 16 * number;
    for (int64_t t = 0; t < w->n; t++) {
        b.near[t] = w->threshold[t] < INFINITY ? (uint16_t)clusters_within_reach(p, w, t, &b) : 0;
        list[n] = (uint8_t)t;
        n += b.near[t] != 0;
        compared += __builtin_popcount(b.near[t]);
    }
    if (!n) return 0;
#define CENTROIDS(n, some) compare_centroids(p, w, n, some, &b, quarter)
    IN_GROUPS(CENTROIDS, list, n);
    for (int64_t i = 0; i < 16; i++) {
        const int64_t cluster = (uint32_t)(16 * number + i) / (uint32_t)b.each;
        n = searching(w, &b, i, list);
        compared += 16 * n;
#define KEYS(n, some) compare_keys(p, w, n, some, b.first + i, cluster, quarter)
        IN_GROUPS(KEYS, list, n);
    }
    return compared;
}

INLINE int64_t search_blocks(const RoutedCall *p, Tile *w, int64_t first, int64_t stop, const int64_t quarter) {
    int64_t compared = 0;
    memset(w->n_hits, 0, sizeof w->n_hits);
    for (int64_t block = first; block < stop; block++) compared += search_block(p, w, block, quarter);
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
