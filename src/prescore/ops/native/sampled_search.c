/* A search of every node that also weighs what it does not find, by the codes.
 *
 * Weights are in units of the limit's, so that all of them are below one.
 */
#include "coded.h"
#include "sampled.h"

/* A query of those that search together, at one node. */
typedef struct {
    float limit, lift[2]; /* in units of the code */
    float unit, zero;     /* what a unit of the code is worth, and the limit, as `straight_exp2` takes them */
    int32_t *found, n;
    float *coded, shown, used; /* samples: each, and their sum and number */
    floats sum;
} Seeker;

/* Sixteen keys of a node that a seeker met: what it reads, and what the others weigh. */
INLINE void weigh_block(Seeker *k, const float *scales, const int32_t *rows, const floats *low, const floats *high,
                        int32_t place, int64_t block) {
    unsigned above = 0;
    floats light[PER_BLOCK];
    for (int i = 0; i < PER_BLOCK; i++) {
        const floats s0 = load(scales + i * WIDTH), s1 = load(scales + 16 + i * WIDTH);
        const floats x = s0 * low[i] + s1 * high[i], lifted = s0 * splat(k->lift[0]) + (s1 * splat(k->lift[1]) + x);
        light[i] = straight_exp2(x * splat(k->unit) + splat(k->zero));
#if defined(__AVX512F__)
        const __mmask16 read = _mm512_cmp_ps_mask((__m512)lifted, _mm512_set1_ps(k->limit), _CMP_GE_OQ);
        k->sum = (floats)_mm512_mask_add_ps((__m512)k->sum, (__mmask16)~read, (__m512)k->sum, (__m512)light[i]);
        above = read;
#else
        const ints read = lifted >= splat(k->limit);
        k->sum += choose(read, splat(0.0f), light[i]);
        above |= bits(read) << (i * WIDTH);
#endif
    }
    k->n = append_rows(k->found, k->n, rows, above);
    const float own = (above >> place) & 1 ? -1.0f : ((const float *)light)[place];
    k->coded[block] = own;
    k->shown += own >= 0 ? own : 0.0f;
    k->used += own >= 0 ? 1.0f : 0.0f;
}

static void search_node(const Problem *p, const Samples *s, Work *w, Rest *r, int64_t node, const int *who, int n_who) {
    const int64_t dim = p->dim, leaf = p->leaf, at = w->lane * p->node_room + node;
    const uint8_t *codes = p->codes + at * leaf * dim / 2;
    const float *scales = p->scales + at * leaf * 2;
    const int32_t *rows = p->rows + at * leaf, most = most_rows(p, s, w);
    for (int x = 0; x < n_who; x += AT_ONCE) {
        Seeker seekers[AT_ONCE];
        const int8_t *q[AT_ONCE];
        int32_t sums[AT_ONCE][2];
        const int some = n_who - x < AT_ONCE ? n_who - x : AT_ONCE;
        for (int j = 0; j < AT_ONCE; j++) {
            const int t = who[j < some ? x + j : x];
            q[j] = w->code + t * dim;
            memcpy(sums[j], w->code_sum + 2 * t, sizeof sums[j]);
            /* codes are of what a key differs from the mean */
            const float limit = (w->limit[t] - w->logits[t * w->padded + p->sink_room + node]) / w->code_scale[t];
            const float unit = w->code_scale[t] * 1.44269504f * 8388608.0f;
            const float *off = r->uncertain + 2 * t;
            seekers[j] = (Seeker){limit, {s->margin * off[0], s->margin * off[1]}, unit, STRAIGHT_ZERO - limit * unit,
                                  w->found + t * w->found_room, w->n_found[t],
                                  r->coded + t * p->more + node * s->each, 0, 0, splat(0)};
        }
        for (int64_t b = 0; b < leaf / 16; b++) {
            floats low[AT_ONCE][PER_BLOCK], high[AT_ONCE][PER_BLOCK];
            code_sums(codes + b * 8 * dim, q, (const int32_t (*)[2])sums, dim / 8, low, high);
            for (int j = 0; j < AT_ONCE; j++)
                if (j < some) weigh_block(seekers + j, scales + 32 * b, rows + 16 * b, low[j], high[j], s->place[node], b);
        }
        for (int j = 0; j < some; j++) {
            const int t = who[x + j];
            const int32_t before = w->n_found[t], n = seekers[j].n;
            w->hits[t * w->padded + p->sink_room + node] = n - before;
            /* now, while others of the tile read the same */
            if (n > before && n <= most)
                row_dots(r->rows + t * w->found_room + before, &p->key, w->lane, w->found + t * w->found_room + before,
                         n - before, w->query + t * dim, dim);
            w->n_found[t] = n;
            r->unread[t * p->node_room + node] = total(seekers[j].sum);
            r->shown[t * p->node_room + node] = seekers[j].shown;
            r->used[t * p->node_room + node] = seekers[j].used;
        }
    }
}

/* Every query of a tile that has a limit searches all nodes, or until it has found too much. */
void prescore_search_all(const Problem *p, const Samples *s, Work *w, Rest *r) {
    const int32_t most = most_rows(p, s, w);
    int64_t searched = 0;
    for (int64_t t = 0; t < w->n; t++) w->n_found[t] = 0;
    for (int64_t node = 0; node < w->nodes; node++) {
        int who[TILE], n_who = 0;
        for (int64_t t = 0; t < w->n; t++) {
            who[n_who] = (int)t;
            n_who += w->limit[t] != INFINITY && w->n_found[t] <= most;
        }
        if (n_who) search_node(p, s, w, r, node, who, n_who);
        searched += n_who;
    }
#pragma omp atomic
    p->counts[0] += searched * p->leaf;
}
