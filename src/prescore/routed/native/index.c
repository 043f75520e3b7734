/* The key index of chunks: a balanced tree by bisection, centroids, subclusters, int8 keys, covariances. One chunk of one KV head
 * is a thread's job. Computes what `build_index` in routed/reference.py does. */
#include "int8.h"
#include "routed.h"

/* Must equal `IndexCall` in routed/native/__init__.py. */
typedef struct {
    Rows key, value;
    int64_t kv_heads, begin, chunks, chunk_size, levels, cluster_size, dim, value_dim, fit_size;
    double cluster_reach; /* a radius is so many times the root-mean-square distance */
    int32_t *positions;                   /* [kv_heads, clusters, cluster_size] */
    float *centroid_key, *centroid_value; /* [kv_heads, clusters, dim], [kv_heads, clusters, value_dim] */
    uint8_t *int8;                        /* [kv_heads, clusters, cluster_size / 16, dim / 4, 16, 4] */
    float *scales;                        /* [kv_heads, clusters] */
    uint8_t *sub_int8;                    /* [kv_heads, clusters, cluster_size / 16, dim] */
    float *sub_scales;                    /* [kv_heads, clusters] */
    float *spread;                        /* [kv_heads, clusters, cluster_size / 16] */
    float *radius;                        /* [kv_heads, clusters] */
    float *key_cov, *key_value_cov;       /* [kv_heads, chunks, dim, dim], [kv_heads, chunks, dim, value_dim] */
} IndexCall;

typedef struct {
    float *points, *values, *moved, *covariance, *places;
    int32_t *order, *ranks, *spare;
} Scratch;

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

/* The same for few points of many dimensions, less their mean, by products of points with points, a far smaller matrix. */
static void project_few(const Scratch *b, int64_t n, int64_t dim, float *places) {
    float next[MAX_DIM], squares[MAX_DIM] = {0};
    int64_t widest = 0;
    for (int64_t i = 0; i < n; i++)
        for (int64_t d = 0; d < dim; d++) squares[d] += b->moved[i * dim + d] * b->moved[i * dim + d];
    for (int64_t d = 1; d < dim; d++)
        if (squares[d] > squares[widest]) widest = d;
    for (int64_t i = 0; i < n; i++) {
        places[i] = b->moved[i * dim + widest];
        for (int64_t j = 0; j <= i; j++)
            b->covariance[i * n + j] = b->covariance[j * n + i] = dot(b->moved + i * dim, b->moved + j * dim, dim);
    }
    for (int step = 0; step < 4; step++) {
        unit(places, n);
        for (int64_t i = 0; i < n; i++) {
            next[i] = 0;
            for (int64_t j = 0; j < n; j++) next[i] += places[j] * b->covariance[i * n + j];
        }
        memcpy(places, next, sizeof(float) * (size_t)n);
    }
}

/* Place of every point along the first principal component of the points. */
static void project(const IndexCall *c, const Scratch *b, const float *points, int64_t size, float *places) {
    const int64_t dim = c->dim, stride = size / c->fit_size > 1 ? size / c->fit_size : 1;
    const int64_t n = (size + stride - 1) / stride;
    float mean[MAX_DIM] = {0}, direction[MAX_DIM], next[MAX_DIM];
    for (int64_t i = 0; i < n; i++) add_scaled(mean, points + i * stride * dim, 1.0f / (float)n, dim);
    for (int64_t i = 0; i < n; i++)
        for (int64_t d = 0; d < dim; d += WIDTH)
            store(b->moved + i * dim + d, load(points + i * stride * dim + d) - load(mean + d));
    if (stride == 1 && 2 * size <= dim) {
        project_few(b, n, dim, places);
        return;
    }
    second_moment(b->covariance, b->moved, n, dim);
    int64_t widest = 0;
    for (int64_t d = 1; d < dim; d++)
        if (b->covariance[d * dim + d] > b->covariance[widest * dim + widest]) widest = d;
    memcpy(direction, b->covariance + widest * dim, sizeof(float) * (size_t)dim);
    for (int step = 0; step < 3; step++) {
        unit(direction, dim);
        product(next, dim, direction, dim, 1, 1, b->covariance, dim, 16, dim, dim, 0);
        memcpy(direction, next, sizeof(float) * (size_t)dim);
    }
    unit(direction, dim);
    for (int64_t i = 0; i < size; i++) places[i] = dot(points + i * dim, direction, dim);
}

