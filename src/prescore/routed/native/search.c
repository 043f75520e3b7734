/* Which far keys a query reads.
 *
 * In clusters within reach of its threshold a query compares the centroids of the subclusters, sixteen side by side; in
 * subclusters within reach it compares the sixteen int8 keys; and it reads the keys that reach the threshold.
 */
#include "int8.h"
#include "routed.h"

#define MAX_PRODUCT 1e9f /* more than any product of an int8 key and an int8 query */

/* Sixteen subclusters of a KV head. Sixteen clusters have `each` blocks of them. */
typedef struct {
    int64_t at, first, each; /* where it lies among blocks and among subclusters; subclusters of a cluster */
    int64_t group, begin;    /* the first of its sixteen clusters; of its subclusters among theirs */
    const float *least, *reach; /* [TILE] of its span */
} Block;

INLINE Block block_of(const RoutedCall *p, const Tile *w, int64_t number) {
    const int64_t each = p->cluster_size / 16, blocks = (p->n_clusters * each + 15) / 16, group = number / each * 16;
    const int64_t span = group / p->clusters_per_span * TILE;
    return (Block){w->kv_head * blocks + number, w->kv_head * p->n_clusters * each + 16 * number, each, group, number % each * 16,
                   w->least + span, w->reach + span};
}

/* To which of sixteen clusters a subcluster belongs. */
INLINE int64_t cluster_of(const Block *b, int64_t i) { return (uint32_t)(b->begin + i) / (uint32_t)b->each; }

/* Which of sixteen clusters are within reach of each query, as bits. */
INLINE void clusters_within_reach(const RoutedCall *p, Tile *w, const Block *b) {
    const float *radius = p->radius + w->kv_head * ((p->n_clusters + 15) / 16 * 16) + b->group;
    const int64_t visible = w->clusters - b->group;
    for (int64_t t = 0; t < TILE; t++) {
        unsigned near = 0;
        if (t < w->n && w->threshold[t] < INFINITY) {
            const float *logits = w->logits + t * w->padded + p->sink_columns + b->group;
            for (int k = 0; k < PER_BLOCK; k++)
                near |= at_least(load(radius + k * WIDTH) * splat(b->reach[t]) + load(logits + k * WIDTH), splat(b->least[t])) << (k * WIDTH);
        }
        w->near[t] = (uint16_t)(visible < 16 ? near & ((1u << visible) - 1) : near);
    }
}

/* Which subclusters of a block belong to clusters within reach of a query, and the logits of the centroids of these clusters. */
INLINE unsigned in_near_clusters(const RoutedCall *p, const Tile *w, int64_t t, const Block *b, floats *centroids) {
    const float *logits = w->logits + t * w->padded + p->sink_columns + b->group;
    const unsigned near = w->near[t];
#if defined(__AVX512F__)
    if (b->each == 8) {
        const int64_t two = b->begin / 8;
        centroids[0] = (floats)_mm512_mask_blend_ps(0xff00, _mm512_set1_ps(logits[two]), _mm512_set1_ps(logits[two + 1]));
        return (near >> two & 1) * 0xff | (near >> (two + 1) & 1) * 0xff00;
    }
#endif
    unsigned within = 0;
    float own[16];
    for (int64_t i = 0; i < 16; i++) {
        own[i] = logits[cluster_of(b, i)];
        within |= (near >> cluster_of(b, i) & 1) << i;
    }
    for (int k = 0; k < PER_BLOCK; k++) centroids[k] = load(own + k * WIDTH);
    return within;
}

/* Which subclusters of a block are within reach of each query, as bits: those of clusters within reach, by their own centroids. Returns
 * how many centroids were compared. */
INLINE int64_t subclusters_within_reach(const RoutedCall *p, Tile *w, const Block *b, uint16_t *within, const int64_t quarter) {
    int32_t *products = w->products;
    int64_t compared = 0;
    uint32_t some = having(w->near, (2u << cluster_of(b, 15)) - (1u << cluster_of(b, 0)));
    floats per_unit[PER_BLOCK];
    for (int k = 0; k < PER_BLOCK; k++) per_unit[k] = splat(1.0f) / load(p->scales + b->at * 16 + k * WIDTH);
    memset(within, 0, sizeof(uint16_t) * TILE);
    int8_products(p->sub_int8 + b->at * 64 * quarter, some, w->int8, quarter, w->int8_start, quarter, products);
    for (; some; some &= some - 1, products += 16) {
        const int64_t t = __builtin_ctz(some);
        const floats unit = splat(w->int8_scale[t]), reach = splat(b->reach[t]), least = splat(b->least[t]);
        floats centroids[PER_BLOCK];
        const unsigned near = in_near_clusters(p, w, t, b, centroids);
        unsigned own = 0;
        for (int k = 0; k < PER_BLOCK; k++) {
            const int64_t at = b->at * 16 + k * WIDTH;
            const floats bound = (least - centroids[k]) * (per_unit[k] * splat(w->int8_per_unit[t]));
            *(ints *)(w->bounds + t * 16 + k * WIDTH) = round_up(smaller(larger(bound, splat(-MAX_PRODUCT)), splat(MAX_PRODUCT)));
            const floats offset = __builtin_convertvector(*(const ints *)(products + k * WIDTH), floats);
            const floats x = offset * (load(p->sub_scales + at) * unit) + centroids[k];
            own |= at_least(load(p->spread + at) * reach + x, least) << (k * WIDTH);
        }
        compared += __builtin_popcount(near);
        within[t] = (uint16_t)(near & own);
    }
    return compared;
}

