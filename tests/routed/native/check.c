/* Checks the C code of one level against plain scalar C, then prints what a routed call gives: other levels must agree.
 *
 * test_levels.py compiles and runs it. It needs neither Python nor torch on the machine that runs it.
 */
#include <stdio.h>

#include "centroids.h"
#include "index.c"
#include "linear.c"
#include "lists.c"

int prescore_routed_forward(const RoutedCall *p);
void prescore_native_follow(int threads);

static int failures = 0;
static uint64_t state = 1;

static void check(int holds, const char *what, double got, double wanted) {
    if (holds) return;
    if (failures++ < 20) fprintf(stderr, "%s must be %.9g, got %.9g\n", what, wanted, got);
}
static void close_to(const char *what, double got, double wanted, double size) {
    check(got == wanted || fabs(got - wanted) <= 1e-5 * size || (isnan(got) && isnan(wanted)), what, got, wanted);
}

/* From -127 to 127. */
static int whole(void) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (int)((state >> 33) % 255) - 127;
}
static float real(void) { return (float)whole() / 64.0f; } /* a float16 and a bfloat16 too */
static void fill(float *to, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = real();
}

static void check_int8(void) {
    static uint8_t keys[64 * 64];
    static int32_t queries[32 * 64], got[32 * 16];
    for (int64_t quarter = 4; quarter <= 64; quarter += 4)
        for (int extreme = 0; extreme < 5; extreme++) {
            const uint32_t some = extreme ? 1u << (quarter / 2 - 1) : 0x8001b00d; /* bits of queries */
            int8_t *numbers = (int8_t *)queries;
            int32_t starts[32] = {0}, *at = got;
            for (int64_t i = 0; i < 64 * quarter; i++) keys[i] = extreme > 2 ? 1 : extreme ? 127 : (uint8_t)(whole() / 2 + KEY_ZERO);
            for (int64_t i = 0; i < 32 * 4 * quarter; i++) {
                numbers[i] = (int8_t)(extreme == 1 || extreme == 3 ? -127 : extreme ? (i % 2 ? 127 : -127) : whole());
                starts[i / (4 * quarter)] -= KEY_ZERO * numbers[i];
            }
            int8_products(keys, some, queries, quarter, starts, quarter, got);
            for (int64_t t = 0; t < 32; t++) {
                if (!(some >> t & 1)) continue;
                for (int64_t key = 0; key < 16; key++) {
                    int32_t wanted = 0;
                    for (int64_t i = 0; i < 4 * quarter; i++)
                        wanted += (keys[(i / 4 * 16 + key) * 4 + i % 4] - KEY_ZERO) * numbers[t * 4 * quarter + i];
                    check(at[key] == wanted, "an int8 product", at[key], wanted);
                }
                at += 16;
            }
        }
    for (int i = 0; i < 33; i++) {
        uint16_t numbers[32] = {0};
        if (i < 32) numbers[i] = (uint16_t)(1 << i % 16);
        check(having(numbers, 0xffff) == (i < 32 ? 1u << i : 0), "bits of numbers", having(numbers, 0xffff), i);
        check(having(numbers, 4) == (i == 2 || i == 18 ? 1u << i : 0), "numbers with a bit", having(numbers, 4), i);
    }
    for (unsigned above = 0; above < 65536; above += above < 64 ? 1 : 977) {
        int32_t rows[16], hits[48], n = 3;
        float hit_logits[48], values[16];
        for (int i = 0; i < 16; i++) values[i] = real(), rows[i] = 1000 + i;
        const int32_t got = append_hits(hits, hit_logits, n, rows, values, above);
        for (int i = 0; i < 16; i++) {
            if (!(above >> i & 1)) continue;
            check(hits[n] == rows[i] && hit_logits[n] == values[i], "a hit", hits[n], rows[i]);
            n++;
        }
        check(got == n, "the number of hits", got, n);
    }
}