/* Ranks by place, equal ones in their order: a merge sort, which no NaN can lead astray. */
static void sort_ranks(const float *places, int32_t *ranks, int32_t *spare, int64_t n) {
    for (int64_t i = 0; i < n; i++) ranks[i] = (int32_t)i;
    for (int64_t width = 1; width < n; width *= 2) {
        for (int64_t begin = 0; begin < n; begin += 2 * width) {
            int64_t left = begin, middle = begin + width < n ? begin + width : n;
            int64_t right = middle, stop = begin + 2 * width < n ? begin + 2 * width : n;
            for (int64_t i = begin; i < stop; i++)
                spare[i] = left < middle && (right >= stop || !(places[ranks[right]] < places[ranks[left]])) ? ranks[left++]
                                                                                                            : ranks[right++];
        }
        memcpy(ranks, spare, sizeof(int32_t) * (size_t)n);
    }
}

/* The points of a chunk in tree order. */
static void bisect(const IndexCall *c, Scratch *b) {
    const int64_t dim = c->dim;
    for (int64_t i = 0; i < c->chunk_size; i++) b->order[i] = (int32_t)i;
    for (int64_t level = 0; level < c->levels; level++) {
        const int64_t size = c->chunk_size >> level;
        for (int64_t begin = 0; begin < c->chunk_size; begin += size) {
            float *points = b->points + begin * dim;
            project(c, b, points, size, b->places);
            sort_ranks(b->places, b->ranks, b->spare, size);
            for (int64_t i = 0; i < size; i++) {
                memcpy(b->moved + i * dim, points + b->ranks[i] * dim, sizeof(float) * (size_t)dim);
                b->spare[i] = b->order[begin + b->ranks[i]];
            }
            memcpy(points, b->moved, sizeof(float) * (size_t)(size * dim));
            memcpy(b->order + begin, b->spare, sizeof(int32_t) * (size_t)size);
        }
    }
}

static void load_points(const Rows *r, int64_t kv_head, int64_t row, float *to, int64_t dim) {
    const int64_t offset = row_offset(r, kv_head, row);
    for (int64_t i = 0; i < dim; i += WIDTH) store(to + i, load_row(r, offset, i));
}

/* The mean of some rows, which become differences from it. */
static void centre(float *rows, float *mean, int64_t n, int64_t dim) {
    memset(mean, 0, sizeof(float) * (size_t)dim);
    for (int64_t i = 0; i < n; i++) add_scaled(mean, rows + i * dim, 1.0f, dim);
    for (int64_t d = 0; d < dim; d++) mean[d] /= (float)n;
    for (int64_t i = 0; i < n; i++) add_scaled(rows + i * dim, mean, -1.0f, dim);
}

/* What a unit is worth where the longest of `n` numbers becomes 63. */
static float scale_of(const float *numbers, int64_t n) {
    int32_t most = 0;
    for (int64_t i = 0; i < n; i++) { /* lengths are ordered as their bits are */
        int32_t length;
        memcpy(&length, numbers + i, sizeof length);
        length &= 0x7fffffff;
        most = length > most ? length : most;
    }
    float scale;
    memcpy(&scale, &most, sizeof scale);
    return scale / 63.0f;
}

/* A key as whole numbers from 1 to 127. */
static void quantize(const float *key, float scale, uint8_t *numbers, int64_t dim) {
    int32_t whole[MAX_DIM];
    const float by = scale > 1.17549435e-38f ? scale : 1.17549435e-38f;
    for (int64_t i = 0; i < dim; i++) {
        float x = key[i] / by;
        x = x > -63.0f ? x : -63.0f; /* NaN becomes a number too */
        x = (x < 63.0f ? x : 63.0f) + 12582912.0f;
        whole[i] = (int32_t)(x - 12582912.0f) + KEY_ZERO;
    }
    for (int64_t i = 0; i < dim; i++) numbers[i] = (uint8_t)whole[i];
}

/* The int8 keys of a cluster, sixteen side by side. */
static void quantize_keys(const IndexCall *c, const float *keys, int64_t cluster) {
    const int64_t dim = c->dim;
    uint8_t *int8 = c->int8 + cluster * c->cluster_size * dim;
    c->scales[cluster] = scale_of(keys, c->cluster_size * dim);
    for (int64_t key = 0; key < c->cluster_size; key++) {
        uint8_t numbers[MAX_DIM];
        quantize(keys + key * dim, c->scales[cluster], numbers, dim);
        for (int64_t i = 0; i < dim; i++) int8[(key / 16 * dim / 4 + i / 4) * 64 + key % 16 * 4 + i % 4] = numbers[i];
    }
}

