/* Attention over listed keys: each query, or each block of queries, brings the positions of the keys that it reads.
 *
 * Keys of a list that few queries share are read where they lie; for more queries they are laid out as local keys are.
 */
#include "routed.h"

#define FEW 4             /* queries of a list whose keys are read where they lie */
#define QUERIES_A_JOB 128 /* of each query head; lists that more queries share are laid out again for the next job */

/* Must equal `ListCall` in routed/native/__init__.py. Query heads are `heads_per_list` after one another for each of the
 * `list_heads`. */
typedef struct {
    Rows query, key, value;
    const void *indices; /* [list_heads, n_lists, n_listed] of 32 or 64 bits; what is no position of a key is skipped */
    float *output, *lse; /* [query heads, n_query, value_dim], [query heads, n_query] */
    int64_t list_heads, heads_per_list, list_heads_per_kv, n_lists, n_listed, bits, n_query, n_keys, dim, value_dim;
    float scale;
} ListCall;

/* What one thread works with. */
typedef struct {
    RoutedCall p; /* the queries, keys and values of one head of lists */
    Tile *tile;
    LocalKeys local;
    uint8_t *named; /* a bit for each key: whether the list has named it */
    int32_t *rows, *bounds;
    float *logits;
} Worker;

/* The keys of a list, each once, in the order of the list; returns how many. */
static int32_t take_list(const ListCall *c, int64_t list, Worker *w) {
    int32_t n = 0;
    for (int64_t i = list * c->n_listed; i < (list + 1) * c->n_listed; i++) {
        const int64_t key = c->bits == 64 ? ((const int64_t *)c->indices)[i] : ((const int32_t *)c->indices)[i];
        if (key < 0 || key >= c->n_keys) continue;
        uint8_t *named = w->named + key / 8;
        const int bit = 1 << key % 8, is_new = !(*named & bit);
        *named |= (uint8_t)bit;
        w->rows[n] = (int32_t)key; /* there is space for one more */
        n += is_new;
    }
    for (int32_t i = 0; i < n; i++) w->named[w->rows[i] / 8] = 0;
    return n;
}

/* Output and lse of one query: `at` is its index in [query heads of the list, n_query]. */
static void attend_one(const RoutedCall *p, Worker *w, int32_t n, int64_t at) {
    const int64_t dim = p->dim, wide = p->value_dim, offset = row_offset(&p->query, at / p->length, at % p->length);
    const int64_t filled = (n + WIDTH - 1) / WIDTH * WIDTH;
    float query[MAX_DIM], sums[MAX_DIM] = {0}, *logits = w->logits, *output = p->output + at * wide;
    if (half_products(p)) {
#if defined(__AVX512BF16__)
        memcpy(query, (const uint16_t *)p->query.data + offset, (size_t)(2 * dim));
        half_dots(logits, &p->key, 0, w->rows, n, query, dim, p->scale);
#endif
    } else {
        for (int64_t i = 0; i < dim; i += WIDTH) store(query + i, load_row(&p->query, offset, i) * splat(p->scale));
        row_dots(logits, &p->key, 0, w->rows, n, query, dim);
    }
    for (int64_t i = n; i < filled; i++) logits[i] = -INFINITY;
    floats top = splat(-INFINITY), mass = splat(0);
    for (int64_t i = 0; i < filled; i += WIDTH) top = larger(top, load(logits + i));
    const float peak = largest(top);
    for (int64_t i = 0; i < filled; i += WIDTH) {
        const floats x = vexp(load(logits + i) - splat(peak));
        store(logits + i, x);
        mass += x;
    }
#if defined(__AVX512BF16__)
    if (half_products(p))
        add_half_rows(sums, &p->value, 0, w->rows, logits, n, wide);
    else
#endif
        add_rows(sums, &p->value, 0, w->rows, logits, n, wide);
    const float all = total(mass);
    for (int64_t i = 0; i < wide; i += WIDTH) store(output + i, load(sums + i) * splat(n ? 1.0f / all : 0.0f));
    p->lse[at] = n ? peak + logf(all) : -INFINITY;
}

