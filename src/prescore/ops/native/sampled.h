/* Routed attention with a sampled rest: what a call is given besides, and what a thread keeps of a tile. */
#ifndef PRESCORE_SAMPLED_H
#define PRESCORE_SAMPLED_H

#include "routed.h"

#define SHADOWS 8 /* random projections of values */

/* Must equal `Samples` in routed/compiled/buffers.py. */
typedef struct {
    const uint8_t *active;      /* [lanes, n_query]: queries that take part */
    const float *aim;           /* [lanes, n_query]: the limit to search with; inf = the samples choose it */
    const int32_t *place;       /* [node_room]: which key of each sixteen */
    const float *columns;       /* [lanes, more / 16, dim, 16] keys */
    const float *values;        /* [lanes, more, value_dim] */
    const float *apart;         /* [lanes, more]: squares of the values' distances from their node's mean */
    const float *usual;         /* [lanes, node_room]: the mean of those of the nodes up to here */
    const float *coarse;        /* [lanes, node_room, 2]: what a unit of the codes of the nodes up to here is worth */
    const float *signs;         /* [SHADOWS, value_dim]: what values are projected on */
    const float *shadows;       /* [lanes, more / 16, 2 * SHADOWS, 16]: what the values differ from their node's mean, and
                                 * the mean itself, projected */
    int64_t each, stride;       /* samples of a node, keys that each stands for */
    int64_t aims;               /* limits to choose from */
    float step;                 /* from one to the next */
    float allowed;              /* square of the relative error that is aimed at */
    float most_rows;            /* share of the keys in nodes from which on single rows are not worth reading */
    float most_off;             /* deviation of coded logits from which on no search is trusted */
    float margin;               /* deviations of its own error that a coded logit is lifted by */
    float below;                /* how much less than normal logits those below a limit spread, at most */
    float *variance, *fourth;   /* [lanes, n_query]: sums of squares of the terms' lengths, and of their squares */
    float *overlap;             /* [lanes, n_query]: sum of the squares of all products of two terms, estimated */
    uint8_t *further;           /* [lanes, n_query]: whether the limit is below the first one, or infinite */
} Samples;

/* Of the queries of a tile. Weights are those of single keys, times some factor of the query. */
typedef struct {
    float *drawn;  /* [TILE, more]: weights of the samples while the limit is chosen, then what `prescore_measure` needs */
    float *coded;  /* [TILE, more]: weights of the samples by their codes; -1 = read by itself */
    float *off;    /* [TILE, more]: what a sample's weight differs from that by its code, for all keys it stands for */
    float *unread; /* [TILE, node_room]: weights by their codes of all keys of a node that are not read */
    float *shown;  /* [TILE, node_room]: of the samples among them */
    float *used;   /* [TILE, node_room]: how many samples those are */
    float *alone;  /* [TILE, node_room]: those of nodes of which no sample is left */
    float *rows;   /* [TILE, found_room]: logits of the rows found, then their weights */
    float outputs[TILE * MOST_DIM], square[TILE], lse[TILE];
    float uncertain[TILE * 2]; /* deviation of the sums of each half of the codes, in units of the query's code */
} Rest;

INLINE int64_t filled(int64_t samples) { return (samples + 15) / 16 * 16; }

/* Rows of a query from which on reading everything is faster. */
INLINE int32_t most_rows(const Problem *p, const Samples *s, const Work *w) {
    return (int32_t)(s->most_rows * (float)(w->nodes * p->leaf));
}

void prescore_aim(const Problem *p, const Samples *s, Work *w, Rest *r);
void prescore_search_all(const Problem *p, const Samples *s, Work *w, Rest *r);
void prescore_measure(const Problem *p, const Samples *s, const Work *w, const Rest *r, int64_t t, float mass);

#endif
