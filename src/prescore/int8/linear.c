/* Linear layers with int8 weights: rows of bfloat16 or float32 are rounded to int8, multiplied, scaled and written in one call. A
 * decoder layer is two calls, before and after its attention.
 *
 * linear.py and layers.py make the only calls and check what they touch. Weights lie sixteen outputs side by side, four inputs of each
 * together. Inputs come in groups with a scale per row each; the products of a group are whole numbers, and groups are added in
 * one order, so that a row gives the same alone and among others.
 */
#include <stdlib.h>

#include "threads.h"
#include "vectors.h"

#define ZERO 128               /* weights are stored from 1 to 255 */
#define PER_PANEL (16 / WIDTH) /* registers that hold sixteen numbers */
#define BLOCK_ROWS 96          /* rows whose numbers stay in a processor's cache while all weights pass */
#define SLAB_ROWS 768          /* rows that are rounded at a time */
#define MOST_GROUP 128
#define PARALLEL 65536 /* products from which on threads pay */
/* Rows and panels of a tile, whose sums fill the registers. */
#if defined(__AVX512VNNI__)
#define TILE_ROWS 12
#define TILE_PANELS 2
#else
#define TILE_PANELS 1
#if defined(__AVX2__) || defined(__aarch64__)
#define TILE_ROWS 4
#elif defined(__SSE2__)
#define TILE_ROWS 2
#else
#define TILE_ROWS 1
#endif
#endif
#define PER_TILE (TILE_PANELS * PER_PANEL)

/* Must equal `_LinearCall` in linear.py. */
typedef struct {
    const void *input;     /* [rows, inputs], bfloat16 or float32 */
    const uint8_t *weight; /* [panels, quarters, 16, 4] */
    const float *scale;    /* [panels, 16]: what 1 stands for in an output */
    const float *bias;     /* [outputs] or NULL */
    void *output;          /* [rows, outputs], as the input */
    int64_t rows, inputs, outputs;
    int64_t group;       /* inputs of a group: a multiple of four, at most MOST_GROUP */
    int64_t is_float32;
    float smallest, inverse; /* a group whose largest magnitude is less counts as having this one; 1 / 127 */
} LinearCall;

/* Rows as int8, some of them as a tile: `[tiles, quarters, rows of the tile, 4]`, zeros after the inputs. */
typedef struct {
    int64_t quarters, groups;
    int8_t *numbers;
    float *unit;    /* [rows, groups]: what 1 stands for */
    int32_t *start; /* [rows, groups]: -ZERO times the sum of the numbers */
} Rounded;

INLINE float number(uint32_t raw) {
    float x;
    memcpy(&x, &raw, sizeof raw);
    return x;
}
INLINE uint32_t raw_bits(float x) {
    uint32_t raw;
    memcpy(&raw, &x, sizeof raw);
    return raw;
}
typedef uint32_t unsigned_ints __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef ints Sums[TILE_ROWS][PER_TILE]; /* of a tile's rows with its outputs; they stay in registers */

#if defined(__AVX512VNNI__)
/* Compilers spill sums that they may rename. */
#define ADD_FOUR(sum, weights, numbers) __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(numbers))

/* Products of a group of inputs: of `rows` rows with `panels` times sixteen outputs, whose weights are `step` bytes apart. */
INLINE void multiply_group(const int rows, const int panels, const uint8_t *weight, int64_t step, const int32_t *numbers, int64_t quarters,
                           const int32_t *start, int64_t groups, Sums sums) {
    __m512i some[TILE_PANELS];
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
        for (int k = 0; k < panels; k++) sums[i][k] = start[i * groups] - (ints){0};
    for (int64_t quarter = 0; quarter < quarters; quarter++, numbers += rows, weight += 64) {
#pragma GCC unroll 2
        for (int k = 0; k < panels; k++) some[k] = _mm512_loadu_si512(weight + k * step);
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++) {
            const __m512i four = _mm512_set1_epi32(numbers[i]);
#pragma GCC unroll 2
            for (int k = 0; k < panels; k++) ADD_FOUR(sums[i][k], some[k], four);
        }
    }
}
#else
#if defined(__aarch64__)
#define FIRST_SUM(start) 0 /* its instructions take signed weights */
#else
#define FIRST_SUM(start) (start)
#endif

