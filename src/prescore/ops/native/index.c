/* The key index of chunks: a balanced tree by bisection, centroids, outliers, int4 keys, covariances. One chunk of one KV head
 * is a thread's job. Computes what `build_clusters` in routed/reference.py does. */
#include "routed.h"

/* Must equal `IndexCall` in routed/native.py. */
typedef struct {
    Rows key, value;
    int64_t kv_heads, begin, chunks, chunk_size, levels, cluster_size, dim, value_dim, fit_size;
    int32_t *positions;                   /* [kv_heads, clusters, cluster_size] */
    float *centroid_key, *centroid_value; /* [kv_heads, clusters, dim], [kv_heads, clusters, value_dim] */
    uint8_t *int4;                        /* [kv_heads, clusters, cluster_size / 16, dim / 8, 16, 4] */
    float *scales;                        /* [kv_heads, clusters, cluster_size / 16, 2, 16] */
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

/* Place of every point along the first principal component of the points. */
static void project(const IndexCall *c, const Scratch *b, const float *points, int64_t size, float *places) {
    const int64_t dim = c->dim, stride = size / c->fit_size > 1 ? size / c->fit_size : 1;
    const int64_t n = (size + stride - 1) / stride;
    float mean[MAX_DIM] = {0}, direction[MAX_DIM], next[MAX_DIM];
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

/* The outliers, the keys farthest from the centroid, come first; the others stay in tree order. Squared distances are
 * compared by their leading bits, and of equal ones the earlier key wins: so the choice hardly ever depends on rounding. */
static void put_outliers_first(const IndexCall *c, const Scratch *b, int64_t cluster) {
    const int64_t dim = c->dim, cluster_size = c->cluster_size;
    float *points = b->points + cluster * cluster_size * dim;
    int32_t *order = b->order + cluster * cluster_size, *lengths = b->ranks, *spare = b->spare;
    for (int64_t i = 0; i < cluster_size; i++) {
        const float square = dot(points + i * dim, points + i * dim, dim);
        memcpy(lengths + i, &square, sizeof square);
        lengths[i] = lengths[i] >> 16 & 0x7fff;
    }
    for (int64_t k = 0; k < OUTLIERS; k++) {
        int64_t most = 0; /* taken ones are -1 */
        for (int64_t i = 1; i < cluster_size; i++)
            if (lengths[i] > lengths[most] || (lengths[i] == lengths[most] && order[i] < order[most])) most = i;
        lengths[most] = -1;
    }
    for (int64_t i = 0, outliers = 0, others = OUTLIERS; i < cluster_size; i++) {
        const int64_t to = lengths[i] < 0 ? outliers++ : others++;
        memcpy(b->moved + to * dim, points + i * dim, sizeof(float) * (size_t)dim);
        spare[to] = order[i];
    }
    memcpy(points, b->moved, sizeof(float) * (size_t)(cluster_size * dim));
    memcpy(order, spare, sizeof(int32_t) * (size_t)cluster_size);
}

/* The mean of some rows, which become differences from it. */
static void centre(float *rows, float *mean, int64_t n, int64_t dim) {
    memset(mean, 0, sizeof(float) * (size_t)dim);
    for (int64_t i = 0; i < n; i++) add_scaled(mean, rows + i * dim, 1.0f, dim);
    for (int64_t d = 0; d < dim; d++) mean[d] /= (float)n;
    for (int64_t i = 0; i < n; i++) add_scaled(rows + i * dim, mean, -1.0f, dim);
}

/* Half of the dimensions of a key as whole numbers from 0 to 15; returns what a unit is worth. */
static float quantize_half(const float *part, uint8_t *numbers, int64_t half) {
    int32_t most = 0, whole[MAX_DIM];
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

/* Int4 keys, sixteen side by side. */
static void quantize_keys(const float *keys, uint8_t *int4, float *scales, int64_t dim) {
    const int64_t half = dim / 2;
    for (int64_t key = 0; key < 16; key++) {
        uint8_t numbers[MAX_DIM];
        for (int64_t h = 0; h < 2; h++)
            scales[16 * h + key] = quantize_half(keys + key * dim + h * half, numbers + h * half, half);
        for (int64_t i = 0; i < dim / 8; i++)
            for (int64_t k = 0; k < 4; k++)
                int4[(i * 16 + key) * 4 + k] = (uint8_t)(numbers[4 * i + k] | numbers[half + 4 * i + k] << 4);
    }
}

static void build_chunk(const IndexCall *c, Scratch *b, int64_t kv_head, int64_t chunk) {
    const int64_t dim = c->dim, wide = c->value_dim, cluster_size = c->cluster_size, each = c->chunk_size / cluster_size;
    const int64_t begin = c->begin + chunk * c->chunk_size, first = (kv_head * c->chunks + chunk) * each, at = kv_head * c->chunks + chunk;
    for (int64_t i = 0; i < c->chunk_size; i++) load_points(&c->key, kv_head, begin + i, b->points + i * dim, dim);
    bisect(c, b);
    for (int64_t cluster = 0; cluster < each; cluster++) {
        centre(b->points + cluster * cluster_size * dim, c->centroid_key + (first + cluster) * dim, cluster_size, dim);
        put_outliers_first(c, b, cluster);
    }
    for (int64_t i = 0; i < c->chunk_size; i++) {
        c->positions[first * cluster_size + i] = (int32_t)(begin + b->order[i]);
        load_points(&c->value, kv_head, begin + b->order[i], b->values + i * wide, wide);
    }
    for (int64_t cluster = 0; cluster < each; cluster++) {
        centre(b->values + cluster * cluster_size * wide, c->centroid_value + (first + cluster) * wide, cluster_size, wide);
        for (int64_t k = 0; k < cluster_size; k += 16)
            quantize_keys(b->points + (cluster * cluster_size + k) * dim, c->int4 + ((first + cluster) * cluster_size + k) * dim / 2,
                   c->scales + ((first + cluster) * cluster_size + k) * 2, dim);
    }
    const floats part = splat(1.0f / (float)c->chunk_size);
    float *key_cov = c->key_cov + at * dim * dim, *key_value_cov = c->key_value_cov + at * dim * wide;
    second_moment(key_cov, b->points, c->chunk_size, dim);
    turned_product(key_value_cov, wide, b->points, dim, dim, b->values, wide, c->chunk_size, wide, 0);
    for (int64_t i = 0; i < dim * dim; i += WIDTH) store(key_cov + i, load(key_cov + i) * part);
    for (int64_t i = 0; i < dim * wide; i += WIDTH) store(key_value_cov + i, load(key_value_cov + i) * part);
}

/* Returns 0, or 1 where there was no memory. */
PRESCORE_EXPORT int prescore_build_index(const IndexCall *c) {
    const int64_t dim = c->dim, wide = c->value_dim, size = c->chunk_size;
    int failed = 0;
#pragma omp parallel num_threads(prescore_threads()) if (c->kv_heads * c->chunks > 1)
    {
        const int64_t numbers = size * (2 * dim + wide + 4) + dim * dim + 4 * 64;
        float *memory = aligned_alloc(64, ((size_t)numbers * sizeof(float) + 63) / 64 * 64);
        Scratch b = {0};
        if (memory) {
            b.points = memory;
            b.moved = b.points + size * dim;
            b.values = b.moved + size * dim;
            b.covariance = b.values + size * wide;
            b.places = b.covariance + dim * dim;
            b.order = (int32_t *)(b.places + size);
            b.ranks = b.order + size;
            b.spare = b.ranks + size;
        } else {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t job = 0; job < c->kv_heads * c->chunks; job++)
            if (memory) build_chunk(c, &b, job / c->chunks, job % c->chunks);
        free(memory);
    }
    return failed;
}
