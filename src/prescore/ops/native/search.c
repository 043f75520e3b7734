/* Which rows a query reads by itself: those whose logit, by four-bit keys and a six-bit query, reaches its limit.
 *
 * Only nodes that may hold such a key are searched: a node's logits lie around that of its mean with the deviation
 * that the pooled covariance gives for this query, and `reach` deviations are looked at.
 */
#include "coded.h"
#include "routed.h"

/* Which of sixteen keys reach a limit, by the sums of both halves of their codes. */
INLINE unsigned reaching(const floats *low, const floats *high, const float *scales, float limit) {
    unsigned above = 0;
    for (int k = 0; k < PER_BLOCK; k++) {
        const floats x = load(scales + k * WIDTH) * low[k] + load(scales + 16 + k * WIDTH) * high[k];
        above |= at_least(x, splat(limit)) << (k * WIDTH);
    }
    return above;
}

/* The rows of one node for the queries that search it. */
INLINE void search_codes(const Problem *p, Work *w, int64_t node, const int *who, int n_who, const int64_t eighth) {
    const int64_t dim = 8 * eighth, leaf = p->leaf, at = w->lane * p->node_room + node;
    const uint8_t *codes = p->codes + at * leaf * dim / 2;
    const float *scales = p->scales + at * leaf * 2;
    const int32_t *rows = p->rows + at * leaf;
    for (int x = 0; x < n_who; x += AT_ONCE) {
        const int8_t *q[AT_ONCE];
        int32_t sums[AT_ONCE][2], n[AT_ONCE];
        float limits[AT_ONCE];
        int32_t *found[AT_ONCE];
        const int some = n_who - x < AT_ONCE ? n_who - x : AT_ONCE;
        for (int j = 0; j < AT_ONCE; j++) {
            const int t = who[j < some ? x + j : x];
            q[j] = w->code + t * dim;
            memcpy(sums[j], w->code_sum + 2 * t, sizeof sums[j]);
            /* codes are of what a key differs from the mean */
            limits[j] = (w->limit[t] - w->logits[t * w->padded + p->sink_room + node]) / w->code_scale[t];
            found[j] = w->found + t * w->found_room;
            n[j] = w->n_found[t];
        }
        for (int64_t b = 0; b < leaf / 16; b++) {
            floats low[AT_ONCE][PER_BLOCK], high[AT_ONCE][PER_BLOCK];
            unsigned above[AT_ONCE], any = 0;
            code_sums(codes + b * 8 * dim, q, (const int32_t (*)[2])sums, eighth, low, high);
            for (int j = 0; j < AT_ONCE; j++)
                any |= above[j] = reaching(low[j], high[j], scales + 32 * b, limits[j]);
            if (!any) continue; /* as nearly always */
            for (int j = 0; j < some; j++) n[j] = append_rows(found[j], n[j], rows + 16 * b, above[j]);
        }
        for (int j = 0; j < some; j++) {
            const int t = who[x + j];
            w->hits[t * w->padded + p->sink_room + node] = n[j] - w->n_found[t];
            w->n_found[t] = n[j];
        }
    }
}

/* The same, with the sizes that most models have known to the compiler. */
static void search_node(const Problem *p, Work *w, int64_t node, const int *who, int n_who) {
    if (p->dim == 64)
        search_codes(p, w, node, who, n_who, 8);
    else if (p->dim == 128)
        search_codes(p, w, node, who, n_who, 16);
    else
        search_codes(p, w, node, who, n_who, p->dim / 8);
}

/* Find the rows of a tile whose limits are known. */
void prescore_find_rows(const Problem *p, Work *w) {
    float least[TILE];
    int64_t searched = 0;
    for (int64_t t = 0; t < w->n; t++) {
        least[t] = w->limit[t] - p->reach * w->spread[t];
        w->n_found[t] = 0;
        memset(w->hits + t * w->padded, 0, sizeof(int32_t) * (size_t)w->columns);
    }
    for (int64_t node = 0; node < w->nodes; node++) {
        int who[TILE], n_who = 0;
        const float *logit = w->logits + p->sink_room + node;
        for (int64_t t = 0; t < w->n; t++) {
            who[n_who] = (int)t;
            n_who += logit[t * w->padded] >= least[t];
        }
        if (n_who) search_node(p, w, node, who, n_who);
        searched += n_who;
    }
#pragma omp atomic
    p->counts[0] += searched * p->leaf;
}
