/* Routed attention beyond the local chunks, on CPUs.
 *
 * For each query: score the nodes behind it; search the keys of those that may hold something, four bits at a time;
 * read the rows found; let a stand-in carry what is left of each node. Rows that every query reads (sinks, and in
 * decoding the local chunks) are read here too. Results are folded into the query's running output and log-sum-exp.
 *
 * Pointers and sizes only. speed.py makes the only call; nothing here checks again.
 */
#include <stdlib.h>

#include "vectors.h"

#define TILE 32
#define MOST_DIM 512

/* Must equal `Tables` in speed.py. */
typedef struct {
    const float *query, *key, *value;     /* [lanes, group, n_query, dim], [lanes, n_keys, dim], [lanes, n_keys, value_dim] */
    int64_t key_stride, value_stride;     /* numbers between lanes; rows are contiguous */
    const float *spread, *drift;          /* [lanes, group, n_query], [lanes, group, n_query, value_dim] */
    const int32_t *visible;               /* [n_query] nodes behind each query */
    const int32_t *first, *stop;          /* [n_query] rows that a query reads beside the sinks */
    const int32_t *rows;                  /* [lanes, n_nodes, leaf] */
    const float *node_keys, *node_values; /* [lanes, n_nodes, dim], [lanes, n_nodes, value_dim] */
    const float *columns;                 /* [lanes, n_nodes / 16, dim, 16]: node_keys, sixteen nodes side by side */
    const uint8_t *codes;                 /* [lanes, n_nodes, leaf / 16, dim / 8, 16, 4] */
    const float *scales;                  /* [lanes, n_nodes, 2, leaf] */
    int64_t lanes, group, n_query, n_nodes, room_nodes, leaf, dim, value_dim, sinks;
    float scale, reach, log_share;
    float *output, *lse;    /* [lanes, group, n_query, value_dim], [lanes, group, n_query]: in and out */
    float *search, *choice; /* [lanes, group, n_query]: from which logit on nodes were searched, and rows read */
    int64_t *counts;        /* nodes searched, rows read */
} Tables;

typedef struct {
    float logit;
    int32_t node, place;
} Candidate;

/* What one thread works with, for a tile of queries of one lane that see the same nodes. */
typedef struct {
    int64_t n, room, padded;
    int64_t index[TILE]; /* of each query in [lanes, group, n_query] */
    float query[TILE * MOST_DIM];
    int8_t code[TILE * MOST_DIM];
    float code_scale[TILE], mass[TILE], known[TILE], search[TILE], choice[TILE];
    int32_t code_sum[TILE * 2];
    int32_t n_found[TILE];
    float *logits;     /* [TILE, padded] of nodes */
    float *move;       /* [padded] */
    int32_t *read;     /* [padded] */
    float *row_logits; /* [room] of rows found */
    float *fixed;      /* [TILE, most_fixed] logits of rows that are read anyway */
    int64_t most_fixed;
    Candidate *found;  /* [TILE, room] */
} Work;

/* The log of the normal distribution function, smoothly approximated, and its slope. */
INLINE floats log_normal(floats x, floats *slope) {
    x = larger(smaller(x, splat(8.0f)), splat(-4.0f));
    floats y = x * (splat(1.5976f) + splat(0.07056f) * x * x), zero = splat(0.0f), one = splat(1.0f);
    floats e = vexp(-larger(y, -y));
    *slope = choose(y > zero, e, one) / (one + e) * (splat(1.5976f) + splat(0.21168f) * x * x);
    return smaller(y, zero) - vlog(one + e);
}

/* What the logits of sixteen stand-ins gain, and how far their values move along the drift, when the logits behind
 * each are normal with deviation `s` around it, and those above `limit` are read by themselves. */
INLINE floats correct(floats logit, float limit, float s, floats *move) {
    floats slope, unused, reach = (splat(limit) - logit) * splat(1.0f / s), one = splat(1.0f);
    floats beyond = log_normal(reach - splat(s), &slope), within = log_normal(reach, &unused);
    floats gain = splat(0.5f * s * s) + beyond - within;
    *move = larger(smaller(one - slope * splat(1.0f / s), one), -one);
    return larger(smaller(gain, splat(2.0f)), splat(-2.0f));
}

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define TOGETHER 4
#elif defined(__AVX2__)
#define TOGETHER 2
#else
#define TOGETHER 1
#endif