#if defined(__SSE2__)
typedef int16_t shorts __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef uint16_t unsigned_shorts __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
INLINE ints add_pairs(ints sum, shorts a, shorts b) {
#if defined(__AVX2__)
    return sum + (ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    return sum + (ints)_mm_madd_epi16((__m128i)a, (__m128i)b);
#endif
}
#endif

INLINE void multiply_group(const int rows, const int panels, const uint8_t *weight, int64_t step, const int32_t *numbers, int64_t quarters,
                           const int32_t *start, int64_t groups, Sums sums) {
    (void)panels, (void)step;
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < PER_PANEL; v++) sums[i][v] = (ints){0} + FIRST_SUM(start[i * groups]);
    for (int64_t quarter = 0; quarter < quarters; quarter++, numbers += rows, weight += 64) {
#if defined(__SSE2__)
        for (int v = 0; v < PER_PANEL; v++) { /* sixteen bits hold x + 256 y */
            const unsigned_shorts pairs = *((const unsigned_shorts *)weight + v);
            for (int i = 0; i < rows; i++) {
                const shorts four = (shorts)(numbers[i] - (ints){0});
                sums[i][v] = add_pairs(sums[i][v], (shorts)(pairs & 255), (four << 8) >> 8);
                sums[i][v] = add_pairs(sums[i][v], (shorts)(pairs >> 8), four >> 8);
            }
        }
#elif defined(__aarch64__)
        for (int v = 0; v < PER_PANEL; v++) {
            const int8x16_t some = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(weight + 16 * v), vdupq_n_u8(ZERO)));
            for (int i = 0; i < rows; i++) {
                const int8x16_t four = vreinterpretq_s8_s32(vdupq_n_s32(numbers[i]));
#if defined(__ARM_FEATURE_DOTPROD)
                sums[i][v] = (ints)vdotq_s32((int32x4_t)sums[i][v], some, four);
#else
                const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(some), vget_low_s8(four)));
                sums[i][v] += (ints)vpaddq_s32(low, vpaddlq_s16(vmull_high_s8(some, four)));
#endif
            }
        }
#else
        int8_t four[4];
        memcpy(four, numbers, 4);
        for (int j = 0; j < 64; j++) sums[0][j / 4 / WIDTH][j / 4 % WIDTH] += weight[j] * four[j % 4];
#endif
    }
}
#endif

/* Rows of the tile that begins where `left` rows are left. */
INLINE int64_t tile_rows(int64_t left) {
    for (int64_t rows = TILE_ROWS; rows > 1; rows = rows > 8 ? 8 : rows / 2)
        if (left >= rows) return rows;
    return 1;
}

/* The nearest whole numbers, of ties the even ones. */
INLINE ints nearest(floats x) {
#if defined(__AVX512F__)
    return (ints)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
    return (ints)_mm256_cvtps_epi32((__m256)x);
#elif defined(__SSE2__)
    return (ints)_mm_cvtps_epi32((__m128)x);
#elif defined(__aarch64__)
    return (ints)vcvtnq_s32_f32((float32x4_t)x);
#else
    ints whole;
    for (int i = 0; i < WIDTH; i++) whole[i] = x[i] == x[i] ? (int32_t)rintf(x[i]) : 0;
    return whole;
#endif
}

/* Round row `row` of the input, number `at` of a tile of `rows` rows that begins at `numbers`. */
static void round_row(const LinearCall *p, int64_t row, int8_t *numbers, int64_t at, int64_t rows, int64_t groups, float *unit, int32_t *start) {
    for (int64_t g = 0; g < groups; g++) {
        const int64_t first = g * p->group, left = p->inputs - first, n = left < p->group ? left : p->group, from = row * p->inputs + first;
        const uint16_t *halves_of = (const uint16_t *)p->input + from;
        const float *singles = (const float *)p->input + from;
        float wide[MOST_GROUP];
        int8_t rounded[MOST_GROUP];
        ints sum = {0};
        ints most = {0}; /* magnitudes are ordered as their bits are, with NaN above all */
        int64_t j = 0, filled = n;
        for (; j + WIDTH <= n; j += WIDTH) store(wide + j, p->is_float32 ? load(singles + j) : from_bfloat16(halves_of + j));
        for (; j < n; j++) wide[j] = p->is_float32 ? singles[j] : number((uint32_t)halves_of[j] << 16);
        for (; filled % 16; filled++) wide[filled] = 0;
        for (j = 0; j < filled; j += WIDTH) {
            const ints magnitude = (ints)load(wide + j) & 0x7fffffff;
            most = (ints)choose(magnitude > most, (floats)magnitude, (floats)most);
        }
        for (j = 1; j < WIDTH; j++) most[0] = most[j] > most[0] ? most[j] : most[0];
        const float largest = number((uint32_t)most[0]);
        const int is_finite = largest < INFINITY;
        if (!is_finite) memset(wide, 0, sizeof wide); /* the unit says what the group is; infinity has no whole number */
        const float one = (is_finite && largest > p->smallest ? largest : p->smallest) * p->inverse, per_unit = 1.0f / one;
        for (j = 0; j < filled; j += WIDTH) {
            const ints some = nearest(load(wide + j) * splat(per_unit));
            const bytes packed = __builtin_convertvector(some, bytes);
            memcpy(rounded + j, &packed, sizeof packed);
            sum += some;
        }
        unit[g] = is_finite ? one : NAN;
        start[g] = -ZERO * (int32_t)total(__builtin_convertvector(sum, floats)); /* exact: less than 2^24 */
        for (j = 0; j < n; j += 4) memcpy(numbers + ((first + j) * rows + 4 * at), rounded + j, 4);
    }
}