static void check_numbers(void) {
    for (float x = -120; x < 100; x += 0.37f * WIDTH) {
        float in[WIDTH], out[WIDTH];
        for (int i = 0; i < WIDTH; i++) in[i] = x + 0.37f * (float)i;
        store(out, vexp(load(in)));
        for (int i = 0; i < WIDTH; i++) {
            const double wanted = in[i] < -87 ? 0 : exp(in[i] < 88 ? in[i] : 88);
            close_to("exp", out[i], wanted, wanted * 0.1);
        }
        for (int i = 0; i < WIDTH; i++) in[i] = expf(in[i] < -80 ? -80 : in[i] > 80 ? 80 : in[i]);
        store(out, vlog(load(in)));
        for (int i = 0; i < WIDTH; i++) close_to("log", out[i], log(in[i]), 0.1 * (1 + fabs(log(in[i]))));
    }
    const float odd[] = {0, -0.0f, 1, -1, 88, -87, 1e30f, -1e30f, INFINITY, -INFINITY, NAN, 3};
    const int n = sizeof odd / sizeof *odd;
    for (int a = 0; a < n; a++)
        for (int b = 0; b < n; b++) {
            const floats x = splat_bits(odd[a]), y = splat_bits(odd[b]);
            const int last = WIDTH - 1;
            close_to("larger", larger(x, y)[last], odd[a] > odd[b] ? odd[a] : odd[b], 0);
            close_to("smaller", smaller(x, y)[last], odd[a] < odd[b] ? odd[a] : odd[b], 0);
            check(at_least(x, y) == (odd[a] >= odd[b] ? (1u << WIDTH) - 1 : 0), "at_least", at_least(x, y), odd[a] >= odd[b]);
        }
    check(vexp(splat_bits(NAN))[0] != vexp(splat_bits(NAN))[0], "exp of NaN", vexp(splat_bits(NAN))[0], NAN);
    check(vexp(splat_bits(-INFINITY))[0] == 0, "exp of -inf", vexp(splat_bits(-INFINITY))[0], 0);
    for (int repeat = 0; repeat < 100; repeat++) {
        float v[4 * WIDTH], w[WIDTH], to[4];
        floats four[4];
        fill(v, 4 * WIDTH);
        fill(w, WIDTH);
        double sum[4] = {0}, most = -INFINITY;
        unsigned wanted = 0;
        for (int i = 0; i < 4 * WIDTH; i++) sum[i / WIDTH] += v[i];
        for (int i = 0; i < WIDTH; i++) {
            most = v[i] > most ? v[i] : most;
            wanted |= (v[i] >= w[i] ? 1u : 0u) << i;
        }
        memcpy(four, v, sizeof v);
        totals(four, to);
        for (int i = 0; i < 4; i++) close_to("a sum of four", to[i], sum[i], 1);
        close_to("a sum", total(load(v)), sum[0], 1);
        check(largest(load(v)) == most, "the largest", largest(load(v)), most);
        check(at_least(load(v), load(w)) == wanted, "a comparison", at_least(load(v), load(w)), wanted);
        check(bits(load(v) >= load(w)) == wanted, "bits", bits(load(v) >= load(w)), wanted);
    }
}

/* Every sixteen-bit number. */
static void check_halves(void) {
    static uint16_t raw[65536];
    for (int i = 0; i < 65536; i++) raw[i] = (uint16_t)i;
    for (int i = 0; i < 65536; i += WIDTH) {
        float brain[WIDTH], half[WIDTH];
        store(brain, from_bfloat16(raw + i));
        store(half, from_float16(raw + i));
        for (int k = 0; k < WIDTH; k++) {
            const int number = i + k, power = number >> 10 & 31, part = number & 1023;
            const uint32_t high = (uint32_t)number << 16;
            float wanted;
            memcpy(&wanted, &high, 4);
            close_to("a bfloat16", brain[k], wanted, 0);
            wanted = power == 31 ? (part ? NAN : INFINITY) : power ? ldexpf((float)(1024 + part), power - 25) : ldexpf((float)part, -24);
            close_to("a float16", half[k], number & 0x8000 ? -wanted : wanted, 0);
            check(!signbit(half[k]) == !(number & 0x8000) || isnan(wanted), "the sign of a float16", half[k], wanted);
        }
    }
}

/* Numbers of one type where a call reads them. */
static Rows rows_of(const float *from, int64_t n, int64_t type, const int64_t *at, int64_t step) {
    uint16_t *halves = malloc(2 * (size_t)n + 64);
    for (int64_t i = 0; i < n; i++) {
        uint32_t raw;
        memcpy(&raw, from + i, 4);
        const uint32_t length = raw & 0x7fffffff;
        halves[i] = (uint16_t)(type == BFLOAT16 ? raw >> 16 : raw >> 16 & 0x8000);
        if (type == FLOAT16 && length) halves[i] |= (uint16_t)((length - (112u << 23)) >> 13);
    }
    if (type == FLOAT32) free(halves);
    return (Rows){type == FLOAT32 ? (const void *)from : halves, at, step, type};
}
static void free_rows(Rows *r) {
    if (r->type != FLOAT32) free((void *)r->data);
}

