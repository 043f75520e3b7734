/* Nodes of chunks of keys: a balanced tree by bisection, means, codes of the differences, covariances. One chunk of one
 * lane is a thread's job. The same as clustering/tree.py, routed/tables.py and routed/codes.py compute. */
#include "routed.h"

/* Must equal `NodeCall` in routed/compiled/nodes.py. */
typedef struct {
    Rows key, value;
    int64_t lanes, begin, chunks, chunk, levels, leaf, dim, value_dim, fit_size;
    int32_t *rows;                 /* [lanes, nodes, leaf] */
    float *node_key, *node_value;  /* [lanes, nodes, dim], [lanes, nodes, value_dim] */
    uint8_t *codes;                /* [lanes, nodes, leaf / 16, dim / 8, 16, 4] */
    float *scales;                 /* [lanes, nodes, leaf / 16, 2, 16] */
    float *spread, *drift;         /* [lanes, chunks, dim, dim], [lanes, chunks, dim, value_dim] */
} NodeCall;

typedef struct {
    float *points, *values, *moved, *covariance, *places;
    int32_t *order, *ranks, *room;
} Bench;

static void unit(float *v, int64_t dim) {
    float peak = 0, square = 0;
    for (int64_t i = 0; i < dim; i++) peak = fabsf(v[i]) > peak ? fabsf(v[i]) : peak;
    if (peak == 0) peak = 1;
    for (int64_t i = 0; i < dim; i++) {
        v[i] /= peak;
        square += v[i] * v[i];
    }
    const float length = square > 0 ? sqrtf(square) : 1.0f;
    for (int64_t i = 0; i < dim; i++) v[i] /= length;
}

/* Place of every point along the main direction of its node. */
static void project(const NodeCall *c, const Bench *b, const float *points, int64_t size, float *places) {
    const int64_t dim = c->dim, stride = size / c->fit_size > 1 ? size / c->fit_size : 1;
    const int64_t n = (size + stride - 1) / stride;
    float mean[MOST_DIM] = {0}, direction[MOST_DIM], next[MOST_DIM];
    for (int64_t i = 0; i < n; i++) add_scaled(mean, points + i * stride * dim, 1.0f / (float)n, dim);
    for (int64_t i = 0; i < n; i++)
        for (int64_t d = 0; d < dim; d += WIDTH)
            store(b->moved + i * dim + d, load(points + i * stride * dim + d) - load(mean + d));
    second_moment(b->covariance, b->moved, n, dim);
    int64_t widest = 0;
    for (int64_t d = 1; d < dim; d++)
        if (b->covariance[d * dim + d] > b->covariance[widest * dim + widest]) widest = d;
    memcpy(direction, b->covariance + widest * dim, sizeof(float) * (size_t)dim);
    for (int step = 0; step < 3; step++) {
        unit(direction, dim);
        product(next, dim, direction, dim, 1, 1, b->covariance, dim, dim, dim, 0);
        memcpy(direction, next, sizeof(float) * (size_t)dim);
    }
    unit(direction, dim);
    for (int64_t i = 0; i < size; i++) places[i] = dot(points + i * dim, direction, dim);
}

/* Ranks by place, equal ones in their order: a merge sort, which no NaN can lead astray. */
static void sort_ranks(const float *places, int32_t *ranks, int32_t *room, int64_t n) {
    for (int64_t i = 0; i < n; i++) ranks[i] = (int32_t)i;
    for (int64_t width = 1; width < n; width *= 2) {
        for (int64_t begin = 0; begin < n; begin += 2 * width) {
            int64_t left = begin, middle = begin + width < n ? begin + width : n;
            int64_t right = middle, stop = begin + 2 * width < n ? begin + 2 * width : n;
            for (int64_t i = begin; i < stop; i++)
                room[i] = left < middle && (right >= stop || !(places[ranks[right]] < places[ranks[left]])) ? ranks[left++]
                                                                                                            : ranks[right++];
        }
        memcpy(ranks, room, sizeof(int32_t) * (size_t)n);
    }
}