/* Sixteen keys against some queries: sums of (0..15) * (-31..31) over the first and the second half of the
 * dimensions. */
INLINE void code_sums(const uint8_t *codes, const int8_t *const *q, int64_t eighth, int32_t (*low)[16],
                      int32_t (*high)[16]) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    __m512i a[TOGETHER], b[TOGETHER];
    for (int j = 0; j < TOGETHER; j++) a[j] = b[j] = _mm512_setzero_si512();
    const __m512i nibble = _mm512_set1_epi8(15);
    for (int64_t i = 0; i < eighth; i++) {
        __m512i z = _mm512_loadu_si512(codes + 64 * i);
        __m512i first = _mm512_and_si512(z, nibble), second = _mm512_and_si512(_mm512_srli_epi16(z, 4), nibble);
        for (int j = 0; j < TOGETHER; j++) {
            int32_t q0, q1;
            memcpy(&q0, q[j] + 4 * i, 4);
            memcpy(&q1, q[j] + 4 * (i + eighth), 4);
            a[j] = _mm512_dpbusd_epi32(a[j], first, _mm512_set1_epi32(q0));
            b[j] = _mm512_dpbusd_epi32(b[j], second, _mm512_set1_epi32(q1));
        }
    }
    for (int j = 0; j < TOGETHER; j++) {
        _mm512_storeu_si512(low[j], a[j]);
        _mm512_storeu_si512(high[j], b[j]);
    }
#elif defined(__AVX2__)
    __m256i sum[TOGETHER][4];
    for (int j = 0; j < TOGETHER; j++)
        for (int k = 0; k < 4; k++) sum[j][k] = _mm256_setzero_si256();
    const __m256i nibble = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    for (int64_t i = 0; i < eighth; i++) { /* sums of 16 bits hold 15 * 31 * dim / 4 up to 256 dimensions */
        __m256i y0 = _mm256_loadu_si256((const __m256i *)(codes + 64 * i));
        __m256i y1 = _mm256_loadu_si256((const __m256i *)(codes + 64 * i + 32));
        __m256i f0 = _mm256_and_si256(y0, nibble), f1 = _mm256_and_si256(y1, nibble);
        __m256i s0 = _mm256_and_si256(_mm256_srli_epi16(y0, 4), nibble);
        __m256i s1 = _mm256_and_si256(_mm256_srli_epi16(y1, 4), nibble);
        for (int j = 0; j < TOGETHER; j++) {
            int32_t q0, q1;
            memcpy(&q0, q[j] + 4 * i, 4);
            memcpy(&q1, q[j] + 4 * (i + eighth), 4);
            __m256i b0 = _mm256_set1_epi32(q0), b1 = _mm256_set1_epi32(q1);
            sum[j][0] = _mm256_add_epi16(sum[j][0], _mm256_maddubs_epi16(f0, b0));
            sum[j][1] = _mm256_add_epi16(sum[j][1], _mm256_maddubs_epi16(f1, b0));
            sum[j][2] = _mm256_add_epi16(sum[j][2], _mm256_maddubs_epi16(s0, b1));
            sum[j][3] = _mm256_add_epi16(sum[j][3], _mm256_maddubs_epi16(s1, b1));
        }
    }
    for (int j = 0; j < TOGETHER; j++) {
        for (int k = 0; k < 2; k++) {
            _mm256_storeu_si256((__m256i *)low[j] + k, _mm256_madd_epi16(sum[j][k], ones));
            _mm256_storeu_si256((__m256i *)high[j] + k, _mm256_madd_epi16(sum[j][k + 2], ones));
        }
    }
#else
    memset(low, 0, 64);
    memset(high, 0, 64);
    for (int64_t i = 0; i < eighth; i++)
        for (int key = 0; key < 16; key++)
            for (int k = 0; k < 4; k++) {
                uint8_t code = codes[64 * i + 4 * key + k];
                low[0][key] += (code & 15) * q[0][4 * i + k];
                high[0][key] += (code >> 4) * q[0][4 * (i + eighth) + k];
            }
#endif
}