static void check_products(void) {
    static float a[40 * 96], m[96 * 96], to[96 * 96], given[96 * 96];
    const int64_t sizes[] = {1, 2, 3, 4, 5, 7, 8, 32};
    fill(a, 40 * 96);
    fill(m, 96 * 96);
    for (int s = 0; s < 8; s++)
        for (int64_t wide = 16; wide <= 96; wide += 16)
            for (int add = 0; add < 2; add++) {
                const int64_t n = sizes[s], inner = 5 + 7 * s;
                fill(given, n * 96);
                memcpy(to, given, sizeof(float) * 96 * (size_t)n);
                product(to, 96, a, 96, 1, n, m, 96, 16, inner, wide, add);
                for (int64_t t = 0; t < n; t++)
                    for (int64_t c = 0; c < wide; c++) {
                        double sum = add ? given[t * 96 + c] : 0;
                        for (int64_t i = 0; i < inner; i++) sum += (double)a[t * 96 + i] * m[i * 96 + c];
                        close_to("a product", to[t * 96 + c], sum, 10);
                    }
            }
    for (int64_t dim = 16; dim <= 96; dim += 16) {
        turned_product(to, 96, a, 96, dim, m, 96, 37, dim, 0);
        for (int64_t t = 0; t < dim; t++)
            for (int64_t c = 0; c < dim; c++) {
                double sum = 0;
                for (int64_t i = 0; i < 37; i++) sum += (double)a[i * 96 + t] * m[i * 96 + c];
                close_to("a turned product", to[t * 96 + c], sum, 10);
            }
        second_moment(to, m, 29, dim);
        for (int64_t t = 0; t < dim; t++)
            for (int64_t c = 0; c < dim; c++) {
                double sum = 0;
                for (int64_t i = 0; i < 29; i++) sum += (double)m[i * dim + t] * m[i * dim + c];
                close_to("a second moment", to[t * dim + c], sum, 10);
            }
        for (int64_t type = FLOAT32; type <= FLOAT16; type++) {
            const int64_t at[] = {0, 2};
            const int32_t places[] = {3, 0, 17, 5, 5, 31, 8};
            Rows r = rows_of(a, 40 * 96, type, at, 96);
            float dots[12], sums[96];
            for (int64_t n = 1; n <= 7; n++) {
                row_dots(dots, &r, 1, places, n, m, dim);
                memcpy(sums, m, sizeof sums);
                add_rows(sums, &r, 1, places, m + 200, n, dim);
                for (int64_t i = 0; i < n; i++) {
                    double sum = 0;
                    for (int64_t d = 0; d < dim; d++) sum += (double)a[2 + places[i] * 96 + d] * m[d];
                    close_to("a product with a row", dots[i], sum, 10);
                    close_to("a product with one row", row_dot(&r, row_offset(&r, 1, places[i]), m, dim), sum, 10);
                }
                for (int64_t d = 0; d < dim; d++) {
                    double sum = m[d];
                    for (int64_t i = 0; i < n; i++) sum += (double)m[200 + i] * a[2 + places[i] * 96 + d];
                    close_to("a sum of rows", sums[d], sum, 10);
                }
            }
            free_rows(&r);
        }
    }
}

static double normal_below(double x) {
    x = x < -4 ? -4 : x > 8 ? 8 : x;
    return 1 / (1 + exp(-x * (1.5976 + 0.07056 * x * x)));
}
static void check_centroids(void) {
    for (float s = 0.05f; s < 4; s *= 1.7f)
        for (float r = -9; r < 12; r += 0.31f) {
            floats factor, move;
            correct(splat(r), s, &factor, &move);
            const double gain = exp(0.5 * s * s) * normal_below(r - s) / normal_below(r);
            const double wanted = gain > MAX_FACTOR ? MAX_FACTOR : gain < 1 / MAX_FACTOR ? 1 / MAX_FACTOR : gain;
            const Correction c = correct_with_slopes(splat(r), s);
            close_to("a factor", factor[0], wanted, wanted);
            close_to("a gain", c.gain[0], log(wanted), 1);
            close_to("a move", move[0], c.move[0], 1 / s);
        }
}

/* --- a whole call */