/* The subclusters of a cluster, sixteen keys each: their centroids in int8, and how far their keys lie from them. */
static void build_subclusters(const IndexCall *c, const float *keys, float *means, int64_t cluster) {
    const int64_t dim = c->dim, n = c->cluster_size / 16;
    float radius = 0;
    for (int64_t i = 0; i < n; i++, keys += 16 * dim) {
        float *mean = means + i * dim, square = 0, from_centroid = 0;
        memset(mean, 0, sizeof(float) * (size_t)dim);
        for (int64_t k = 0; k < 16; k++) add_scaled(mean, keys + k * dim, 1.0f, dim);
        for (int64_t d = 0; d < dim; d++) mean[d] /= 16.0f;
        for (int64_t k = 0; k < 16; k++) {
            floats sum = splat(0);
            for (int64_t d = 0; d < dim; d += WIDTH) {
                const floats x = load(keys + k * dim + d) - load(mean + d);
                sum += x * x;
            }
            square += total(sum);
            from_centroid += dot(keys + k * dim, keys + k * dim, dim);
        }
        c->spread[cluster * n + i] = sqrtf(square / 16.0f);
        from_centroid = (float)c->cluster_reach * sqrtf(from_centroid / 16.0f);
        if (i == 0 || from_centroid > radius) radius = from_centroid;
    }
    c->radius[cluster] = radius;
    c->sub_scales[cluster] = scale_of(means, n * dim);
    for (int64_t i = 0; i < n; i++) quantize(means + i * dim, c->sub_scales[cluster], c->sub_int8 + (cluster * n + i) * dim, dim);
}

static void build_chunk(const IndexCall *c, Scratch *b, int64_t kv_head, int64_t chunk) {
    const int64_t dim = c->dim, wide = c->value_dim, cluster_size = c->cluster_size, each = c->chunk_size / cluster_size;
    const int64_t begin = c->begin + chunk * c->chunk_size, first = (kv_head * c->chunks + chunk) * each, at = kv_head * c->chunks + chunk;
    for (int64_t i = 0; i < c->chunk_size; i++) load_points(&c->key, kv_head, begin + i, b->points + i * dim, dim);
    bisect(c, b);
    for (int64_t cluster = 0; cluster < each; cluster++)
        centre(b->points + cluster * cluster_size * dim, c->centroid_key + (first + cluster) * dim, cluster_size, dim);
    for (int64_t i = 0; i < c->chunk_size; i++) {
        c->positions[first * cluster_size + i] = (int32_t)(begin + b->order[i]);
        load_points(&c->value, kv_head, begin + b->order[i], b->values + i * wide, wide);
    }
    for (int64_t cluster = 0; cluster < each; cluster++) {
        centre(b->values + cluster * cluster_size * wide, c->centroid_value + (first + cluster) * wide, cluster_size, wide);
        quantize_keys(c, b->points + cluster * cluster_size * dim, first + cluster);
        build_subclusters(c, b->points + cluster * cluster_size * dim, b->moved, first + cluster);
    }
    const floats part = splat(1.0f / (float)c->chunk_size);
    float *key_cov = c->key_cov + at * dim * dim, *key_value_cov = c->key_value_cov + at * dim * wide;
    second_moment(key_cov, b->points, c->chunk_size, dim);
    turned_product(key_value_cov, wide, b->points, dim, dim, b->values, wide, c->chunk_size, wide, 0);
    for (int64_t i = 0; i < dim * dim; i += WIDTH) store(key_cov + i, load(key_cov + i) * part);
    for (int64_t i = 0; i < dim * wide; i += WIDTH) store(key_value_cov + i, load(key_value_cov + i) * part);
}

typedef struct {
    const IndexCall *c;
    int failed;
} Building;

static void build_chunks(void *of, Jobs *jobs) {
    Building *building = of;
    const IndexCall *c = building->c;
    const int64_t dim = c->dim, wide = c->value_dim, size = c->chunk_size;
    const int64_t numbers = size * (2 * dim + wide + 4) + dim * dim + 4 * 64;
    float *memory = aligned_alloc(64, ((size_t)numbers * sizeof(float) + 63) / 64 * 64);
    Scratch b = {0};
    if (!memory) {
        __atomic_store_n(&building->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    b.points = memory;
    b.moved = b.points + size * dim;
    b.values = b.moved + size * dim;
    b.covariance = b.values + size * wide;
    b.places = b.covariance + dim * dim;
    b.order = (int32_t *)(b.places + size);
    b.ranks = b.order + size;
    b.spare = b.ranks + size;
    for (int64_t job; (job = next_job(jobs)) >= 0;) build_chunk(c, &b, job / c->chunks, job % c->chunks);
    free(memory);
}

/* Returns 0, or 1 where there was no memory. */
PRESCORE_EXPORT int prescore_build_index(const IndexCall *c) {
    Building of = {c, 0};
    prescore_run(c->kv_heads * c->chunks, build_chunks, &of);
    return of.failed;
}