static void take_queries(const Tables *f, Work *w) {
    const int64_t dim = f->dim;
    for (int64_t t = 0; t < w->n; t++) {
        const float *q = f->query + w->index[t] * dim;
        float *own = w->query + t * dim, most = 1e-30f;
        for (int64_t i = 0; i < dim; i++) {
            own[i] = q[i] * f->scale;
            most = fabsf(own[i]) > most ? fabsf(own[i]) : most;
        }
        w->code_scale[t] = most / 31.0f;
        int32_t sums[2] = {0, 0};
        for (int64_t i = 0; i < dim; i++) {
            int32_t c = (int32_t)lrintf(own[i] / w->code_scale[t]);
            w->code[t * dim + i] = (int8_t)c;
            sums[i >= dim / 2] += c;
        }
        memcpy(w->code_sum + 2 * t, sums, sizeof sums);
    }
}

/* Logits of the nodes, sixteen of them and four queries at a time. */
static void score_nodes(const Tables *f, Work *w, int64_t lane, int64_t n_nodes) {
    const int64_t dim = f->dim, end = (n_nodes + 15) / 16 * 16;
    const float *columns = f->columns + lane * (f->room_nodes / 16) * dim * 16;
    for (int64_t b = 0; b < end; b += WIDTH) {
        const float *mean = columns + b / 16 * dim * 16 + b % 16;
        for (int64_t t = 0; t < w->n; t += 4) {
            const int64_t last = w->n - 1;
            const float *q[4];
            for (int j = 0; j < 4; j++) q[j] = w->query + (t + j < last ? t + j : last) * dim;
            floats sum[4] = {splat(0), splat(0), splat(0), splat(0)};
            for (int64_t i = 0; i < dim; i++) {
                floats m = load(mean + 16 * i);
                for (int j = 0; j < 4; j++) sum[j] += m * splat(q[j][i]);
            }
            for (int j = 0; j < 4 && t + j < w->n; j++) store(w->logits + (t + j) * w->padded + b, sum[j]);
        }
    }
    for (int64_t t = 0; t < w->n; t++)
        for (int64_t i = n_nodes; i < end; i++) w->logits[t * w->padded + i] = -INFINITY;
}

/* Drop candidates that are below the share of all mass that is known by now. */
static void raise_choice(Work *w, int64_t t, float log_share) {
    float limit = w->known[t] + log1pf(w->mass[t]) + log_share;
    if (limit > w->choice[t]) w->choice[t] = limit;
    Candidate *c = w->found + t * w->room;
    int32_t n = 0;
    for (int32_t i = 0; i < w->n_found[t]; i++)
        if (c[i].logit >= w->choice[t]) c[n++] = c[i];
    w->n_found[t] = n;
}

/* Add the keys of a block whose logit is above a query's limit to what it has found. */
static void take_found(const Tables *f, Work *w, int t, floats logit, int64_t node, int64_t place) {
    if (w->n_found[t] + WIDTH > w->room) raise_choice(w, t, f->log_share);
    /* all that a search could find counts, whatever the order of nodes; kept is what may still be read */
    ints counted = logit >= splat(w->search[t]);
    unsigned above = bits(logit >= splat(w->choice[t]));
    w->mass[t] += total(choose(counted, vexp(logit - splat(w->known[t])), splat(0)));
    Candidate *c = w->found + t * w->room;
    int32_t n = w->n_found[t];
    while (above) {
        int i = __builtin_ctz(above);
        above &= above - 1;
        c[n++] = (Candidate){logit[i], (int32_t)node, (int32_t)(place + i)};
    }
    w->n_found[t] = n;
}

