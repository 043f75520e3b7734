/* Which far keys a query reads: those whose int4 logit reaches its threshold.
 *
 * Every query compares the outliers of each cluster. It compares the other keys only of clusters whose centroid lies within
 * `search_stds` standard deviations of the threshold.
 */
#include "int4.h"
#include "routed.h"

/* Which of sixteen keys reach a threshold, by the int4 sums of both halves. */
INLINE unsigned reaching(const floats *low, const floats *high, const float *scales, float threshold) {
    unsigned above = 0;
    for (int k = 0; k < PER_BLOCK; k++) {
        const floats x = load(scales + k * WIDTH) * low[k] + load(scales + 16 + k * WIDTH) * high[k];
        above |= at_least(x, splat(threshold)) << (k * WIDTH);
    }
    return above;
}

/* Some keys of a cluster, sixteen side by side. */
typedef struct {
    const uint8_t *int4;
    const float *scales;
    const int32_t *rows;
    int64_t blocks;
} Keys;

/* The keys among them that the searching queries read. */
INLINE void search_int4(const RoutedCall *p, Tile *w, int64_t cluster, const Keys *keys, const int *who, int n_who,
                         const int64_t eighth) {
    const int64_t dim = 8 * eighth, column = p->sink_columns + cluster;
    for (int x = 0; x < n_who; x += AT_ONCE) {
        const int8_t *q[AT_ONCE];
        int32_t sums[AT_ONCE][2];
        float thresholds[AT_ONCE];
        const int some = n_who - x < AT_ONCE ? n_who - x : AT_ONCE;
        for (int j = 0; j < AT_ONCE; j++) {
            const int t = who[j < some ? x + j : x];
            q[j] = w->int6 + t * dim;
            memcpy(sums[j], w->int6_sum + 2 * t, sizeof sums[j]);
            /* int4 keys are differences from the centroid */
            thresholds[j] = (w->threshold[t] - w->logits[t * w->padded + column]) * w->int6_inverse[t];
        }
        for (int64_t b = 0; b < keys->blocks; b++) {
            floats low[AT_ONCE][PER_BLOCK], high[AT_ONCE][PER_BLOCK];
            unsigned above[AT_ONCE], any = 0;
            int4_sums(keys->int4 + b * 8 * dim, q, (const int32_t (*)[2])sums, eighth, low, high);
            for (int j = 0; j < AT_ONCE; j++)
                any |= above[j] = reaching(low[j], high[j], keys->scales + 32 * b, thresholds[j]);
            if (!any) continue; /* nearly always */
            for (int j = 0; j < some; j++) {
                const int t = who[x + j];
                const int32_t before = w->n_hits[t];
                w->n_hits[t] = append_rows(w->hits + t * w->max_hits, before, keys->rows + 16 * b, above[j]);
                w->cluster_hits[t * w->padded + column] += w->n_hits[t] - before;
            }
        }
    }
}

/* The same, compiled for the head dimensions that most models have. */
static void search_keys(const RoutedCall *p, Tile *w, int64_t cluster, const Keys *keys, const int *who, int n_who) {
    if (p->dim == 64)
        search_int4(p, w, cluster, keys, who, n_who, 8);
    else if (p->dim == 128)
        search_int4(p, w, cluster, keys, who, n_who, 16);
    else
        search_int4(p, w, cluster, keys, who, n_who, p->dim / 8);
}

/* The keys that the queries of a tile read, from their thresholds. */
void prescore_find_keys(const RoutedCall *p, Tile *w) {
    const int64_t dim = p->dim, cluster_size = p->cluster_size;
    float least[TILE];
    int searching[TILE], n_searching = 0;
    int64_t compared = 0;
    for (int64_t t = 0; t < w->n; t++) {
        least[t] = w->threshold[t] - p->search_stds * w->std[t];
        w->int6_inverse[t] = 1.0f / w->int6_scale[t];
        searching[n_searching] = (int)t;
        n_searching += w->threshold[t] < INFINITY;
        w->n_hits[t] = 0;
        memset(w->cluster_hits + t * w->padded, 0, sizeof(int32_t) * (size_t)w->columns);
    }
    for (int64_t cluster = 0; cluster < w->clusters; cluster++) {
        const int64_t at = w->kv_head * p->n_clusters + cluster;
        const Keys odd = {p->outlier_int4 + at * OUTLIERS * dim / 2, p->outlier_scales + at * OUTLIERS * 2, p->positions + at * cluster_size, 1};
        search_keys(p, w, cluster, &odd, searching, n_searching);
        int who[TILE], n_who = 0;
        const float *logit = w->logits + p->sink_columns + cluster;
        for (int64_t t = 0; t < w->n; t++) {
            who[n_who] = (int)t;
            n_who += logit[t * w->padded] >= least[t];
        }
        if (!n_who) continue;
        const Keys rest = {p->int4 + (at * cluster_size + OUTLIERS) * dim / 2, p->scales + (at * cluster_size + OUTLIERS) * 2,
                           p->positions + at * cluster_size + OUTLIERS, cluster_size / 16 - 1};
        search_keys(p, w, cluster, &rest, who, n_who);
        compared += n_who;
    }
#pragma omp atomic
    p->counts[0] += compared * (cluster_size - OUTLIERS) + n_searching * w->clusters * OUTLIERS;
}