INLINE void store_bfloat16(uint16_t *to, floats x) {
    const ints raw = (ints)x, odd = (ints)((unsigned_ints)raw >> 16) & 1;
    const unsigned_ints half = (unsigned_ints)(raw + 0x7fff + odd) >> 16;
    *(halves *)to = __builtin_convertvector((ints)choose(x == x, (floats)half, (floats)(0x7fc0 - (ints){0})), halves);
}

/* The first `n` of WIDTH results, as the input. */
INLINE void write_results(const LinearCall *p, floats results, int64_t place, int64_t n) {
    const int64_t whole = n < WIDTH ? 0 : 1;
    float singles[WIDTH];
    uint16_t halves_of[WIDTH];
    if (p->is_float32) {
        store(whole ? (float *)p->output + place : singles, results);
        for (int64_t j = 0; !whole && j < n; j++) ((float *)p->output)[place + j] = singles[j];
    } else {
        store_bfloat16(whole ? (uint16_t *)p->output + place : halves_of, results);
        for (int64_t j = 0; !whole && j < n; j++) ((uint16_t *)p->output)[place + j] = halves_of[j];
    }
}

/* Results of a tile for `panels` panels. */
INLINE void multiply_tile(const int rows, const int panels, const LinearCall *p, const Rounded *from, int64_t at, int64_t row, int64_t panel) {
    const int64_t groups = from->groups, step = from->quarters * 64, per_group = p->group / 4, left = p->outputs - 16 * panel;
    const uint8_t *weight = p->weight + panel * step;
    const int32_t *numbers = (const int32_t *)(from->numbers + at * 4 * from->quarters), *start = from->start + at * groups;
    const float *unit = from->unit + at * groups, *scale = p->scale + 16 * panel;
    floats totals[TILE_ROWS][PER_TILE];
    Sums sums;
    float bias[16 * TILE_PANELS] = {0};
    if (p->bias) memcpy(bias, p->bias + 16 * panel, sizeof(float) * (size_t)(left < 16 * panels ? left : 16 * panels));
    for (int64_t g = 0; g < groups; g++, numbers += per_group * rows, weight += per_group * 64, unit++) {
        const int64_t quarters = from->quarters - g * per_group;
        multiply_group(rows, panels, weight, step, numbers, quarters < per_group ? quarters : per_group, start + g, groups, sums);
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
            for (int k = 0; k < panels * PER_PANEL; k++) {
                floats x = __builtin_convertvector(sums[i][k], floats) * splat(unit[i * groups]);
                if (g) x += totals[i][k];
                totals[i][k] = x;
            }
    }
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int k = 0; k < panels * PER_PANEL; k++)
            write_results(p, totals[i][k] * load(scale + k * WIDTH) + load(bias + k * WIDTH), (row + i) * p->outputs + 16 * panel + k * WIDTH,
                          left - k * WIDTH);
}