static void search_node(const Tables *f, Work *w, int64_t lane, int64_t node, const int *who, int n_who) {
    const int64_t dim = f->dim, leaf = f->leaf, at = lane * f->room_nodes + node;
    const uint8_t *codes = f->codes + at * leaf * dim / 2;
    const float *scales = f->scales + at * leaf * 2;
    for (int x = 0; x < n_who; x += TOGETHER) {
        const int8_t *q[TOGETHER];
        for (int j = 0; j < TOGETHER; j++) q[j] = w->code + who[x + j < n_who ? x + j : n_who - 1] * dim;
        for (int64_t block = 0; block < leaf; block += 16) {
            int32_t low[TOGETHER][16], high[TOGETHER][16];
            code_sums(codes + block * dim / 2, q, dim / 8, low, high);
            for (int j = 0; j < TOGETHER && x + j < n_who; j++) {
                const int t = who[x + j];
                const floats own = splat(w->code_scale[t]), limit = splat(w->search[t]);
                const floats less = splat(8.0f * w->code_sum[2 * t]), more = splat(8.0f * w->code_sum[2 * t + 1]);
                for (int64_t i = 0; i < 16; i += WIDTH) {
                    ints a = *(const ints *)(low[j] + i), b = *(const ints *)(high[j] + i);
                    floats first = load(scales + block + i), second = load(scales + leaf + block + i);
                    floats logit = own * (first * (__builtin_convertvector(a, floats) - less) +
                                          second * (__builtin_convertvector(b, floats) - more));
                    if (bits(logit >= limit)) take_found(f, w, t, logit, node, block + i);
                }
            }
        }
    }
}

/* Rows that a query reads whatever it finds: the sinks, then `first` to `stop`. */
INLINE int64_t n_fixed(const Tables *f, int64_t position) { return f->sinks + f->stop[position] - f->first[position]; }
INLINE int64_t fixed_row(const Tables *f, int64_t position, int64_t i) {
    return i < f->sinks ? i : f->first[position] + i - f->sinks;
}

/* The log-sum-exp of all that is known before the search: fixed rows, nodes, and what was read elsewhere. */
static float known_mass(const Tables *f, Work *w, int64_t t, int64_t lane, int64_t n_nodes) {
    const float *key = f->key + lane * f->key_stride, *m = w->logits + t * w->padded;
    const int64_t position = w->index[t] % f->n_query, fixed = n_fixed(f, position), end = (n_nodes + 15) / 16 * 16;
    const float log_leaf = logf((float)f->leaf), elsewhere = f->lse[w->index[t]];
    float *own = w->fixed + t * w->most_fixed, peak = elsewhere;
    for (int64_t i = 0; i < fixed; i++) {
        own[i] = dot(w->query + t * f->dim, key + fixed_row(f, position, i) * f->dim, f->dim);
        peak = own[i] > peak ? own[i] : peak;
    }
    floats top = splat(-INFINITY), sum = splat(0);
    for (int64_t b = 0; b < end; b += WIDTH) top = larger(top, load(m + b));
    float best = largest(top) + log_leaf;
    peak = best > peak ? best : peak;
    if (peak == -INFINITY) return peak;
    for (int64_t b = 0; b < end; b += WIDTH) sum += vexp(load(m + b) + splat(log_leaf - peak));
    float all = total(sum) + expf(elsewhere - peak);
    for (int64_t i = 0; i < fixed; i++) all += expf(own[i] - peak);
    return peak + logf(all);
}

/* Choose what each query of the tile reads: fills `known`, `search`, `choice` and the candidates. */
static int64_t choose_rows(const Tables *f, Work *w, int64_t lane, int64_t n_nodes) {
    int64_t searched = 0;
    float limit[TILE];
    for (int64_t t = 0; t < w->n; t++) {
        w->known[t] = known_mass(f, w, t, lane, n_nodes);
        w->search[t] = w->choice[t] = w->known[t] + f->log_share;
        limit[t] = w->search[t] - f->reach * f->spread[w->index[t]];
        w->n_found[t] = 0;
        w->mass[t] = 0;
    }
    for (int64_t node = 0; node < n_nodes; node++) {
        int who[TILE], n_who = 0;
        for (int64_t t = 0; t < w->n; t++)
            if (w->logits[t * w->padded + node] >= limit[t]) who[n_who++] = (int)t;
        if (n_who) search_node(f, w, lane, node, who, n_who);
        for (int x = 0; x < n_who; x++) { /* what was found raises the limit for the nodes to come */
            float raised = w->known[who[x]] + log1pf(w->mass[who[x]]) + f->log_share;
            if (raised > w->choice[who[x]]) w->choice[who[x]] = raised;
        }
        searched += n_who;
    }
    for (int64_t t = 0; t < w->n; t++) raise_choice(w, t, f->log_share);
    return searched;
}

INLINE void fetch_ahead(const float *row, int64_t dim) {
    for (int64_t i = 0; i < dim; i += WIDTH) __builtin_prefetch(row + i);
}

