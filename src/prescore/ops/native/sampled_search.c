/* A search of every cluster that also weighs the keys it does not read, by their int4 logits.
 *
 * Weights are in units of the threshold's, so that all of them are below one.
 */
#include "int4.h"
#include "sampled.h"

/* One of the queries that search a cluster side by side. */
typedef struct {
    float threshold, lift[2]; /* in units of the int6 query */
    float unit, zero;     /* what a unit is worth, and the threshold, as `straight_exp2` takes them */
    int32_t *hits, n;
    float *by_int4, shown, used; /* samples: each, and their sum and number */
    floats sum;
} Searcher;

/* Sixteen keys of a cluster: which of them are read, and what the others weigh. */
INLINE void weigh_block(Searcher *k, const float *scales, const int32_t *rows, const floats *low, const floats *high,
                        int32_t place, int64_t block) {
    unsigned above = 0;
    floats light[PER_BLOCK];
    for (int i = 0; i < PER_BLOCK; i++) {
        const floats s0 = load(scales + i * WIDTH), s1 = load(scales + 16 + i * WIDTH);
        const floats x = s0 * low[i] + s1 * high[i], lifted = s0 * splat(k->lift[0]) + (s1 * splat(k->lift[1]) + x);
        light[i] = straight_exp2(x * splat(k->unit) + splat(k->zero));
#if defined(__AVX512F__)
        const __mmask16 read = _mm512_cmp_ps_mask((__m512)lifted, _mm512_set1_ps(k->threshold), _CMP_GE_OQ);
        k->sum = (floats)_mm512_mask_add_ps((__m512)k->sum, (__mmask16)~read, (__m512)k->sum, (__m512)light[i]);
        above = read;
#else
        const ints read = lifted >= splat(k->threshold);
        k->sum += choose(read, splat(0.0f), light[i]);
        above |= bits(read) << (i * WIDTH);
#endif
    }
    k->n = append_rows(k->hits, k->n, rows, above);
    const float own = (above >> place) & 1 ? -1.0f : ((const float *)light)[place];
    k->by_int4[block] = own;
    k->shown += own >= 0 ? own : 0.0f;
    k->used += own >= 0 ? 1.0f : 0.0f;
}

static void search_cluster(const RoutedCall *p, const Samples *s, Tile *w, SampledTile *r, int64_t cluster, const int *who, int n_who) {
    const int64_t dim = p->dim, cluster_size = p->cluster_size, at = w->kv_head * p->n_clusters + cluster;
    const uint8_t *int4 = p->int4 + at * cluster_size * dim / 2;
    const float *scales = p->scales + at * cluster_size * 2;
    const int32_t *rows = p->positions + at * cluster_size, most = max_hit_share(p, s, w);
    for (int x = 0; x < n_who; x += AT_ONCE) {
        Searcher searchers[AT_ONCE];
        const int8_t *q[AT_ONCE];
        int32_t sums[AT_ONCE][2];
        const int some = n_who - x < AT_ONCE ? n_who - x : AT_ONCE;
        for (int j = 0; j < AT_ONCE; j++) {
            const int t = who[j < some ? x + j : x];
            q[j] = w->int6 + t * dim;
            memcpy(sums[j], w->int6_sum + 2 * t, sizeof sums[j]);
            /* int4 keys are differences from the centroid */
            const float threshold = (w->threshold[t] - w->logits[t * w->padded + p->sink_columns + cluster]) / w->int6_scale[t];
            const float unit = w->int6_scale[t] * 1.44269504f * 8388608.0f;
            const float *off = r->uncertain + 2 * t;
            searchers[j] = (Searcher){threshold, {s->margin * off[0], s->margin * off[1]}, unit, STRAIGHT_ZERO - threshold * unit,
                                  w->hits + t * w->max_hits, w->n_hits[t],
                                  r->by_int4 + t * p->extra_columns + cluster * s->each, 0, 0, splat(0)};
        }
        for (int64_t b = 0; b < cluster_size / 16; b++) {
            floats low[AT_ONCE][PER_BLOCK], high[AT_ONCE][PER_BLOCK];
            int4_sums(int4 + b * 8 * dim, q, (const int32_t (*)[2])sums, dim / 8, low, high);
            for (int j = 0; j < AT_ONCE; j++)
                if (j < some) weigh_block(searchers + j, scales + 32 * b, rows + 16 * b, low[j], high[j], s->place[cluster], b);
        }
        for (int j = 0; j < some; j++) {
            const int t = who[x + j];
            const int32_t before = w->n_hits[t], n = searchers[j].n;
            w->cluster_hits[t * w->padded + p->sink_columns + cluster] = n - before;
            /* now, while others of the tile read the same */
            if (n > before && n <= most)
                row_dots(r->rows + t * w->max_hits + before, &p->key, w->kv_head, w->hits + t * w->max_hits + before,
                         n - before, w->query + t * dim, dim);
            w->n_hits[t] = n;
            r->unread[t * p->n_clusters + cluster] = total(searchers[j].sum);
            r->shown[t * p->n_clusters + cluster] = searchers[j].shown;
            r->used[t * p->n_clusters + cluster] = searchers[j].used;
        }
    }
}

/* Every query of a tile that has a threshold searches all clusters, or until it has read too much. */
void prescore_search_all(const RoutedCall *p, const Samples *s, Tile *w, SampledTile *r) {
    const int32_t most = max_hit_share(p, s, w);
    int64_t compared = 0;
    for (int64_t t = 0; t < w->n; t++) w->n_hits[t] = 0;
    for (int64_t cluster = 0; cluster < w->clusters; cluster++) {
        int who[TILE], n_who = 0;
        for (int64_t t = 0; t < w->n; t++) {
            who[n_who] = (int)t;
            n_who += w->threshold[t] != INFINITY && w->n_hits[t] <= most;
        }
        if (n_who) search_cluster(p, s, w, r, cluster, who, n_who);
        compared += n_who;
    }
#pragma omp atomic
    p->counts[0] += compared * p->cluster_size;
}