/* As `multiply_tile`, with numbers of rows and panels that the compiler knows. */
static void multiply_some(const LinearCall *p, const Rounded *from, int64_t at, int64_t row, int64_t rows, int64_t panel, int64_t panels) {
#define TILE_OF(some)                                                  \
    if (TILE_ROWS >= some && rows == some) {                          \
        if (panels == TILE_PANELS)                                    \
            multiply_tile(some, TILE_PANELS, p, from, at, row, panel); \
        else                                                          \
            multiply_tile(some, 1, p, from, at, row, panel);          \
        return;                                                       \
    }
#if TILE_ROWS > 4
    TILE_OF(12)
    TILE_OF(8)
#endif
#if TILE_ROWS > 2
    TILE_OF(4)
#endif
#if TILE_ROWS > 1
    TILE_OF(2)
#endif
    TILE_OF(1)
}

/* Rows `first` to `stop` of a slab that begins at row `begin`, for some panels. */
static void multiply_block(const LinearCall *p, const Rounded *from, int64_t begin, int64_t first, int64_t stop, int64_t panel, int64_t last) {
    for (; panel < last; panel += TILE_PANELS) {
        const int64_t panels = last - panel < TILE_PANELS ? last - panel : TILE_PANELS;
        for (int64_t at = first, rows; at < stop; at += rows) {
            rows = tile_rows(stop - at);
            multiply_some(p, from, at, begin + at, rows, panel, panels);
        }
    }
}

static void round_block(const LinearCall *p, const Rounded *to, int64_t begin, int64_t first, int64_t stop) {
    for (int64_t at = first, rows; at < stop; at += rows) {
        rows = tile_rows(stop - at);
        for (int64_t i = 0; i < rows; i++)
            round_row(p, begin + at + i, to->numbers + at * 4 * to->quarters, i, rows, to->groups, to->unit + (at + i) * to->groups,
                      to->start + (at + i) * to->groups);
    }
}

/* `n` rows from `begin` on: in blocks of rows, and in parts of the weights. */
typedef struct {
    const LinearCall *p;
    const Rounded *rounded;
    int64_t begin, n, blocks, parts;
} Slab;

static int64_t block_stop(const Slab *s, int64_t block) { return block + 1 < s->blocks ? (block + 1) * BLOCK_ROWS : s->n; }

static void round_blocks(void *of, Jobs *jobs) {
    const Slab *s = of;
    for (int64_t block; (block = next_job(jobs)) >= 0;)
        round_block(s->p, s->rounded, s->begin, block * BLOCK_ROWS, block_stop(s, block));
}

static void multiply_blocks(void *of, Jobs *jobs) {
    const Slab *s = of;
    const int64_t panels = (s->p->outputs + 15) / 16, pairs = (panels + 1) / 2;
    for (int64_t job; (job = next_job(jobs)) >= 0;) {
        const int64_t block = job / s->parts, part = job % s->parts, stop = pairs * (part + 1) / s->parts * 2;
        multiply_block(s->p, s->rounded, s->begin, block * BLOCK_ROWS, block_stop(s, block), pairs * part / s->parts * 2,
                       stop < panels ? stop : panels);
    }
}

PRESCORE_EXPORT int prescore_int8_linear(const LinearCall *p) {
    const int64_t slab = p->rows < SLAB_ROWS ? p->rows : SLAB_ROWS, threads = prescore_threads();
    const int64_t panels = (p->outputs + 15) / 16, pairs = (panels + 1) / 2;
    Rounded rounded = {.quarters = (p->inputs + 3) / 4, .groups = (p->inputs + p->group - 1) / p->group};
    const size_t n_numbers = (size_t)(slab * 4 * rounded.quarters), n_groups = (size_t)(slab * rounded.groups);
    rounded.numbers = malloc(n_numbers + 8 * n_groups + 1);
    if (!rounded.numbers) return 1;
    rounded.unit = (float *)(rounded.numbers + n_numbers);
    rounded.start = (int32_t *)(rounded.unit + n_groups);
    for (int64_t begin = 0; begin < p->rows; begin += slab) {
        const int64_t n = p->rows - begin < slab ? p->rows - begin : slab, blocks = (n + BLOCK_ROWS - 1) / BLOCK_ROWS;
        const int is_large = threads > 1 && n * p->inputs * p->outputs > PARALLEL;
        /* parts of the weights, so that all threads have work; pairs of panels stay together */
        const int64_t wanted = is_large ? (n == 1 ? 1 : 3) * threads / blocks + 1 : 1, parts = wanted < pairs ? wanted : pairs;
        Slab of = {p, &rounded, begin, n, blocks, parts};
        Jobs all = {0, blocks * parts};
        prescore_run(blocks, round_blocks, &of);
        if (is_large)
            prescore_run(all.stop, multiply_blocks, &of);
        else
            multiply_blocks(&of, &all);
    }
    free(rounded.numbers);
    return 0;
}