/* The same for the queries `begin` to `stop` of all heads of the list, a tile at a time. */
static void attend_many(const RoutedCall *p, Worker *w, int32_t n, int64_t begin, int64_t stop) {
    const int64_t size = stop - begin;
    w->local.stop = n;
    w->local.blocks = (n + 15) / 16;
    for (int64_t block = 0; block < w->local.blocks; block++) prescore_load_local_block(p, &w->local, 0, block);
    for (int64_t i = begin; i < stop; i++) w->bounds[p->length + i] = n;
    for (int64_t done = 0; done < p->n_query / p->length * size; done += w->tile->n) {
        w->tile->n = 0;
        for (int64_t i = done; w->tile->n < TILE && i < p->n_query / p->length * size; i++)
            w->tile->index[w->tile->n++] = i / size * p->length + begin + i % size;
        prescore_load_queries(p, w->tile);
        prescore_attend_local(p, w->tile);
    }
}

static void free_worker(Worker *w) {
    free(w->tile);
    free(w->local.keys);
    free(w->local.values);
    free(w->named);
    free(w->rows);
    free(w->bounds);
    free(w->logits);
}

/* A thread's memory; 1 where there is none. */
static int new_worker(const ListCall *c, Worker *w) {
    const size_t blocks = (size_t)(c->n_listed + 15) / 16, n = 16 * blocks + 16;
    w->p = (RoutedCall){.query = c->query, .key = c->key, .value = c->value, .dim = c->dim, .value_dim = c->value_dim};
    w->p.length = c->n_query;
    w->p.n_query = c->n_query * c->heads_per_list;
    w->p.scale = c->scale;
    w->named = calloc((size_t)c->n_keys / 8 + 1, 1);
    w->rows = malloc(sizeof(int32_t) * n);
    w->logits = malloc(sizeof(float) * n);
    w->bounds = calloc((size_t)(2 * c->n_query), sizeof(int32_t));
    w->tile = prescore_new_tile(&w->p, &w->local);
    w->local = (LocalKeys){.half = half_products(&w->p), .rows = w->rows};
    if (c->heads_per_list * ((c->n_query + c->n_lists - 1) / c->n_lists) > FEW) {
        w->local.keys = aligned_alloc(64, sizeof(float) * blocks * 16 * (size_t)c->dim + 64);
        w->local.values = malloc(sizeof(float) * (blocks * 16 * (size_t)c->value_dim + 1));
        if (!w->local.keys || !w->local.values) return 1;
    }
    w->p.local_start = w->bounds;
    w->p.local_stop = w->bounds + c->n_query;
    if (!(w->named && w->rows && w->logits && w->bounds && w->tile)) return 1;
    w->tile->kv_head = 0;
    return 0;
}

typedef struct {
    const ListCall *c;
    int64_t size, per_job, jobs; /* queries of a list and of a job, jobs of a head of lists */
    int failed;
} Lists;

static void attend_lists(void *of, Jobs *jobs) {
    Lists *l = of;
    const ListCall *c = l->c;
    Worker w = {0};
    if (new_worker(c, &w)) __atomic_store_n(&l->failed, 1, __ATOMIC_RELAXED);
    for (int64_t job; !l->failed && (job = next_job(jobs)) >= 0;) {
        const int64_t head = job / l->jobs, first = head * c->heads_per_list;
        int64_t begin = job % l->jobs * l->per_job;
        const int64_t end = begin + l->per_job < c->n_query ? begin + l->per_job : c->n_query;
        w.p.query.at = c->query.at + first;
        w.p.key.at = c->key.at + head / c->list_heads_per_kv;
        w.p.value.at = c->value.at + head / c->list_heads_per_kv;
        w.p.output = c->output + first * c->n_query * c->value_dim;
        w.p.lse = c->lse + first * c->n_query;
        for (int64_t stop; begin < end; begin = stop) {
            const int64_t list = begin / l->size;
            stop = (list + 1) * l->size < end ? (list + 1) * l->size : end;
            const int32_t n = take_list(c, head * c->n_lists + list, &w);
            if (c->heads_per_list * l->size > FEW) {
                attend_many(&w.p, &w, n, begin, stop);
                continue;
            }
            for (int64_t i = begin; i < stop; i++)
                for (int64_t h = 0; h < c->heads_per_list; h++) attend_one(&w.p, &w, n, h * c->n_query + i);
        }
    }
    free_worker(&w);
}

/* Returns 0, or 1 where there was no memory. */
PRESCORE_EXPORT int prescore_attend_lists(const ListCall *c) {
    Lists l = {.c = c, .size = (c->n_query + c->n_lists - 1) / c->n_lists};
    l.per_job = l.size < QUERIES_A_JOB ? QUERIES_A_JOB / l.size * l.size : QUERIES_A_JOB;
    l.jobs = (c->n_query + l.per_job - 1) / l.per_job;
    prescore_run(c->list_heads * l.jobs, attend_lists, &l);
    return l.failed;
}