/* The points of a chunk in tree order. */
static void bisect(const NodeCall *c, Bench *b) {
    const int64_t dim = c->dim;
    for (int64_t i = 0; i < c->chunk; i++) b->order[i] = (int32_t)i;
    for (int64_t level = 0; level < c->levels; level++) {
        const int64_t size = c->chunk >> level;
        for (int64_t begin = 0; begin < c->chunk; begin += size) {
            float *points = b->points + begin * dim;
            project(c, b, points, size, b->places);
            sort_ranks(b->places, b->ranks, b->room, size);
            for (int64_t i = 0; i < size; i++) {
                memcpy(b->moved + i * dim, points + b->ranks[i] * dim, sizeof(float) * (size_t)dim);
                b->room[i] = b->order[begin + b->ranks[i]];
            }
            memcpy(points, b->moved, sizeof(float) * (size_t)(size * dim));
            memcpy(b->order + begin, b->room, sizeof(int32_t) * (size_t)size);
        }
    }
}

static void load_points(const Rows *r, int64_t lane, int64_t row, float *to, int64_t dim) {
    const int64_t offset = row_offset(r, lane, row);
    for (int64_t i = 0; i < dim; i += WIDTH) store(to + i, load_row(r, offset, i));
}

/* The longest differences from a node's mean come first, all others keep their order. Lengths are compared by their leading
 * bits, and of equal ones the earliest key is taken: so the choice is hardly ever one of rounding. */
static void put_odd_first(const NodeCall *c, const Bench *b, int64_t node) {
    const int64_t dim = c->dim, leaf = c->leaf;
    float *points = b->points + node * leaf * dim;
    int32_t *order = b->order + node * leaf, *lengths = b->ranks, *room = b->room;
    for (int64_t i = 0; i < leaf; i++) {
        const float square = dot(points + i * dim, points + i * dim, dim);
        memcpy(lengths + i, &square, sizeof square);
        lengths[i] = lengths[i] >> 16 & 0x7fff;
    }
    for (int64_t k = 0; k < ODD; k++) {
        int64_t most = 0; /* taken ones are -1 */
        for (int64_t i = 1; i < leaf; i++)
            if (lengths[i] > lengths[most] || (lengths[i] == lengths[most] && order[i] < order[most])) most = i;
        lengths[most] = -1;
    }
    for (int64_t i = 0, odd = 0, rest = ODD; i < leaf; i++) {
        const int64_t to = lengths[i] < 0 ? odd++ : rest++;
        memcpy(b->moved + to * dim, points + i * dim, sizeof(float) * (size_t)dim);
        room[to] = order[i];
    }
    memcpy(points, b->moved, sizeof(float) * (size_t)(leaf * dim));
    memcpy(order, room, sizeof(int32_t) * (size_t)leaf);
}

/* The mean of a node's rows, which become differences from it. */
static void centre(float *rows, float *mean, int64_t n, int64_t dim) {
    memset(mean, 0, sizeof(float) * (size_t)dim);
    for (int64_t i = 0; i < n; i++) add_scaled(mean, rows + i * dim, 1.0f, dim);
    for (int64_t d = 0; d < dim; d++) mean[d] /= (float)n;
    for (int64_t i = 0; i < n; i++) add_scaled(rows + i * dim, mean, -1.0f, dim);
}

/* Numbers of a half of a key as whole ones from 0 to 15; what a unit is worth. */
static float encode_half(const float *part, uint8_t *numbers, int64_t half) {
    int32_t most = 0, whole[MOST_DIM];
    for (int64_t i = 0; i < half; i++) { /* lengths are ordered as their bits are */
        int32_t length;
        memcpy(&length, part + i, sizeof length);
        length &= 0x7fffffff;
        most = length > most ? length : most;
    }
    float scale;
    memcpy(&scale, &most, sizeof scale);
    scale /= 7.49f; /* half a unit beyond 7 would be a tie */
    const float by = scale > 1.17549435e-38f ? scale : 1.17549435e-38f;
    for (int64_t i = 0; i < half; i++) {
        float x = part[i] / by;
        x = x > -8.0f ? x : -8.0f; /* NaN becomes a number too */
        x = (x < 7.0f ? x : 7.0f) + 12582912.0f;
        whole[i] = (int32_t)(x - 12582912.0f) + 8;
    }
    for (int64_t i = 0; i < half; i++) numbers[i] = (uint8_t)whole[i];
    return scale;
}

