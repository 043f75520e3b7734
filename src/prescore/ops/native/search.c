/* Which rows a query reads by itself: those whose logit, by four-bit keys and a six-bit query, reaches its limit.
 *
 * Every query compares the odd keys of each node, which lie farthest from the mean. The others only of nodes that may hold
 * such a key: their logits lie around that of the mean with the deviation that the pooled covariance gives for this query,
 * and `reach` deviations are looked at.
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

/* Some keys of a node, sixteen side by side. */
typedef struct {
    const uint8_t *codes;
    const float *scales;
    const int32_t *rows;
    int64_t blocks;
} Keys;

/* The rows among them for the queries that search them. */
INLINE void search_codes(const Problem *p, Work *w, int64_t node, const Keys *keys, const int *who, int n_who,
                         const int64_t eighth) {
    const int64_t dim = 8 * eighth, column = p->sink_room + node;
    for (int x = 0; x < n_who; x += AT_ONCE) {
        const int8_t *q[AT_ONCE];
        int32_t sums[AT_ONCE][2];
        float limits[AT_ONCE];
        const int some = n_who - x < AT_ONCE ? n_who - x : AT_ONCE;
        for (int j = 0; j < AT_ONCE; j++) {
            const int t = who[j < some ? x + j : x];
            q[j] = w->code + t * dim;
            memcpy(sums[j], w->code_sum + 2 * t, sizeof sums[j]);
            /* codes are of what a key differs from the mean */
            limits[j] = (w->limit[t] - w->logits[t * w->padded + column]) * w->per_code[t];
        }
        for (int64_t b = 0; b < keys->blocks; b++) {
            floats low[AT_ONCE][PER_BLOCK], high[AT_ONCE][PER_BLOCK];
            unsigned above[AT_ONCE], any = 0;
            code_sums(keys->codes + b * 8 * dim, q, (const int32_t (*)[2])sums, eighth, low, high);
            for (int j = 0; j < AT_ONCE; j++)
                any |= above[j] = reaching(low[j], high[j], keys->scales + 32 * b, limits[j]);
            if (!any) continue; /* as nearly always */
            for (int j = 0; j < some; j++) {
                const int t = who[x + j];
                const int32_t before = w->n_found[t];
                w->n_found[t] = append_rows(w->found + t * w->found_room, before, keys->rows + 16 * b, above[j]);
                w->hits[t * w->padded + column] += w->n_found[t] - before;
            }
        }
    }
}

/* The same, with the sizes that most models have known to the compiler. */
static void search_keys(const Problem *p, Work *w, int64_t node, const Keys *keys, const int *who, int n_who) {
    if (p->dim == 64)
        search_codes(p, w, node, keys, who, n_who, 8);
    else if (p->dim == 128)
        search_codes(p, w, node, keys, who, n_who, 16);
    else
        search_codes(p, w, node, keys, who, n_who, p->dim / 8);
}

/* Find the rows of a tile whose limits are known. */
void prescore_find_rows(const Problem *p, Work *w) {
    const int64_t dim = p->dim, leaf = p->leaf;
    float least[TILE];
    int looking[TILE], n_looking = 0;
    int64_t searched = 0;
    for (int64_t t = 0; t < w->n; t++) {
        least[t] = w->limit[t] - p->reach * w->spread[t];
        w->per_code[t] = 1.0f / w->code_scale[t];
        looking[n_looking] = (int)t;
        n_looking += w->limit[t] < INFINITY;
        w->n_found[t] = 0;
        memset(w->hits + t * w->padded, 0, sizeof(int32_t) * (size_t)w->columns);
    }
    for (int64_t node = 0; node < w->nodes; node++) {
        const int64_t at = w->lane * p->node_room + node;
        const Keys odd = {p->odd_codes + at * ODD * dim / 2, p->odd_scales + at * ODD * 2, p->rows + at * leaf, 1};
        search_keys(p, w, node, &odd, looking, n_looking);
        int who[TILE], n_who = 0;
        const float *logit = w->logits + p->sink_room + node;
        for (int64_t t = 0; t < w->n; t++) {
            who[n_who] = (int)t;
            n_who += logit[t * w->padded] >= least[t];
        }
        if (!n_who) continue;
        const Keys rest = {p->codes + (at * leaf + ODD) * dim / 2, p->scales + (at * leaf + ODD) * 2,
                           p->rows + at * leaf + ODD, leaf / 16 - 1};
        search_keys(p, w, node, &rest, who, n_who);
        searched += n_who;
    }
#pragma omp atomic
    p->counts[0] += searched * (leaf - ODD) + n_looking * w->nodes * ODD;
}
