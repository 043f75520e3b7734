/* Linear layers with int8 weights: rows of bfloat16 or float32 are rounded to int8, multiplied, scaled and written in one call. A
 * decode step of a decoder layer is two calls, before and after its attention.
 *
 * linear.py and steps.py make the only calls and check what they touch. Weights lie sixteen outputs side by side, four inputs of each
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

/* --- a decode step of a decoder layer: one row */

/* A linear layer; the bias has the type of the row. */
typedef struct {
    const uint8_t *weight;
    const float *scale;
    const void *bias;
    int64_t inputs, outputs;
} Product;

enum { BEFORE_ATTENTION, OF_QUERIES, OF_KEYS, AFTER_ATTENTION, BEFORE_MLP, AFTER_MLP, NORMS };
enum { QUERY, KEY, VALUE, OUTPUT, GATE, UP, DOWN, PRODUCTS };

/* Must equal `_LayerCall` in steps.py. Rows and weights of norms are bfloat16 or float32; sizes are multiples of 32. */
typedef struct {
    const void *hidden, *attended, *cosine, *sine; /* [width], [heads, dim], [dim] */
    void *projected;                               /* queries, keys and values of the heads */
    void *output;                                  /* [width] */
    const void *norms[NORMS];                      /* NULL = none */
    float eps[NORMS];
    Product products[PRODUCTS];
    int64_t width, heads, kv_heads, dim, group, is_float32;
    float plus;         /* added to the weights of norms */
    float steep, cubic; /* the activation is x / (1 + exp(-steep * (x + cubic * x^3))) */
    float smallest, inverse;
} LayerCall;

static void widen_row(const LayerCall *p, const void *from, float *to, int64_t n) {
    for (int64_t i = 0; i < n; i += WIDTH)
        store(to + i, p->is_float32 ? load((const float *)from + i) : from_bfloat16((const uint16_t *)from + i));
}

static void narrow_row(const LayerCall *p, const float *from, void *to, int64_t n) {
    for (int64_t i = 0; i < n; i += WIDTH) {
        if (p->is_float32)
            store((float *)to + i, load(from + i));
        else
            store_bfloat16((uint16_t *)to + i, load(from + i));
    }
}

/* Divide by the root of the mean square, and multiply by the weights of a norm; in place where there is one. */
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

/* Products of a row with `n` layers, one result after the other in `to`. `scratch` holds the rounded row and the biases. */
static void multiply_row(const LayerCall *p, const Product *some, int64_t n, const float *row, float *to, char *scratch) {
    Joint s = {.n = n, .rounded = {.quarters = (some->inputs + 3) / 4, .groups = (some->inputs + p->group - 1) / p->group}};
    s.rounded.numbers = (int8_t *)scratch;
    s.rounded.unit = (float *)(scratch + 4 * s.rounded.quarters);
    s.rounded.start = (int32_t *)(s.rounded.unit + s.rounded.groups);
    float *bias = (float *)(s.rounded.start + s.rounded.groups);
    for (int64_t i = 0; i < n; i++) {
        s.calls[i] = (LinearCall){.input = row, .weight = some[i].weight, .scale = some[i].scale, .output = to, .rows = 1,
                                  .inputs = some[i].inputs, .outputs = some[i].outputs, .group = p->group, .is_float32 = 1,
                                  .smallest = p->smallest, .inverse = p->inverse};
        if (some[i].bias) {
            widen_row(p, some[i].bias, bias, some[i].outputs);
            s.calls[i].bias = bias;
            bias += some[i].outputs;
        }
        to += some[i].outputs;
        s.pairs[i + 1] = s.pairs[i] + ((some[i].outputs + 15) / 16 + 1) / 2;
    }
    round_block(s.calls, &s.rounded, 0, 0, 1);
    const int64_t threads = prescore_threads(), all = s.pairs[n];
    const int is_large = threads > 1 && 32 * all * some->inputs > PARALLEL;
    s.parts = !is_large ? 1 : 2 * threads < all ? 2 * threads : all;
    Jobs jobs = {0, s.parts};
    if (is_large)
        prescore_run(s.parts, multiply_joint, &s);
    else
        multiply_joint(&s, &jobs);
}