enum { HEADS = 2, QUERY_HEADS = 2, KEYS = 1536, CHUNK = 512, SINKS = 5, LOCAL = 128 };

static void *space(int64_t n, size_t size) {
    void *made = aligned_alloc(64, ((size_t)n * size + 127) / 64 * 64);
    memset(made, 0, ((size_t)n * size + 127) / 64 * 64);
    return made;
}

/* Attention of the queries of the last `n` keys, with every key read or with the search of the default; compared with exact
 * attention, and printed. */
static void run_call(int64_t dim, int64_t wide, int64_t cluster_size, int64_t type, int64_t n, int everything) {
    const int64_t chunks = (KEYS - LOCAL - SINKS) / CHUNK, per_chunk = CHUNK / cluster_size, clusters = chunks * per_chunk;
    const int64_t each = cluster_size / 16, blocks = (clusters * each + 15) / 16, columns = 16 + (clusters + 15) / 16 * 16;
    float *key = space(HEADS * KEYS * dim, 4), *value = space(HEADS * KEYS * wide, 4), *query = space(HEADS * QUERY_HEADS * n * dim, 4);
    float *middle = space(16 * dim, 4);
    int64_t levels = 0, at_key[HEADS], at_value[HEADS], at_query[HEADS * QUERY_HEADS];
    state = 7;
    while (CHUNK >> levels > 16) levels++;
    fill(middle, 16 * dim);
    for (int64_t i = 0; i < HEADS * KEYS * dim; i++) {
        const int together = i / dim / 40 % 16; /* neighbours resemble each other */
        key[i] = (float)((int)(middle[together * dim + i % dim] * 32.0f) + whole() / 2) / 64.0f;
    }
    fill(value, HEADS * KEYS * wide);
    for (int64_t i = 0; i < HEADS * QUERY_HEADS * n * dim; i++) query[i] = 2.0f * real();
    for (int64_t h = 0; h < HEADS; h++) at_key[h] = h * KEYS * dim, at_value[h] = h * KEYS * wide;
    for (int64_t h = 0; h < HEADS * QUERY_HEADS; h++) at_query[h] = h * n * dim;
    Rows keys = rows_of(key, HEADS * KEYS * dim, type, at_key, dim), values = rows_of(value, HEADS * KEYS * wide, type, at_value, wide);
    Rows queries = rows_of(query, HEADS * QUERY_HEADS * n * dim, type, at_query, dim);

    IndexCall c = {
        .key = keys, .value = values, .kv_heads = HEADS, .begin = SINKS, .chunks = chunks, .chunk_size = CHUNK, .levels = levels,
        .cluster_size = cluster_size, .dim = dim, .value_dim = wide, .fit_size = 128, .cluster_reach = 1.5,
        .positions = space(HEADS * clusters * cluster_size, 4), .centroid_key = space(HEADS * clusters * dim, 4),
        .centroid_value = space(HEADS * clusters * wide, 4), .int8 = space(HEADS * clusters * cluster_size * dim, 1),
        .scales = space(HEADS * clusters, 4), .sub_int8 = space(HEADS * clusters * each * dim, 1),
        .sub_scales = space(HEADS * clusters, 4), .spread = space(HEADS * clusters * each, 4),
        .radius = space(HEADS * clusters, 4), .key_cov = space(HEADS * chunks * dim * dim, 4),
        .key_value_cov = space(HEADS * chunks * dim * wide, 4),
    };
    check(prescore_build_index(&c) == 0, "the index", 1, 0);

    float *column_keys = space(HEADS * columns * dim, 4), *column_values = space(HEADS * columns * wide, 4);
    uint8_t *sub_int8 = space(HEADS * blocks * 16 * dim, 1);
    const int64_t padded = (clusters + 15) / 16 * 16;
    float *sub_scales = space(HEADS * blocks * 16, 4), *spread = space(HEADS * blocks * 16, 4);
    float *scales = space(HEADS * blocks * 16, 4), *radius = space(HEADS * padded, 4);
    int32_t *visible = space(HEADS * n, 4), *local_start = space(HEADS * n, 4), *local_stop = space(HEADS * n, 4);
    for (int64_t h = 0; h < HEADS; h++) {
        for (int64_t i = 0; i < SINKS + clusters; i++) {
            const int64_t at = h * columns + (i < SINKS ? i : 16 + i - SINKS);
            const float *own = i < SINKS ? key + (h * KEYS + i) * dim : c.centroid_key + (h * clusters + i - SINKS) * dim;
            const float *own_value = i < SINKS ? value + (h * KEYS + i) * wide : c.centroid_value + (h * clusters + i - SINKS) * wide;
            for (int64_t d = 0; d < dim; d++) column_keys[(at / 16 * dim + d) * 16 + at % 16] = own[d];
            memcpy(column_values + at * wide, own_value, 4 * (size_t)wide);
        }
        for (int64_t i = 0; i < clusters * each; i++) {
            const int64_t at = h * blocks * 16 + i, from = h * clusters * each + i;
            for (int64_t d = 0; d < dim; d++) sub_int8[at / 16 * 16 * dim + (d / 4 * 16 + at % 16) * 4 + d % 4] = c.sub_int8[from * dim + d];
            scales[at] = c.scales[from / each];
            sub_scales[at] = c.sub_scales[from / each];
            spread[at] = c.spread[from];
        }
        memcpy(radius + h * padded, c.radius + h * clusters, 4 * (size_t)clusters);
        for (int64_t t = 0; t < n; t++) {
            const int64_t place = KEYS - n + t, far = place < LOCAL + SINKS ? 0 : (place - LOCAL - SINKS) / CHUNK;
            visible[h * n + t] = (int32_t)(far * per_chunk);
            local_start[h * n + t] = (int32_t)(far ? SINKS + far * CHUNK : 0);
            local_stop[h * n + t] = (int32_t)(place + 1);
        }
    }
    int64_t counts[2] = {0, 0};
    float *units = space(HEADS * chunks, 4);
    for (int64_t i = 0; i < HEADS * chunks; i++) {
        for (int64_t d = 0; d < dim; d++) units[i] += c.key_cov[(i * dim + d) * dim + d];
        units[i] = sqrtf(units[i]);
    }
    RoutedCall p = {
        .query = queries, .key = keys, .value = values, .far_key = keys, .far_value = values, .visible = visible, .local_start = local_start, .local_stop = local_stop,
        .columns = column_keys, .column_values = column_values, .positions = c.positions, .int8 = c.int8, .scales = scales,
        .sub_int8 = sub_int8, .sub_scales = sub_scales, .spread = spread, .radius = radius, .key_cov = c.key_cov,
        .key_value_cov = c.key_value_cov, .kv_heads = HEADS, .n_query = QUERY_HEADS * n, .length = n, .dim = dim, .value_dim = wide,
        .cluster_size = cluster_size, .sinks = SINKS, .sink_columns = 16, .n_columns = columns, .n_clusters = clusters, .n_covs = chunks,
        .units = units, .clusters_per_span = (clusters + 15) / 16 * 16, .clusters_per_cov = per_chunk, .scale = 1.0f / sqrtf((float)dim), .search_stds = everything ? 1e9f : 3.0f, .heavy_stds = 4.2f,
        .heavy_int8_error = 0.1f, .margin = 3.0043f, .exact_margin = everything ? -1e9f : 2.7725887f, .log_inverse = everything ? 1e3f : 6.0f,
        .max_mass_gain = 4.0f, .log_sink_weight = -2.3025851f, .output = space(HEADS * QUERY_HEADS * n * wide, 4),
        .lse = space(HEADS * QUERY_HEADS * n, 4), .threshold = space(HEADS * QUERY_HEADS * n, 4), .counts = counts,
    };
    check(prescore_routed_forward(&p) == 0, "the call", 1, 0);

    double error = 0, length = 0, logits[KEYS], output[MAX_DIM];
    const int rounds = half_products(&p) != 0; /* bfloat16 weights */
    for (int64_t q = 0; q < HEADS * QUERY_HEADS * n; q += n > 3 ? 5 : 1) {
        const int64_t h = q / n / QUERY_HEADS, seen = KEYS - n + q % n + 1;
        double most = -INFINITY, mass = 0;
        for (int64_t i = 0; i < seen; i++) {
            logits[i] = 0;
            for (int64_t d = 0; d < dim; d++) logits[i] += (double)query[q * dim + d] * key[(h * KEYS + i) * dim + d] * p.scale;
            most = logits[i] > most ? logits[i] : most;
        }
        memset(output, 0, sizeof output);
        for (int64_t i = 0; i < seen; i++) {
            const double weight = exp(logits[i] - most);
            mass += weight;
            for (int64_t d = 0; d < wide; d++) output[d] += weight * value[(h * KEYS + i) * wide + d];
        }
        for (int64_t d = 0; d < wide; d++) {
            const double x = output[d] / mass, y = p.output[q * wide + d];
            error += (x - y) * (x - y);
            length += x * x;
            if (everything) close_to("a number that reads every key", y, x, rounds ? 1000 : 2);
        }
        if (everything) close_to("the lse of every key", p.lse[q], most + log(mass), rounds ? 1000 : 10);
    }
    error = sqrt(error / length);
    check(isfinite(error) && error < 0.25, "the relative error", error, 0);
    if (everything)
        check(counts[1] > 0, "far keys read", (double)counts[1], 1);
    else {
        printf("error %.9g\nread %lld\n", error, (long long)counts[1]);
        for (int64_t q = 0; q < HEADS * QUERY_HEADS * n; q += 3)
            printf("lse %.9g\nthreshold %.9g\noutput %.9g\n", p.lse[q], p.threshold[q], p.output[q * wide + q % wide]);
    }
    void *made[] = {key, value, query, middle, c.positions, c.centroid_key, c.centroid_value, c.int8, c.scales, c.sub_int8,
                    c.sub_scales, c.spread, c.radius, c.key_cov, c.key_value_cov, units, column_keys, column_values, sub_int8, sub_scales,
                    spread, scales, radius, visible, local_start, local_stop, p.output, p.lse, p.threshold};
    for (size_t i = 0; i < sizeof made / sizeof *made; i++) free(made[i]);
    free_rows(&keys);
    free_rows(&values);
    free_rows(&queries);
}