/* --- decoder layers */

#define LAYER_ROWS 384 /* rows that pass through all parts of a layer together */
#define ROWS_PER_JOB 16
#define MOST_DIM 512

/* A linear layer; the bias has the type of the rows. */
typedef struct {
    const uint8_t *weight;
    const float *scale;
    const void *bias;
    int64_t inputs, outputs;
} Product;

enum { BEFORE_ATTENTION, OF_QUERIES, OF_KEYS, AFTER_ATTENTION, BEFORE_MLP, AFTER_MLP, NORMS };
enum { QUERY, KEY, VALUE, OUTPUT, GATE, UP, DOWN, PRODUCTS };

/* Must equal `_LayerCall` in layers.py. Rows and weights of norms are bfloat16 or float32; sizes are multiples of 32, and
 * heads have at most MOST_DIM dimensions. */
typedef struct {
    const void *hidden, *attended, *cosine, *sine; /* [rows, width], [rows, heads, dim], [rows, dim] */
    void *projected;                               /* [rows, heads + 2 kv_heads, dim]: queries, keys, values */
    void *output;                                  /* [rows, width] */
    const void *norms[NORMS];                      /* NULL = none */
    float eps[NORMS];
    Product products[PRODUCTS];
    int64_t rows, width, heads, kv_heads, dim, group, is_float32;
    float plus;         /* added to the weights of norms */
    float steep, cubic; /* the activation is x / (1 + exp(-steep * (x + cubic * x^3))) */
    float smallest, inverse;
} LayerCall;

/* Rows of a layer, and their parts: a buffer is [rows, numbers], the query, key and value follow one another as such. */
typedef struct {
    const LayerCall *p;
    void (*work)(const void *of, int64_t row);
    int64_t begin, n;
    float *row, *some, *more, *gate, *heads, *bias;
    char *scratch;
} LayerRows;

INLINE const void *at_number(const LayerCall *p, const void *data, int64_t number) {
    return (const char *)data + number * (p->is_float32 ? 4 : 2);
}

static void widen_row(const LayerCall *p, const void *from, int64_t at, float *to, int64_t n) {
    from = at_number(p, from, at);
    for (int64_t i = 0; i < n; i += WIDTH)
        store(to + i, p->is_float32 ? load((const float *)from + i) : from_bfloat16((const uint16_t *)from + i));
}

static void narrow_row(const LayerCall *p, const float *from, void *to, int64_t at, int64_t n) {
    to = (void *)at_number(p, to, at);
    for (int64_t i = 0; i < n; i += WIDTH) {
        if (p->is_float32)
            store((float *)to + i, load(from + i));
        else
            store_bfloat16((uint16_t *)to + i, load(from + i));
    }
}

/* Divide by the root of the mean square, and multiply by the weights of a norm, where there is one. */
static void normalise(const LayerCall *p, int which, float *row, int64_t n) {
    const void *weight = p->norms[which];
    if (!weight) return;
    floats sum = splat(0);
    for (int64_t i = 0; i < n; i += WIDTH) sum += load(row + i) * load(row + i);
    const float factor = 1.0f / sqrtf(total(sum) / (float)n + p->eps[which]);
    for (int64_t i = 0; i < n; i += WIDTH) {
        const floats by = p->is_float32 ? load((const float *)weight + i) : from_bfloat16((const uint16_t *)weight + i);
        store(row + i, load(row + i) * splat(factor) * (by + splat(p->plus)));
    }
}

static void add_residual(float *to, const float *more, int64_t n) {
    for (int64_t i = 0; i < n; i += WIDTH) store(to + i, load(to + i) + load(more + i));
}

static void work_rows(void *of, Jobs *jobs) {
    const LayerRows *s = of;
    for (int64_t job; (job = next_job(jobs)) >= 0;)
        for (int64_t i = job * ROWS_PER_JOB; i < s->n && i < (job + 1) * ROWS_PER_JOB; i++) s->work(s, i);
}

/* Do the same for every row. */
static void for_rows(LayerRows *s, void (*work)(const void *of, int64_t row)) {
    s->work = work;
    prescore_run((s->n + ROWS_PER_JOB - 1) / ROWS_PER_JOB, work_rows, s);
}

/* Products of one row with several layers; `pairs` of panels before each of them, and of all. */
typedef struct {
    LinearCall calls[3];
    Rounded rounded;
    int64_t n, parts, pairs[4];
} Joint;