/* One softmax over what was read elsewhere, the fixed rows, the rows found and the stand-ins. */
static void read_rows(const Tables *f, Work *w, int64_t t, int64_t lane, int64_t n_nodes) {
    const int64_t dim = f->dim, wide = f->value_dim, leaf = f->leaf, at = w->index[t], position = at % f->n_query;
    const int64_t fixed = n_fixed(f, position), found = w->n_found[t], end = (n_nodes + 15) / 16 * 16;
    const float *key = f->key + lane * f->key_stride, *value = f->value + lane * f->value_stride;
    const int32_t *rows = f->rows + lane * f->room_nodes * leaf;
    const float *own = w->fixed + t * w->most_fixed, *query = w->query + t * dim, s = f->spread[at];
    const Candidate *c = w->found + t * w->room;
    float *m = w->logits + t * w->padded, peak = f->lse[at];
    memset(w->read, 0, sizeof(int32_t) * (size_t)n_nodes);
    for (int64_t i = 0; i < fixed; i++) peak = own[i] > peak ? own[i] : peak;
    for (int64_t i = 0; i < found; i++) {
        if (i + 4 < found) {
            int64_t ahead = rows[c[i + 4].node * leaf + c[i + 4].place];
            fetch_ahead(key + ahead * dim, dim);
            fetch_ahead(value + ahead * wide, wide);
        }
        float x = dot(query, key + (int64_t)rows[c[i].node * leaf + c[i].place] * dim, dim);
        w->row_logits[i] = x;
        peak = x > peak ? x : peak;
        w->read[c[i].node]++;
    }
    floats top = splat(-INFINITY);
    for (int64_t b = 0; b < end; b += WIDTH) {
        floats move, x = load(m + b), gain = correct(x, w->choice[t], s, &move);
        store(w->move + b, move);
        store(m + b, x + gain + splat(logf((float)leaf)));
    }
    for (int64_t i = 0; i < found; i++) {
        int32_t *n = w->read + c[i].node;
        if (*n > 0) m[c[i].node] = *n < leaf ? m[c[i].node] + logf(1.0f - (float)*n / (float)leaf) : -INFINITY;
        *n = 0;
    }
    for (int64_t b = 0; b < end; b += WIDTH) top = larger(top, load(m + b));
    float best = largest(top);
    peak = best > peak ? best : peak;
    if (peak == -INFINITY) return;
    float near = expf(f->lse[at] - peak), all = near, moved = 0;
    float *output = f->output + at * wide, sum[MOST_DIM];
    for (int64_t i = 0; i < wide; i++) sum[i] = output[i] * near;
    for (int64_t i = 0; i < fixed; i++) {
        float p = expf(own[i] - peak);
        all += p;
        add_scaled(sum, value + fixed_row(f, position, i) * wide, p, wide);
    }
    for (int64_t i = 0; i < found; i += WIDTH) store(w->row_logits + i, vexp(load(w->row_logits + i) - splat(peak)));
    for (int64_t i = 0; i < found; i++) {
        all += w->row_logits[i];
        add_scaled(sum, value + (int64_t)rows[c[i].node * leaf + c[i].place] * wide, w->row_logits[i], wide);
    }
    for (int64_t b = 0; b < end; b += WIDTH) store(m + b, vexp(load(m + b) - splat(peak)));
    const float *means = f->node_values + lane * f->room_nodes * wide;
    floats mass = splat(0), along = splat(0);
    for (int64_t b = 0; b < end; b += WIDTH) {
        mass += load(m + b);
        along += load(m + b) * load(w->move + b);
    }
    all += total(mass);
    moved = total(along);
    for (int64_t i = 0; i < wide; i += WIDTH) {
        floats x = load(sum + i);
        for (int64_t node = 0; node < n_nodes; node++) x += load(means + node * wide + i) * splat(m[node]);
        store(sum + i, x);
    }
    const float *drift = f->drift + at * wide;
    for (int64_t i = 0; i < wide; i++) output[i] = (sum[i] + moved * drift[i]) / all;
    f->lse[at] = peak + logf(all);
}

typedef struct {
    float *query, *key, *value, *node_key, *node_value; /* sums; those of keys and values are one thread's own */
    const float *grad, *product;                        /* of the output; grad . output less the gradient of lse */
} Gradients;