/* Numbers of the scratch of `multiply_row`, at most. */
static int64_t scratch_size(const LayerCall *p) {
    int64_t inputs = 0, outputs = 0;
    for (int i = 0; i < PRODUCTS; i++) {
        inputs = p->products[i].inputs > inputs ? p->products[i].inputs : inputs;
        outputs += p->products[i].outputs;
    }
    return 3 * inputs + outputs + 64;
}

/* A head with its position: halves x and y become x cos - y sin and y cos + x sin. */
static void rotate(float *head, const float *cosine, const float *sine, int64_t dim) {
    for (int64_t i = 0, j = dim / 2; j < dim; i += WIDTH, j += WIDTH) {
        const floats x = load(head + i), y = load(head + j);
        store(head + i, x * load(cosine + i) - y * load(sine + i));
        store(head + j, y * load(cosine + j) + x * load(sine + j));
    }
}

/* Queries, keys and values of a row. */
PRESCORE_EXPORT int prescore_layer_before(const LayerCall *p) {
    const int64_t wide = p->width, dim = p->dim, rotated = (p->heads + p->kv_heads) * dim, all = rotated + p->kv_heads * dim;
    float *row = malloc(sizeof(float) * (size_t)(wide + all + 2 * dim + scratch_size(p)));
    if (!row) return 1;
    float *heads = row + wide, *cosine = heads + all, *sine = cosine + dim;
    widen_row(p, p->hidden, row, wide);
    widen_row(p, p->cosine, cosine, dim);
    widen_row(p, p->sine, sine, dim);
    normalise(p, BEFORE_ATTENTION, row, wide);
    multiply_row(p, p->products + QUERY, 3, row, heads, (char *)(sine + dim));
    for (int64_t at = 0; at < rotated; at += dim) {
        normalise(p, at < p->heads * dim ? OF_QUERIES : OF_KEYS, heads + at, dim);
        rotate(heads + at, cosine, sine, dim);
    }
    narrow_row(p, heads, p->projected, all);
    free(row);
    return 0;
}

/* What the layer makes of a row and its attention. */
PRESCORE_EXPORT int prescore_layer_after(const LayerCall *p) {
    const int64_t wide = p->width, attended = p->heads * p->dim, inner = p->products[GATE].outputs;
    const int64_t most = attended > wide ? attended : wide;
    float *row = malloc(sizeof(float) * (size_t)(wide + 2 * most + 2 * inner + scratch_size(p)));
    if (!row) return 1;
    float *some = row + wide, *more = some + most, *gate = more + most, *up = gate + inner;
    char *scratch = (char *)(up + inner);
    widen_row(p, p->hidden, row, wide);
    widen_row(p, p->attended, some, attended);
    multiply_row(p, p->products + OUTPUT, 1, some, more, scratch);
    normalise(p, AFTER_ATTENTION, more, wide);
    for (int64_t i = 0; i < wide; i += WIDTH) store(row + i, load(row + i) + load(more + i));
    memcpy(some, row, sizeof(float) * (size_t)wide);
    normalise(p, BEFORE_MLP, some, wide);
    multiply_row(p, p->products + GATE, 2, some, gate, scratch);
    for (int64_t i = 0; i < inner; i += WIDTH) {
        const floats x = load(gate + i), power = (x + splat(p->cubic) * x * x * x) * splat(-p->steep);
        store(gate + i, x * load(up + i) / (splat(1.0f) + vexp(power)));
    }
    multiply_row(p, p->products + DOWN, 1, gate, more, scratch);
    normalise(p, AFTER_MLP, more, wide);
    for (int64_t i = 0; i < wide; i += WIDTH) store(row + i, load(row + i) + load(more + i));
    narrow_row(p, row, p->output, wide);
    free(row);
    return 0;
}