/* Codes of sixteen keys side by side. */
static void encode(const float *keys, uint8_t *codes, float *scales, int64_t dim) {
    const int64_t half = dim / 2;
    for (int64_t key = 0; key < 16; key++) {
        uint8_t numbers[MOST_DIM];
        for (int64_t h = 0; h < 2; h++)
            scales[16 * h + key] = encode_half(keys + key * dim + h * half, numbers + h * half, half);
        for (int64_t i = 0; i < dim / 8; i++)
            for (int64_t k = 0; k < 4; k++)
                codes[(i * 16 + key) * 4 + k] = (uint8_t)(numbers[4 * i + k] | numbers[half + 4 * i + k] << 4);
    }
}

static void build_chunk(const NodeCall *c, Bench *b, int64_t lane, int64_t chunk) {
    const int64_t dim = c->dim, wide = c->value_dim, leaf = c->leaf, each = c->chunk / leaf;
    const int64_t begin = c->begin + chunk * c->chunk, first = (lane * c->chunks + chunk) * each, at = lane * c->chunks + chunk;
    for (int64_t i = 0; i < c->chunk; i++) load_points(&c->key, lane, begin + i, b->points + i * dim, dim);
    bisect(c, b);
    for (int64_t node = 0; node < each; node++) {
        centre(b->points + node * leaf * dim, c->node_key + (first + node) * dim, leaf, dim);
        put_odd_first(c, b, node);
    }
    for (int64_t i = 0; i < c->chunk; i++) {
        c->rows[first * leaf + i] = (int32_t)(begin + b->order[i]);
        load_points(&c->value, lane, begin + b->order[i], b->values + i * wide, wide);
    }
    for (int64_t node = 0; node < each; node++) {
        centre(b->values + node * leaf * wide, c->node_value + (first + node) * wide, leaf, wide);
        for (int64_t k = 0; k < leaf; k += 16)
            encode(b->points + (node * leaf + k) * dim, c->codes + ((first + node) * leaf + k) * dim / 2,
                   c->scales + ((first + node) * leaf + k) * 2, dim);
    }
    const floats part = splat(1.0f / (float)c->chunk);
    float *spread = c->spread + at * dim * dim, *drift = c->drift + at * dim * wide;
    second_moment(spread, b->points, c->chunk, dim);
    turned_product(drift, wide, b->points, dim, dim, b->values, wide, c->chunk, wide, 0);
    for (int64_t i = 0; i < dim * dim; i += WIDTH) store(spread + i, load(spread + i) * part);
    for (int64_t i = 0; i < dim * wide; i += WIDTH) store(drift + i, load(drift + i) * part);
}

/* Returns 0, or 1 where there was no memory. */
PRESCORE_EXPORT int prescore_build_nodes(const NodeCall *c) {
    const int64_t dim = c->dim, wide = c->value_dim, size = c->chunk;
    int failed = 0;
#pragma omp parallel num_threads(prescore_threads()) if (c->lanes * c->chunks > 1)
    {
        const int64_t numbers = size * (2 * dim + wide + 4) + dim * dim + 4 * 64;
        float *memory = aligned_alloc(64, ((size_t)numbers * sizeof(float) + 63) / 64 * 64);
        Bench b = {0};
        if (memory) {
            b.points = memory;
            b.moved = b.points + size * dim;
            b.values = b.moved + size * dim;
            b.covariance = b.values + size * wide;
            b.places = b.covariance + dim * dim;
            b.order = (int32_t *)(b.places + size);
            b.ranks = b.order + size;
            b.room = b.ranks + size;
        } else {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t job = 0; job < c->lanes * c->chunks; job++)
            if (memory) build_chunk(c, &b, job / c->chunks, job % c->chunks);
        free(memory);
    }
    return failed;
}