INLINE float add_row(const Tables *f, const float *query, float *to, const float *key, const float *value,
                     float *key_sum, float *value_sum, const float *grad, float logit, float lse, float product) {
    float p = expf(logit - lse), d = p * (dot(grad, value, f->value_dim) - product);
    add_scaled(to, key, d, f->dim);
    add_scaled(key_sum, query, d, f->dim);
    add_scaled(value_sum, grad, p, f->value_dim);
    return d;
}

/* The same under the merged output and log-sum-exp, backwards. `search` and `choice` are those of the forward pass. */
static void tile_backward(const Tables *f, Work *w, const Gradients *g, int64_t lane, int64_t n_nodes) {
    const int64_t dim = f->dim, wide = f->value_dim, leaf = f->leaf;
    const float *key = f->key + lane * f->key_stride, *value = f->value + lane * f->value_stride;
    const int32_t *rows = f->rows + lane * f->room_nodes * leaf;
    take_queries(f, w);
    score_nodes(f, w, lane, n_nodes);
    for (int64_t t = 0; t < w->n; t++) {
        w->choice[t] = w->search[t] = f->choice[w->index[t]];
        w->known[t] = f->lse[w->index[t]];
        w->n_found[t] = 0;
        w->mass[t] = 0;
    }
    for (int64_t node = 0; node < n_nodes; node++)
        for (int64_t t = 0; t < w->n; t++) {
            const int64_t at = w->index[t];
            int who = (int)t;
            if (w->logits[t * w->padded + node] >= f->search[at] - f->reach * f->spread[at])
                search_node(f, w, lane, node, &who, 1);
        }
    for (int64_t t = 0; t < w->n; t++) {
        const int64_t at = w->index[t], position = at % f->n_query;
        const float *query = w->query + t * dim, *grad = g->grad + at * wide, *drift = f->drift + at * wide;
        const float lse = f->lse[at], product = g->product[at], s = f->spread[at];
        const Candidate *c = w->found + t * w->room;
        float *m = w->logits + t * w->padded, sum[MOST_DIM] = {0};
        if (lse == -INFINITY) continue;
        memset(w->read, 0, sizeof(int32_t) * (size_t)n_nodes);
        for (int64_t i = 0; i < n_fixed(f, position); i++) {
            int64_t row = fixed_row(f, position, i);
            float x = dot(query, key + row * dim, dim);
            add_row(f, query, sum, key + row * dim, value + row * wide, g->key + row * dim, g->value + row * wide, grad,
                    x, lse, product);
        }
        for (int64_t i = 0; i < w->n_found[t]; i++) {
            int64_t row = rows[c[i].node * leaf + c[i].place];
            float x = dot(query, key + row * dim, dim);
            add_row(f, query, sum, key + row * dim, value + row * wide, g->key + row * dim, g->value + row * wide, grad,
                    x, lse, product);
            w->read[c[i].node]++;
        }
        const float along = dot(grad, drift, wide);
        for (int64_t node = 0; node < n_nodes; node++) {
            const int64_t own = lane * f->room_nodes + node;
            float left = (float)(leaf - w->read[node]);
            if (left <= 0) continue;
            floats moves, gains = correct(splat(m[node]), w->choice[t], s, &moves);
            float move = moves[0], p = expf(m[node] + gains[0] + logf(left) - lse);
            float d = p * (dot(grad, f->node_values + own * wide, wide) + move * along - product);
            add_scaled(sum, f->node_keys + own * dim, d, dim);
            add_scaled(g->node_key + node * dim, query, d, dim);
            add_scaled(g->node_value + node * wide, grad, p, wide);
        }
        add_scaled(g->query + at * dim, sum, f->scale, dim);
    }
}

static void *aligned(char **at, size_t bytes) {
    void *here = *at;
    *at += (bytes + 63) / 64 * 64;
    return here;
}