static void multiply_joint(void *of, Jobs *jobs) {
    const Joint *s = of;
    for (int64_t job; (job = next_job(jobs)) >= 0;) {
        const int64_t begin = s->pairs[s->n] * job / s->parts, stop = s->pairs[s->n] * (job + 1) / s->parts;
        for (int64_t i = 0; i < s->n; i++) {
            const int64_t panels = (s->calls[i].outputs + 15) / 16;
            const int64_t first = begin > s->pairs[i] ? begin - s->pairs[i] : 0, last = (stop < s->pairs[i + 1] ? stop : s->pairs[i + 1]) - s->pairs[i];
            if (first < last) multiply_block(s->calls + i, &s->rounded, 0, 0, 1, 2 * first, 2 * last < panels ? 2 * last : panels);
        }
    }
}

/* Products of rows with `n` layers, one result after the other in `to`; returns 1 where there is no memory. */
static int multiply_rows(const LayerRows *r, int first, int64_t n, const float *rows, float *to) {
    const LayerCall *p = r->p;
    const Product *some = p->products + first;
    Joint s = {.n = n, .rounded = {.quarters = (some->inputs + 3) / 4, .groups = (some->inputs + p->group - 1) / p->group}};
    float *bias = r->bias;
    for (int64_t i = 0; i < n; i++) {
        s.calls[i] = (LinearCall){.input = rows, .weight = some[i].weight, .scale = some[i].scale, .output = to, .rows = r->n,
                                  .inputs = some[i].inputs, .outputs = some[i].outputs, .group = p->group, .is_float32 = 1,
                                  .smallest = p->smallest, .inverse = p->inverse};
        if (some[i].bias) {
            widen_row(p, some[i].bias, 0, bias, some[i].outputs);
            s.calls[i].bias = bias;
            bias += some[i].outputs;
        }
        to += r->n * some[i].outputs;
        s.pairs[i + 1] = s.pairs[i] + ((some[i].outputs + 15) / 16 + 1) / 2;
    }
    if (r->n > 1) {
        for (int64_t i = 0; i < n; i++)
            if (prescore_int8_linear(s.calls + i)) return 1;
        return 0;
    }
    s.rounded.numbers = (int8_t *)r->scratch;
    s.rounded.unit = (float *)(r->scratch + 4 * s.rounded.quarters);
    s.rounded.start = (int32_t *)(s.rounded.unit + s.rounded.groups);
    round_block(s.calls, &s.rounded, 0, 0, 1);
    const int64_t threads = prescore_threads(), all = s.pairs[n];
    const int is_large = threads > 1 && 32 * all * some->inputs > PARALLEL;
    s.parts = !is_large ? 1 : 2 * threads < all ? 2 * threads : all;
    prescore_run(s.parts, multiply_joint, &s);
    return 0;
}

/* The buffers for at most LAYER_ROWS rows; returns 1 where there is no memory. */
static int make_rows(const LayerCall *p, LayerRows *s) {
    const int64_t all = (p->heads + 2 * p->kv_heads) * p->dim, inner = p->products[GATE].outputs, attended = p->heads * p->dim;
    const int64_t most = attended > p->width ? attended : p->width, n = p->rows < LAYER_ROWS ? p->rows : LAYER_ROWS;
    const int64_t inputs = inner > most ? inner : most;
    *s = (LayerRows){.p = p};
    s->row = malloc(sizeof(float) * (size_t)(n * (p->width + 2 * most + 2 * inner + all) + all + 2 * inner + 2 * most + 3 * inputs + 64));
    if (!s->row) return 1;
    s->some = s->row + n * p->width;
    s->more = s->some + n * most;
    s->gate = s->more + n * most;
    s->heads = s->gate + n * 2 * inner;
    s->bias = s->heads + n * all;
    s->scratch = (char *)(s->bias + all + 2 * inner + 2 * most);
    return 0;
}

static void enter_row(const void *of, int64_t i) {
    const LayerRows *s = of;
    widen_row(s->p, s->p->hidden, (s->begin + i) * s->p->width, s->row + i * s->p->width, s->p->width);
    normalise(s->p, BEFORE_ATTENTION, s->row + i * s->p->width, s->p->width);
}

