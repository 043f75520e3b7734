/* Routed attention with sampled unread keys (`tolerance`): what a call is given in addition, and what a tile keeps. */
#ifndef PRESCORE_SAMPLED_H
#define PRESCORE_SAMPLED_H

#include "routed.h"

#define PROJECTIONS 8 /* random projections of values */

/* Must equal `Samples` in routed/error_bound.py. */
typedef struct {
    const uint8_t *active;        /* [kv_heads, n_query]: queries that take part */
    const float *target;          /* [kv_heads, n_query]: the threshold to search with; inf = the samples choose it */
    const int32_t *place;         /* [n_clusters]: which key of each sixteen is sampled */
    const float *columns;         /* [kv_heads, extra_columns / 16, dim, 16] sampled keys */
    const float *values;          /* [kv_heads, extra_columns, value_dim] */
    const float *distance2;       /* [kv_heads, extra_columns]: squared distance of the values from their centroid */
    const float *mean_distance2;  /* [kv_heads, n_clusters]: its mean over the clusters up to here */
    const float *int4_unit;       /* [kv_heads, n_clusters, 2]: what a unit of int4 keys is worth, up to here */
    const float *signs;           /* [PROJECTIONS, value_dim]: random projections */
    const float *projected;       /* [kv_heads, extra_columns / 16, 2 * PROJECTIONS, 16]: values less their centroid, and
                                   * the centroid, projected */
    int64_t each, stride;         /* samples of a cluster, keys that each represents */
    int64_t n_thresholds;         /* thresholds to choose from */
    float step;                   /* from one to the next */
    float allowed;                /* square of the relative error that is aimed at */
    float max_hit_share;          /* share of the far keys from which on reading every key is faster */
    float max_int4_error;         /* standard deviation of int4 logits from which on no search is trusted */
    float margin;                 /* standard deviations of its own error that an int4 logit is raised by */
    float below;                  /* how much less than normal logits those below a threshold vary */
    float *variance, *fourth;     /* [kv_heads, n_query]: sums of the squared lengths of error terms, and of their squares */
    float *overlap;               /* [kv_heads, n_query]: sum of the squares of all products of two terms, estimated */
    uint8_t *refined;             /* [kv_heads, n_query]: whether the threshold is below the first one, or infinite */
} Samples;

/* Of the queries of a tile. Weights are those of single keys, times some factor of the query. */
typedef struct {
    float *drawn;  /* [TILE, extra_columns]: weights of the samples while the threshold is chosen, then for the variance */
    float *by_int4;  /* [TILE, extra_columns]: int4 weights of the samples; -1 = the key is read */
    float *off;    /* [TILE, extra_columns]: true weight less int4 weight, for all keys that a sample represents */
    float *unread; /* [TILE, n_clusters]: int4 weights of all unread keys of a cluster */
    float *shown;  /* [TILE, n_clusters]: of the samples among them */
    float *used;   /* [TILE, n_clusters]: how many samples those are */
    float *alone;  /* [TILE, n_clusters]: unread weight of clusters without an unread sample */
    float *rows;   /* [TILE, max_hits]: logits of the keys read, then their weights */
    float outputs[TILE * MAX_DIM], square[TILE], lse[TILE];
    float uncertain[TILE * 2]; /* standard deviation of the int4 sums of each half, in units of the int6 query */
} SampledTile;

INLINE int64_t filled(int64_t samples) { return (samples + 15) / 16 * 16; }

/* Keys of a query from which on reading every key is faster. */
INLINE int32_t max_hit_share(const RoutedCall *p, const Samples *s, const Tile *w) {
    return (int32_t)(s->max_hit_share * (float)(w->clusters * p->cluster_size));
}

void prescore_choose_thresholds(const RoutedCall *p, const Samples *s, Tile *w, SampledTile *r);
void prescore_search_all(const RoutedCall *p, const Samples *s, Tile *w, SampledTile *r);
void prescore_measure_variance(const RoutedCall *p, const Samples *s, const Tile *w, const SampledTile *r, int64_t t, float mass);

#endif