static Work *new_work(const Tables *f) {
    const int64_t padded = (f->n_nodes + 15) / 16 * 16 + 16, room = (int64_t)(2.0f * expf(-f->log_share)) + 64;
    int64_t most = 0;
    for (int64_t i = 0; i < f->n_query; i++) most = n_fixed(f, i) > most ? n_fixed(f, i) : most;
    const int64_t room_back = room > f->n_nodes * f->leaf ? room : room;
    size_t bytes = sizeof(Work) + 64 * 8 + sizeof(float) * (size_t)(TILE * padded + 2 * padded + room_back + TILE * (most + 16)) +
                   sizeof(Candidate) * (size_t)(TILE * room_back);
    char *memory = malloc(bytes + 64);
    if (!memory) return NULL;
    char *at = memory;
    Work *w = aligned(&at, sizeof(Work));
    w->padded = padded;
    w->room = room_back;
    w->most_fixed = most + 16;
    w->logits = aligned(&at, sizeof(float) * (size_t)(TILE * padded));
    w->move = aligned(&at, sizeof(float) * (size_t)padded);
    w->read = aligned(&at, sizeof(int32_t) * (size_t)padded);
    w->row_logits = aligned(&at, sizeof(float) * (size_t)room_back);
    w->fixed = aligned(&at, sizeof(float) * (size_t)(TILE * (most + 16)));
    w->found = aligned(&at, sizeof(Candidate) * (size_t)(TILE * room_back));
    return w;
}

/* Work off the queries of one head from `first` on, as runs that see the same nodes. */
#define FOR_RUNS(f, w, head, begin, n, body)                                                    \
    for (int64_t done = 0; done < (n);) {                                                       \
        const int64_t nodes = (f)->visible[(begin) + done];                                     \
        (w)->n = 0;                                                                             \
        while (done < (n) && (f)->visible[(begin) + done] == nodes)                             \
            (w)->index[(w)->n++] = (head) * (f)->n_query + (begin) + done++;                    \
        if (nodes > 0 || n_fixed((f), (begin) + done - 1) > 0) { body }                          \
    }

int prescore_routed_forward(const Tables *f) {
    const int64_t tiles = (f->n_query + TILE - 1) / TILE, heads = f->lanes * f->group;
    int failed = 0;
#pragma omp parallel
    {
        Work *w = new_work(f);
        int64_t searched = 0, read = 0;
        if (!w) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t job = 0; job < tiles * heads; job++) {
            if (!w) continue;
            /* the last queries see most: first, so that no thread is left alone with them */
            const int64_t begin = (tiles - 1 - job / heads) * TILE, head = job % heads, lane = head / f->group;
            const int64_t n = f->n_query - begin < TILE ? f->n_query - begin : TILE;
            FOR_RUNS(f, w, head, begin, n, {
                take_queries(f, w);
                score_nodes(f, w, lane, nodes);
                searched += choose_rows(f, w, lane, nodes);
                for (int64_t t = 0; t < w->n; t++) {
                    read += w->n_found[t];
                    f->search[w->index[t]] = w->search[t];
                    f->choice[w->index[t]] = w->choice[t];
                    read_rows(f, w, t, lane, nodes);
                }
            })
        }
        free(w);
#pragma omp atomic
        f->counts[0] += searched;
#pragma omp atomic
        f->counts[1] += read;
    }
    return failed;
}

/* `parts` threads' own sums of keys, values and nodes lie one after the other. */
int prescore_routed_backward(const Tables *f, const Gradients *g, int64_t parts, int64_t key_size, int64_t value_size,
                             int64_t node_key_size, int64_t node_value_size) {
    const int64_t tiles = (f->n_query + TILE - 1) / TILE;
    int failed = 0;
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t job = 0; job < f->lanes * parts; job++) {
        const int64_t lane = job / parts, part = job % parts, own = part * f->lanes + lane;
        Work *w = new_work(f);
        if (!w) {
#pragma omp atomic write
            failed = 1;
            continue;
        }
        Gradients mine = *g;
        mine.key += own * key_size;
        mine.value += own * value_size;
        mine.node_key += own * node_key_size;
        mine.node_value += own * node_value_size;
        for (int64_t tile = part; tile < tiles; tile += parts)
            for (int64_t head = lane * f->group; head < (lane + 1) * f->group; head++) {
                const int64_t begin = tile * TILE, n = f->n_query - begin < TILE ? f->n_query - begin : TILE;
                FOR_RUNS(f, w, head, begin, n, { tile_backward(f, w, &mine, lane, nodes); })
            }
        free(w);
    }
    return failed;
}