static void check_linear(void) {
    enum { N_ROWS = 15, N_INPUTS = 70, N_OUTPUTS = 37, N_PANELS = 3, N_QUARTERS = 18 };
    static uint8_t weight[N_PANELS * N_QUARTERS * 64];
    static float input[N_ROWS * N_INPUTS], scale[N_PANELS * 16], bias[N_OUTPUTS], output[N_ROWS * N_OUTPUTS];
    for (int extreme = 0; extreme < 2; extreme++) {
        for (size_t i = 0; i < sizeof weight; i++) weight[i] = extreme ? (i % 3 ? 255 : 1) : (uint8_t)(whole() + ZERO);
        for (int i = 0; i < N_ROWS * N_INPUTS; i++) input[i] = extreme ? (i % 2 ? 127 : -127) : (float)whole();
        for (int i = 0; i < N_ROWS; i++) input[i * N_INPUTS] = input[i * N_INPUTS + 64] = 127; /* so that 1 stands for 1 in both groups */
        fill(scale, N_PANELS * 16);
        fill(bias, N_OUTPUTS);
        const LinearCall call = {input, weight, scale, bias, output, N_ROWS, N_INPUTS, N_OUTPUTS, 64, 1, 1e-12f, 1.0f / 127};
        check(prescore_int8_linear(&call) == 0, "a linear layer", 1, 0);
        for (int row = 0; row < N_ROWS; row++)
            for (int j = 0; j < N_OUTPUTS; j++) {
                double sum = 0;
                for (int i = 0; i < N_INPUTS; i++)
                    sum += input[row * N_INPUTS + i] * (weight[((j / 16 * N_QUARTERS + i / 4) * 16 + j % 16) * 4 + i % 4] - ZERO);
                close_to("a linear layer", output[row * N_OUTPUTS + j], sum * scale[j] + bias[j], 1e6);
            }
    }
}

