/* How a centroid represents the unread keys of its cluster, and how that changes with the query.
 *
 * Logits within a cluster are taken as normal with standard deviation `s`, cut off `r` deviations above their mean.
 */
#ifndef PRESCORE_CENTROIDS_H
#define PRESCORE_CENTROIDS_H

#include "vectors.h"

#define MAX_GAIN 2.0f
#define MAX_FACTOR 7.38905610f /* its exponential */
#define LEAST_NORMAL -4.0f /* where the approximation is cut off, on both sides */
#define MOST_NORMAL 8.0f

/* The log of the normal distribution function, smoothly approximated, and its slope. */
INLINE floats log_normal(floats x, floats *slope) {
    x = larger(smaller(x, splat(MOST_NORMAL)), splat(LEAST_NORMAL));
    floats y = x * (splat(1.5976f) + splat(0.07056f) * x * x), zero = splat(0.0f), one = splat(1.0f);
    floats e = vexp(-larger(y, -y));
    *slope = choose(y > zero, e, one) / (one + e) * (splat(1.5976f) + splat(0.21168f) * x * x);
    return smaller(y, zero) - vlog(one + e);
}

/* How the slope of `log_normal` changes, from itself; 0 where it is cut off. */
INLINE floats log_normal_bend(floats x, floats slope) {
    const floats first = splat(1.5976f) + splat(0.21168f) * x * x; /* of y; the slope is sigmoid(-y) times it */
    const floats below = slope / first;
    const floats bend = below * (splat(0.42336f) * x - (splat(1.0f) - below) * first * first);
    return choose((x >= splat(LEAST_NORMAL)) & (x <= splat(MOST_NORMAL)), bend, splat(0.0f));
}

/* What a centroid's logit gains and how far its value moves along `C' q`; each by `r`, and by `s` at the same `r`. */
typedef struct {
    floats gain, gain_by_r, gain_by_s, move, move_by_r, move_by_s;
} Correction;

INLINE floats within(floats x, float most) { return larger(smaller(x, splat(most)), splat(-most)); }

/* By what factor a centroid weighs more, `exp(gain)`, and how far its value moves; no logarithm is needed. */
INLINE void correct(floats r, float s, floats *factor, floats *move) {
    const floats low = splat(LEAST_NORMAL), high = splat(MOST_NORMAL), one = splat(1.0f);
    const floats x = larger(smaller(r - splat(s), high), low), z = larger(smaller(r, high), low);
    const floats by_x = vexp(-x * (splat(1.5976f) + splat(0.07056f) * x * x)), by_z = vexp(-z * (splat(1.5976f) + splat(0.07056f) * z * z));
    const floats below = one / (one + by_x); /* the normal distribution function at x */
    const float square = 0.5f * s * s;
    *factor = splat(expf(square < 40.0f ? square : 40.0f)) * below * (one + by_z);
    *factor = larger(smaller(*factor, splat(MAX_FACTOR)), splat(1.0f / MAX_FACTOR));
    *move = within(one - by_x * below * (splat(1.5976f) + splat(0.21168f) * x * x) * splat(1.0f / s), 1.0f);
}

INLINE Correction correct_with_slopes(floats r, float s) {
    const floats zero = splat(0.0f), part = splat(1.0f / s), x = r - splat(s);
    floats slope, slope_below;
    const floats beyond = log_normal(x, &slope), below = log_normal(r, &slope_below);
    const floats gain = splat(0.5f * s * s) + beyond - below, move = splat(1.0f) - slope * part;
    const floats bend = log_normal_bend(x, slope) * part;
    const floats low = splat(LEAST_NORMAL), high = splat(MOST_NORMAL);
    const floats by_x = choose((x >= low) & (x <= high), slope, zero);
    const floats by_r = by_x - choose((r >= low) & (r <= high), slope_below, zero);
    const ints gain_free = (gain >= splat(-MAX_GAIN)) & (gain <= splat(MAX_GAIN));
    const ints move_free = (move >= splat(-1.0f)) & (move <= splat(1.0f));
    return (Correction){
        .gain = within(gain, MAX_GAIN),
        .gain_by_r = choose(gain_free, by_r, zero),
        .gain_by_s = choose(gain_free, splat(s) - by_x, zero),
        .move = within(move, 1.0f),
        .move_by_r = choose(move_free, -bend, zero),
        .move_by_s = choose(move_free, bend + slope * part * part, zero),
    };
}

#endif