/* Heads get their norms and positions: halves x and y become x cos - y sin and y cos + x sin. */
static void place_heads(const void *of, int64_t i) {
    const LayerRows *s = of;
    const LayerCall *p = s->p;
    const int64_t dim = p->dim, half = dim / 2, counts[] = {p->heads, p->kv_heads, p->kv_heads};
    float cosine[MOST_DIM], sine[MOST_DIM];
    widen_row(p, p->cosine, (s->begin + i) * dim, cosine, dim);
    widen_row(p, p->sine, (s->begin + i) * dim, sine, dim);
    int64_t to = (s->begin + i) * (p->heads + 2 * p->kv_heads) * dim;
    float *from = s->heads;
    for (int kind = 0; kind < 3; from += s->n * counts[kind] * dim, kind++)
        for (int64_t h = 0; h < counts[kind]; h++, to += dim) {
            float *head = from + (i * counts[kind] + h) * dim;
            if (kind < 2) {
                normalise(p, kind == 0 ? OF_QUERIES : OF_KEYS, head, dim);
                for (int64_t j = 0; j < half; j += WIDTH) {
                    const floats x = load(head + j), y = load(head + half + j);
                    store(head + j, x * load(cosine + j) - y * load(sine + j));
                    store(head + half + j, y * load(cosine + half + j) + x * load(sine + half + j));
                }
            }
            narrow_row(p, head, p->projected, to, dim);
        }
}

static void enter_attended(const void *of, int64_t i) {
    const LayerRows *s = of;
    const int64_t n = s->p->heads * s->p->dim;
    widen_row(s->p, s->p->attended, (s->begin + i) * n, s->some + i * n, n);
}

static void enter_mlp(const void *of, int64_t i) {
    const LayerRows *s = of;
    const int64_t n = s->p->width;
    float *row = s->row + i * n, *some = s->some + i * n, *more = s->more + i * n;
    widen_row(s->p, s->p->hidden, (s->begin + i) * n, row, n);
    normalise(s->p, AFTER_ATTENTION, more, n);
    add_residual(row, more, n);
    memcpy(some, row, sizeof(float) * (size_t)n);
    normalise(s->p, BEFORE_MLP, some, n);
}

static void activate(const void *of, int64_t i) {
    const LayerRows *s = of;
    const int64_t n = s->p->products[GATE].outputs;
    float *gate = s->gate + i * n;
    const float *up = s->gate + (s->n + i) * n;
    for (int64_t j = 0; j < n; j += WIDTH) {
        const floats x = load(gate + j), power = (x + splat(s->p->cubic) * x * x * x) * splat(-s->p->steep);
        store(gate + j, x * load(up + j) / (splat(1.0f) + vexp(power)));
    }
}

static void leave_row(const void *of, int64_t i) {
    const LayerRows *s = of;
    const int64_t n = s->p->width;
    normalise(s->p, AFTER_MLP, s->more + i * n, n);
    add_residual(s->row + i * n, s->more + i * n, n);
    narrow_row(s->p, s->row + i * n, s->p->output, (s->begin + i) * n, n);
}

/* Queries, keys and values of rows. */
PRESCORE_EXPORT int prescore_layer_before(const LayerCall *p) {
    LayerRows s;
    int failed = make_rows(p, &s);
    for (; !failed && s.begin < p->rows; s.begin += s.n) {
        s.n = p->rows - s.begin < LAYER_ROWS ? p->rows - s.begin : LAYER_ROWS;
        for_rows(&s, enter_row);
        failed = multiply_rows(&s, QUERY, 3, s.row, s.heads);
        if (!failed) for_rows(&s, place_heads);
    }
    free(s.row);
    return failed;
}

/* What the layer makes of rows and their attention. */
PRESCORE_EXPORT int prescore_layer_after(const LayerCall *p) {
    LayerRows s;
    int failed = make_rows(p, &s);
    for (; !failed && s.begin < p->rows; s.begin += s.n) {
        s.n = p->rows - s.begin < LAYER_ROWS ? p->rows - s.begin : LAYER_ROWS;
        for_rows(&s, enter_attended);
        if ((failed = multiply_rows(&s, OUTPUT, 1, s.some, s.more))) break;
        for_rows(&s, enter_mlp);
        if ((failed = multiply_rows(&s, GATE, 2, s.some, s.gate))) break;
        for_rows(&s, activate);
        if ((failed = multiply_rows(&s, DOWN, 1, s.gate, s.more))) break;
        for_rows(&s, leave_row);
    }
    free(s.row);
    return failed;
}