/* Lists of random keys, some named twice or outside of the keys, for `size` queries each. */
static void check_lists(int64_t dim, int64_t wide, int64_t type, int64_t size, int64_t per_list, int64_t bits) {
    enum { N_HEADS = 4, N_KV = 2, N_QUERY = 70, N_KEYS = 90, MOST = 41 };
    const int64_t heads = N_HEADS / per_list, lists = (N_QUERY + size - 1) / size;
    float *query = space(N_HEADS * N_QUERY * dim, 4), *key = space(N_KV * N_KEYS * dim, 4), *value = space(N_KV * N_KEYS * wide, 4);
    float *output = space(N_HEADS * N_QUERY * wide, 4), *lse = space(N_HEADS * N_QUERY, 4);
    int64_t *listed = space(heads * lists * MOST, 8), at_query[N_HEADS], at_key[N_KV], at_value[N_KV];
    int32_t *short_listed = space(heads * lists * MOST, 4);
    for (int64_t h = 0; h < N_HEADS; h++) at_query[h] = h * N_QUERY * dim;
    for (int64_t h = 0; h < N_KV; h++) at_key[h] = h * N_KEYS * dim, at_value[h] = h * N_KEYS * wide;
    fill(query, N_HEADS * N_QUERY * dim);
    fill(key, N_KV * N_KEYS * dim);
    fill(value, N_KV * N_KEYS * wide);
    for (int64_t i = 0; i < heads * lists * MOST; i++) { /* the last list is empty */
        listed[i] = i < (heads * lists - 1) * MOST ? whole() % 100 : -1;
        short_listed[i] = (int32_t)listed[i];
    }
    Rows queries = rows_of(query, N_HEADS * N_QUERY * dim, type, at_query, dim), keys = rows_of(key, N_KV * N_KEYS * dim, type, at_key, dim);
    Rows values = rows_of(value, N_KV * N_KEYS * wide, type, at_value, wide);
    const ListCall c = {
        .query = queries, .key = keys, .value = values, .indices = bits == 64 ? (void *)listed : (void *)short_listed, .output = output,
        .lse = lse, .list_heads = heads, .heads_per_list = per_list, .list_heads_per_kv = heads / N_KV, .n_lists = lists, .n_listed = MOST,
        .bits = bits, .n_query = N_QUERY, .n_keys = N_KEYS, .dim = dim, .value_dim = wide, .scale = 1.0f / sqrtf((float)dim),
    };
    check(prescore_attend_lists(&c) == 0, "the lists", 1, 0);
    const RoutedCall p = {.query = queries, .key = keys, .value = values, .dim = dim, .value_dim = wide};
    const double size_of_error = half_products(&p) ? 1000 : 2; /* bfloat16 weights */
    for (int64_t q = 0; q < N_HEADS * N_QUERY; q++) {
        const int64_t h = q / N_QUERY, list = h / per_list * lists + q % N_QUERY / size, kv = h * N_KV / N_HEADS;
        double logits[N_KEYS], output_of[MAX_DIM] = {0}, most = -INFINITY, mass = 0;
        for (int64_t i = 0; i < N_KEYS; i++) {
            int is_listed = 0;
            for (int64_t j = 0; j < MOST; j++) is_listed |= listed[list * MOST + j] == i;
            logits[i] = is_listed ? 0 : -INFINITY;
            for (int64_t d = 0; is_listed && d < dim; d++) logits[i] += (double)query[q * dim + d] * key[(kv * N_KEYS + i) * dim + d] * c.scale;
            most = logits[i] > most ? logits[i] : most;
        }
        for (int64_t i = 0; i < N_KEYS; i++) {
            const double weight = logits[i] == -INFINITY ? 0 : exp(logits[i] - most);
            mass += weight;
            for (int64_t d = 0; d < wide; d++) output_of[d] += weight * value[(kv * N_KEYS + i) * wide + d];
        }
        for (int64_t d = 0; d < wide; d++)
            close_to("output of a list", output[q * wide + d], mass > 0 ? output_of[d] / mass : 0, size_of_error);
        close_to("lse of a list", lse[q], mass > 0 ? most + log(mass) : -INFINITY, 10);
    }
    void *made[] = {query, key, value, output, lse, listed, short_listed};
    for (size_t i = 0; i < sizeof made / sizeof *made; i++) free(made[i]);
    free_rows(&queries);
    free_rows(&keys);
    free_rows(&values);
}

int main(void) {
    prescore_native_follow(3);
    check_int8();
    check_linear();
    check_numbers();
    check_halves();
    check_products();
    check_centroids();
    for (int64_t type = FLOAT32; type <= FLOAT16; type++)
        for (int everything = 0; everything < 2; everything++) {
            run_call(64, 64, 128, type, 70, everything);
            run_call(32, 48, 32, type, 3, everything);
            run_call(128, 16, 64, type, 1, everything);
        }
    for (int64_t type = FLOAT32; type <= FLOAT16; type++)
        for (int64_t size = 1; size <= 70; size = 5 * size + 9) /* 1, 14: of a query, of some in one tile */
            for (int64_t per_list = 1; per_list <= 2; per_list++) {
                check_lists(64, 32, type, size, per_list, 64);
                check_lists(16, 80, type, size, per_list, 32);
            }
    if (failures) fprintf(stderr, "%d checks failed\n", failures);
    return failures != 0;
}