/* Which of sixteen products are at least `bound`, as bits. */
INLINE unsigned products_at_least(const int32_t *products, int32_t bound) {
    unsigned above = 0;
    for (int k = 0; k < PER_BLOCK; k++) above |= bits(*(const ints *)(products + k * WIDTH) >= bound - (ints){0}) << (k * WIDTH);
    return above;
}

/* Compare the keys of a subcluster with the queries that it is within reach of, given as bits. Products are noted from `n` on, and
 * which of them reach the bound; returns how many queries there are then. No branch depends on them: it would often be
 * mispredicted. */
INLINE int64_t compare_keys(const RoutedCall *p, Tile *w, const Block *b, int64_t i, uint32_t some, int64_t n, const int64_t quarter) {
    const uint8_t *keys = p->int8 + (b->first + i) * 64 * quarter;
    const int32_t *bounds = w->bounds + i;
    int32_t *to = w->products + n * 16;
#if defined(__AVX512VNNI__)
    const int last = quarter % 16 ? 4 : 16; /* products of the last dimensions stay in registers */
    __m512i last_keys[16];
    for (int c = 0; c < last; c++) last_keys[c] = _mm512_loadu_si512(keys + 64 * (quarter - last + c));
#else
    const int last = 0;
#endif
    int8_products(keys, some, w->int8, quarter, w->int8_start, quarter - last, to);
    for (; some; some &= some - 1, n++, to += 16) {
        const int64_t t = __builtin_ctz(some);
#if defined(__AVX512VNNI__)
        const __m512i start = quarter == last ? _mm512_set1_epi32(w->int8_start[t]) : _mm512_loadu_si512(to);
        const __m512i products = add_product(last, last_keys, w->int8 + t * quarter + quarter - last, start);
        _mm512_storeu_si512(to, products);
        w->above[n] = _mm512_cmpge_epi32_mask(products, _mm512_set1_epi32(bounds[t * 16]));
#else
        w->above[n] = (uint16_t)products_at_least(to, bounds[t * 16]);
#endif
        w->compared[n] = (uint16_t)(t * 16 + i);
    }
    return n;
}

/* Append the keys that reached the bound to the hits of their queries, with their logits. Int8 keys are differences from the
 * centroid. */
INLINE void collect_hits(const RoutedCall *p, Tile *w, const Block *b, int64_t n) {
    for (int64_t next = 0; next < n; next += 32) {
        uint32_t some = having(w->above + next, 0xffff) & (n - next < 32 ? (1u << (n - next)) - 1 : ~0u);
        for (; some; some &= some - 1) {
            const int64_t pair = next + __builtin_ctz(some), t = w->compared[pair] / 16, i = w->compared[pair] % 16;
            const int64_t column = t * w->padded + p->sink_columns + b->group + cluster_of(b, i);
            const floats unit = splat(p->scales[b->at * 16 + i] * w->int8_scale[t]), centroid = splat(w->logits[column]);
            float logits[16];
            for (int k = 0; k < PER_BLOCK; k++)
                store(logits + k * WIDTH,
                      __builtin_convertvector(*(const ints *)(w->products + pair * 16 + k * WIDTH), floats) * unit + centroid);
            w->n_hits[t] = append_hits(w->hits + t * MAX_HITS, w->hit_logits + t * MAX_HITS, w->n_hits[t],
                                       p->positions + (b->first + i) * 16, logits, w->above[pair]);
            w->cluster_hits[column] += __builtin_popcount(w->above[pair]);
        }
    }
}

/* Search some blocks for all queries of a tile; returns how many keys and centroids were compared. */
INLINE int64_t search_blocks(const RoutedCall *p, Tile *w, int64_t first, int64_t stop, const int64_t quarter) {
    uint16_t within[TILE];
    int64_t compared = 0;
    memset(w->n_hits, 0, sizeof w->n_hits);
    for (int64_t number = first; number < stop; number++) {
        const Block b = block_of(p, w, number);
        int64_t n = 0;
        if (number == first || b.begin == 0) clusters_within_reach(p, w, &b);
        compared += subclusters_within_reach(p, w, &b, within, quarter);
        for (int64_t i = 0; i < 16; i++) {
            const uint32_t some = having(within, 1u << i);
            if (some) n = compare_keys(p, w, &b, i, some, n, quarter);
        }
        collect_hits(p, w, &b, n);
        compared += 16 * n;
    }
    return compared;
}

/* Before the first search of a tile: nothing was found. */
void prescore_begin_search(const RoutedCall *p, Tile *w) {
    for (int64_t span = 0; span < w->spans; span++) {
        const float unit = p->units[cov_of(p, w, span)], *std = w->std + span * TILE;
        for (int64_t t = 0; t < w->n; t++) {
            const float lowered = p->heavy_int8_error * std[t] - p->margin, heavy = p->heavy_stds - p->margin / std[t];
            w->least[span * TILE + t] = w->threshold[t] - (lowered > 0 ? lowered : 0);
            w->reach[span * TILE + t] = (heavy > p->search_stds ? heavy : p->search_stds) * std[t] / unit;
        }
    }
    for (int64_t t = 0; t < w->n; t++) {
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
    else if (p->dim == 256)
        compared = search_blocks(p, w, block, stop, 64);
    else
        compared = search_blocks(p, w, block, stop, p->dim / 4);
    __atomic_fetch_add(&p->counts[0], compared, __ATOMIC_RELAXED);
    return stop < blocks ? stop : 0;
}
