/* What a linear layer with int8 weights does beside its product: bfloat16 rows are rounded to int8, and products scaled.
 *
 * linear.py makes the only calls and checks what they touch. The same numbers as its plain torch, in one pass.
 */
#include <stdint.h>
#include <string.h>

#include "threads.h"

/* Must equal `_LinearCall` in linear.py. */
typedef struct {
    const uint16_t *input;  /* [rows, inputs], bfloat16 */
    int8_t *rounded;        /* [rows, inputs] */
    float *by_row;          /* [rows]: what 1 stands for in a row */
    const int32_t *product; /* [rows, outputs] */
    const float *by_output; /* [outputs]: what 1 stands for in a row of the weight */
    uint16_t *output;       /* [rows, outputs], bfloat16 */
    int64_t rows, inputs, outputs;
    float smallest, inverse; /* a row whose largest magnitude is less counts as having this one; 1 / 127 */
} LinearCall;

static inline float number(uint32_t raw) {
    float x;
    memcpy(&x, &raw, sizeof x);
    return x;
}
static inline uint32_t raw_bits(float x) {
    uint32_t raw;
    memcpy(&raw, &x, sizeof raw);
    return raw;
}

PRESCORE_EXPORT int prescore_round_rows(const LinearCall *p) {
#pragma omp parallel for num_threads(prescore_threads()) if (p->rows > 1)
    for (int64_t i = 0; i < p->rows; i++) {
        const int64_t inputs = p->inputs;
        const uint16_t *row = p->input + i * inputs;
        int8_t *restrict to = p->rounded + i * inputs; /* bytes may alias anything else */
        uint16_t most = 0; /* magnitudes are ordered as their bits are, with NaN above all */
        for (int64_t j = 0; j < inputs; j++) {
            const uint16_t magnitude = row[j] & 0x7fff;
            most = magnitude > most ? magnitude : most;
        }
        const float largest = number((uint32_t)most << 16);
        const float unit = (largest < p->smallest ? p->smallest : largest) * p->inverse;
        p->by_row[i] = unit;
        /* adding 1.5 * 2^23 rounds to an integer and leaves it in the last bits */
        for (int64_t j = 0; j < inputs; j++) to[j] = (int8_t)(uint8_t)raw_bits(number((uint32_t)row[j] << 16) / unit + 12582912.0f);
    }
    return 0;
}

PRESCORE_EXPORT int prescore_scale_products(const LinearCall *p) {
#pragma omp parallel for num_threads(prescore_threads()) if (p->rows > 1)
    for (int64_t i = 0; i < p->rows; i++) {
        const int32_t *row = p->product + i * p->outputs;
        uint16_t *to = p->output + i * p->outputs;
        const float unit = p->by_row[i];
        for (int64_t j = 0; j < p->outputs; j++) {
            const float x = (float)row[j] * unit * p->by_output[j];
            const uint32_t raw = raw_bits(x), nearest = (raw + 0x7fff + (raw >> 16 & 1)) >> 16;
            to[j] = (uint16_t)(x == x ? nearest : 0x7fc0);
        }
    }
    return 0;
}
