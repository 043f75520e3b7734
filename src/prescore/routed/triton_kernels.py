"""The kernels of the Triton backend; `routed/reference.py` says what they compute, with the same names.

A program has a tile of `ROWS` queries of one KV head: all query heads of the group, position by position. It reads
local keys and sinks, sums the mass of all centroids for the threshold, and searches cluster by cluster:

- centroids of clusters and subclusters, sixteen clusters at a time, give one bit per query and subcluster;
- clusters that no query of the tile searches are skipped; of the others, products of int8 keys give the hits;
- the keys that some query of the tile reads are gathered into a dense block, `pending`, across clusters. A full
  block is read at once: exact logits where one is heavy, values, softmax. No hit is ever dropped.

The running softmax of a row is its peak, sum, `moved` (the sum of weights times what centroids move along `C'q`)
and output. Decode steps split the clusters over programs: `decode_local`, `decode_far`, `decode_merge`.
"""

import triton
import triton.language as tl

CLUSTERS = tl.constexpr(16)
"""Clusters whose centroids are compared at once."""
SUBCLUSTER = tl.constexpr(16)
PART = tl.constexpr(16)
"""Numbers of a query that are multiplied in float32 at once."""
NEGATIVE = tl.constexpr(float("-inf"))


@triton.jit
def _dot(left, right, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr):
    """A product with sums in float32. The interpreter multiplies bfloat16 wrongly."""
    if INTERPRETED:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, input_precision=PRECISION)


@triton.jit
def _fold(peak, total, moved, output, logits, value, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr):
    """The running softmax with more keys: `logits [ROWS, K]`, `value [K, Dv]`."""
    highest = tl.maximum(peak, tl.max(logits, 1))
    shift = tl.where(highest == NEGATIVE, 0.0, highest)
    weights = tl.exp(logits - shift[:, None])
    decay = tl.exp(peak - shift)
    output = output * decay[:, None] + _dot(weights.to(value.dtype), value, PRECISION, INTERPRETED)
    return highest, total * decay + tl.sum(weights, 1), moved * decay, output


@triton.jit
def _project(
    output, query, rows, row_mask, factor, matrix, which, first, last, n_dim,
    D: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`output [ROWS, WIDTH]` plus `factor` times the queries times the covariance `which [ROWS]` of each row.

    The loop runs to `n_dim`, which is `D` at run time: unrolled, it would take most registers.
    """
    column = tl.arange(0, WIDTH)
    for number in tl.range(first, last + 1, disable_licm=True):
        own = tl.where(which == number, factor, 0.0)
        base = matrix + tl.cast(number, tl.int64) * D * WIDTH
        for start in tl.range(0, n_dim, PART, disable_licm=True):
            part = start + tl.arange(0, PART)
            queries = tl.load(query + rows[:, None] + part[None, :], mask=row_mask[:, None], other=0.0)
            some = tl.load(base + part[:, None] * WIDTH + column[None, :])
            output += tl.dot(queries.to(tl.float32) * own[:, None], some, input_precision=PRECISION)
    return output


@triton.jit
def _std(
    queries, query, rows, row_mask, key_cov, which, first, last, scale, n_dim,
    ROWS: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr, MIN_STD: tl.constexpr, MAX_STD: tl.constexpr,
):  # fmt: skip
    """`[ROWS]` standard deviation of the logits within clusters, as `reference.far_logits`."""
    factor = tl.zeros([ROWS], tl.float32) + scale
    along = tl.zeros([ROWS, D], tl.float32)
    along = _project(along, query, rows, row_mask, factor, key_cov, which, first, last, n_dim, D, D, PRECISION)
    variance = tl.sum(along * (queries.to(tl.float32) * scale), 1)
    variance = tl.where(variance == variance, variance, MAX_STD * MAX_STD)
    return tl.sqrt(tl.minimum(tl.maximum(variance, MIN_STD * MIN_STD), MAX_STD * MAX_STD))


@triton.jit
def _log_normal_cdf(x):
    x = tl.minimum(tl.maximum(x, -4.0), 8.0)
    y = x * (1.5976 + 0.07056 * x * x)
    small = tl.exp(-tl.abs(y))
    log_cdf = tl.minimum(y, 0.0) - tl.log(1.0 + small)
    return log_cdf, tl.where(y >= 0.0, small, 1.0) / (1.0 + small) * (1.5976 + 0.21168 * x * x)


@triton.jit
def _centroid_corrections(distance, std, MAX_GAIN: tl.constexpr, MAX_DISTANCE: tl.constexpr):
    """As `reference.centroid_corrections`."""
    x = tl.minimum(tl.maximum(distance, -MAX_DISTANCE), MAX_DISTANCE) / std
    shifted, slope = _log_normal_cdf(x - std)
    unshifted, _ = _log_normal_cdf(x)
    gain = 0.5 * std * std + shifted - unshifted
    gain = tl.minimum(tl.maximum(gain, -MAX_GAIN), MAX_GAIN)
    return gain, tl.minimum(tl.maximum(1.0 - slope / std, -1.0), 1.0)


@triton.jit
def _local(
    queries, key, value, start, stop, key_step, value_step, scale,
    ROWS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The running softmax over the keys from `start` to `stop` of each row."""
    peak, total = tl.full([ROWS], NEGATIVE, tl.float32), tl.zeros([ROWS], tl.float32)
    moved = tl.zeros([ROWS], tl.float32)
    output = tl.zeros([ROWS, DV], tl.float32)
    dim, value_dim, last = tl.arange(0, D), tl.arange(0, DV), tl.max(stop)
    for first in tl.range(tl.min(start), last, KEYS, disable_licm=True):
        place = first + tl.arange(0, KEYS)
        far = place.to(tl.int64)
        keys = tl.load(key + far[None, :] * key_step + dim[:, None], mask=(place < last)[None, :], other=0.0)
        inside = (place < last)[:, None]
        values = tl.load(value + far[:, None] * value_step + value_dim[None, :], mask=inside, other=0.0)
        logits = _dot(queries, keys, PRECISION, INTERPRETED) * scale
        seen = (place[None, :] >= start[:, None]) & (place[None, :] < stop[:, None])
        logits = tl.where(seen, logits, NEGATIVE)
        peak, total, moved, output = _fold(peak, total, moved, output, logits, values, PRECISION, INTERPRETED)
    return peak, total, moved, output


@triton.jit
def _sinks(
    peak, total, moved, output, queries, key, value, n_sinks, is_routed, key_step, value_step, scale,
    D: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The running softmax with the sinks, which routed rows read; the log-sum-exp of local keys, and of sinks."""
    local_lse = peak + tl.log(total)
    dim, value_dim = tl.arange(0, D), tl.arange(0, DV)
    sink_peak, sink_total = tl.full(peak.shape, NEGATIVE, tl.float32), tl.zeros_like(total)
    for first in range(0, n_sinks, 16):
        place = first + tl.arange(0, 16)
        inside = place < n_sinks
        keys = tl.load(key + place[None, :] * key_step + dim[:, None], mask=inside[None, :], other=0.0)
        values = tl.load(value + place[:, None] * value_step + value_dim[None, :], mask=inside[:, None], other=0.0)
        logits = _dot(queries, keys, PRECISION, INTERPRETED) * scale
        logits = tl.where(inside[None, :] & is_routed[:, None], logits, NEGATIVE)
        sink_peak, sink_total = _add_mass(sink_peak, sink_total, logits)
        peak, total, moved, output = _fold(peak, total, moved, output, logits, values, PRECISION, INTERPRETED)
    return peak, total, moved, output, local_lse, sink_peak + tl.log(sink_total)


@triton.jit
def _add_mass(peak, total, logits):
    highest = tl.maximum(peak, tl.max(logits, 1))
    shift = tl.where(highest == NEGATIVE, 0.0, highest)
    return highest, total * tl.exp(peak - shift) + tl.sum(tl.exp(logits - shift[:, None]), 1)


@triton.jit
def _log_sum(left, right):
    """`log(exp(left) + exp(right))`."""
    highest = tl.maximum(left, right)
    shift = tl.where(highest == NEGATIVE, 0.0, highest)
    return highest + tl.log(tl.exp(left - shift) + tl.exp(right - shift))


@triton.jit
def _centroid_logits(
    query, rows, row_mask, centroid_key, column, last, scale, n_dim,
    ROWS: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`[ROWS, CLUSTERS]`. Queries are loaded in parts each time: float32 ones would take most registers."""
    logits = tl.zeros([ROWS, CLUSTERS], tl.float32)
    for start in tl.range(0, n_dim, PART, disable_licm=True):
        part = start + tl.arange(0, PART)
        queries = tl.load(query + rows[:, None] + part[None, :], mask=row_mask[:, None], other=0.0).to(tl.float32)
        inside = (column < last)[None, :]
        centroids = tl.load(centroid_key + column[None, :] * D + part[:, None], mask=inside, other=0.0)
        logits += tl.dot(queries, centroids, input_precision=PRECISION)
    return logits * scale


@triton.jit
def _centroid_lse(
    query, rows, row_mask, centroid_key, n_clusters, first, last, scale, n_dim,
    ROWS: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`[ROWS]` log-sum-exp of the logits of the centroids from `first` to `last` that each row sees."""
    peak, total = tl.full([ROWS], NEGATIVE, tl.float32), tl.zeros([ROWS], tl.float32)
    for block in tl.range(first, last, CLUSTERS, disable_licm=True):
        column = block + tl.arange(0, CLUSTERS)
        logits = _centroid_logits(
            query, rows, row_mask, centroid_key, column, last, scale, n_dim, ROWS, D, PRECISION
        )
        seen = (column[None, :] < n_clusters[:, None]) & (column < last)[None, :]
        peak, total = _add_mass(peak, total, tl.where(seen, logits, NEGATIVE))
    return peak + tl.log(total)


@triton.jit
def _read(
    peak, total, moved, output, query, rows, row_mask, pending, position, exact_from,
    key, value, key_step, value_step, scale,
    D: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The running softmax with the pending keys: int8 logits `[ROWS, KEYS]`, -inf where a row reads none."""
    heavy = pending >= exact_from[:, None]
    if tl.max(tl.max(heavy.to(tl.int32), 1), 0) > 0:
        queries = tl.load(query + rows[:, None] + tl.arange(0, D)[None, :], mask=row_mask[:, None], other=0.0)
        keys = tl.load(key + position[None, :] * key_step + tl.arange(0, D)[:, None])
        pending = tl.where(heavy, _dot(queries, keys, PRECISION, INTERPRETED) * scale, pending)
    values = tl.load(value + position[:, None] * value_step + tl.arange(0, DV)[None, :])
    return _fold(peak, total, moved, output, pending, values, PRECISION, INTERPRETED)


@triton.jit
def _far(
    peak, total, moved, output, query, rows, row_mask, n_clusters, threshold, std, unit,
    key, value, key_step, value_step, centroid_key, centroid_value, positions, int8, scales, sub_int8, sub_scales,
    spread, radius, first, last, scale, n_dim, margin, exact_margin,
    ROWS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, SIZE: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
    SEARCH_STDS: tl.constexpr, HEAVY_STDS: tl.constexpr, HEAVY_INT8_ERROR: tl.constexpr, QUERY_MAX: tl.constexpr,
    MAX_GAIN: tl.constexpr, MAX_DISTANCE: tl.constexpr,
):  # fmt: skip
    """The running softmax with the clusters from `first` to `last`; keys compared and read by all rows."""
    S: tl.constexpr = SIZE // SUBCLUSTER
    PARTS: tl.constexpr = SIZE // KEYS
    PART_BITS: tl.constexpr = KEYS // SUBCLUSTER
    PART_MASK: tl.constexpr = tl.constexpr(2) ** PART_BITS - 1
    dim, value_dim, slot = tl.arange(0, D), tl.arange(0, DV), tl.arange(0, KEYS)
    scaled = tl.load(query + rows[:, None] + dim[None, :], mask=row_mask[:, None], other=0.0)
    scaled = scaled.to(tl.float32) * scale
    # `reference.quantize`; adding 1.5 * 2^23 rounds to the nearest even whole number
    query_unit = tl.max(tl.abs(scaled), 1) / QUERY_MAX
    numbers = scaled / tl.maximum(query_unit, 1.1754943508222875e-38)[:, None]
    numbers = (numbers + 12582912.0) - 12582912.0
    numbers = tl.minimum(tl.maximum(numbers, -QUERY_MAX), QUERY_MAX).to(tl.int8)
    # `reference.search_bounds`
    reach = tl.maximum(HEAVY_STDS - margin / std, SEARCH_STDS) * std / unit
    lowered = threshold - tl.maximum(HEAVY_INT8_ERROR * std - margin, 0.0)
    searching = threshold < float("inf")
    exact_from = threshold + exact_margin
    pending = tl.full([ROWS, KEYS], NEGATIVE, tl.float32)
    position = tl.zeros([KEYS], tl.int64)
    n_pending, n_compared, n_read = 0, 0, 0
    for block in tl.range(first, last, CLUSTERS, disable_licm=True):
        cluster = block + tl.arange(0, CLUSTERS)
        inside = cluster < last
        seen = (cluster[None, :] < n_clusters[:, None]) & inside[None, :]
        logits = _centroid_logits(
            query, rows, row_mask, centroid_key, cluster, last, scale, n_dim, ROWS, D, PRECISION
        )
        distance = lowered[:, None] - logits
        wide = tl.load(radius + cluster, mask=inside, other=0.0)
        near = (reach[:, None] * wide[None, :] >= distance) & seen & searching[:, None]
        counts = tl.zeros([ROWS, CLUSTERS], tl.int32)
        n_near = tl.sum(tl.sum(near.to(tl.int32), 1), 0)
        if n_near > 0:
            sub, first_sub = tl.arange(0, CLUSTERS * S), tl.cast(block, tl.int64) * S
            sub_inside = sub < (last - block) * S
            subs = sub_int8 + first_sub * D + (sub[None, :] * D + dim[:, None])
            sub_numbers = tl.load(subs, mask=sub_inside[None, :], other=0)
            sub_worth = tl.load(sub_scales + first_sub + sub, mask=sub_inside, other=0.0)
            widths = tl.load(spread + first_sub + sub, mask=sub_inside, other=0.0)
            sub_offsets = tl.dot(numbers, sub_numbers).to(tl.float32) * sub_worth[None, :] * query_unit[:, None]
            highest = tl.reshape(sub_offsets + reach[:, None] * widths[None, :], [ROWS, CLUSTERS, S])
            searched = ((highest >= distance[:, :, None]) & near[:, :, None]).to(tl.int32)
            bits = tl.sum(searched << tl.arange(0, S)[None, None, :], 2)
            n_compared += n_near * S + tl.sum(tl.sum(tl.sum(searched, 2), 1), 0) * SUBCLUSTER
            for step in tl.range(0, CLUSTERS * PARTS, disable_licm=True):
                is_own = (tl.arange(0, CLUSTERS) == step // PARTS)[None, :]
                own_bits = tl.sum(tl.where(is_own, bits, 0), 1)
                own_bits = (own_bits >> (step % PARTS * PART_BITS)) & PART_MASK
                if tl.max(own_bits, 0) > 0:
                    # `reference.find_keys`
                    begin = tl.cast(block, tl.int64) * SIZE + step * KEYS
                    keys = tl.load(int8 + begin * D + (slot[None, :] * D + dim[:, None]))
                    worth = tl.load(scales + begin + slot)
                    logit = tl.sum(tl.where(is_own, logits, 0.0), 1)
                    offsets = tl.dot(numbers, keys).to(tl.float32) * worth[None, :] * query_unit[:, None]
                    is_open = ((own_bits[:, None] >> (slot // SUBCLUSTER)[None, :]) & 1) > 0
                    hit = is_open & (offsets >= (lowered - logit)[:, None])
                    own_counts = tl.sum(hit.to(tl.int32), 1)
                    counts += tl.where(is_own, own_counts[:, None], 0)
                    some = tl.max(hit.to(tl.int32), 0)
                    n_new = tl.sum(some, 0)
                    if n_new > 0:
                        n_read += tl.sum(own_counts, 0)
                        # column `source[s]` goes to slot s, counted around the end of the block
                        goes_to = (n_pending + tl.cumsum(some, 0) - some) % KEYS
                        moves = (goes_to[:, None] == slot[None, :]) & (some > 0)[:, None]
                        source = tl.sum(tl.where(moves, slot[:, None], 0), 0)
                        is_filled = tl.max(moves.to(tl.int32), 0) > 0
                        estimates = tl.where(hit, offsets + logit[:, None], NEGATIVE)
                        new = tl.gather(estimates, tl.broadcast_to(source[None, :], [ROWS, KEYS]), 1)
                        new = tl.where(is_filled[None, :], new, NEGATIVE)
                        new_position = tl.load(positions + begin + source, mask=is_filled, other=0)
                        is_old = slot < n_pending
                        pending = tl.where(is_old[None, :], pending, new)
                        position = tl.where(is_old, position, new_position)
                        n_pending += n_new
                        if n_pending >= KEYS:
                            peak, total, moved, output = _read(
                                peak, total, moved, output, query, rows, row_mask, pending, position, exact_from,
                                key, value, key_step, value_step, scale, D, DV, PRECISION, INTERPRETED,
                            )  # fmt: skip
                            n_pending -= KEYS
                            is_left = slot < n_pending
                            pending = tl.where(is_left[None, :], new, NEGATIVE)
                            position = tl.where(is_left, new_position, 0)
        # `reference.far_terms`, `reference.far_sums`
        gain, move = _centroid_corrections(threshold[:, None] - logits, std[:, None], MAX_GAIN, MAX_DISTANCE)
        unread = SIZE - counts
        columns = logits + gain + tl.log(tl.maximum(unread, 1).to(tl.float32))
        columns = tl.where(seen & (unread > 0), columns, NEGATIVE)
        values = tl.load(
            centroid_value + cluster[:, None] * DV + value_dim[None, :], mask=inside[:, None], other=0.0
        )
        peak, total, moved, output = _fold(peak, total, moved, output, columns, values, PRECISION, INTERPRETED)
        shift = tl.where(peak == NEGATIVE, 0.0, peak)
        moved += tl.sum(tl.exp(columns - shift[:, None]) * move, 1)
    if n_pending > 0:
        peak, total, moved, output = _read(
            peak, total, moved, output, query, rows, row_mask, pending, position, exact_from,
            key, value, key_step, value_step, scale, D, DV, PRECISION, INTERPRETED,
        )  # fmt: skip
    return peak, total, moved, output, n_compared, n_read


@triton.jit
def prefill(
    query, key, value, sink_key, sink_value, visible, local_start, local_stop,
    centroid_key, centroid_value, key_cov, key_value_cov, units, positions, int8, scales, sub_int8, sub_scales,
    spread, radius, result, lse, thresholds, counts,
    query_head, query_member, query_step, key_head, key_step, value_head, value_step,
    n_query, n_tables, n_covs, clusters_per_cov, n_sinks, n_dim, scale, log_inverse, margin, exact_margin,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, SIZE: tl.constexpr,
    LOCAL: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
    SEARCH_STDS: tl.constexpr, HEAVY_STDS: tl.constexpr, HEAVY_INT8_ERROR: tl.constexpr, QUERY_MAX: tl.constexpr,
    MAX_GAIN: tl.constexpr, MAX_DISTANCE: tl.constexpr, MAX_MASS_GAIN: tl.constexpr, LOG_SINK_WEIGHT: tl.constexpr,
    LOG_SIZE: tl.constexpr, MIN_STD: tl.constexpr, MAX_STD: tl.constexpr,
):  # fmt: skip
    """Queries `[T, GROUP, n_query, D]`: one program per tile and KV head, the longest tiles first."""
    head = tl.program_id(1).to(tl.int64)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    row = tile * ROWS + tl.arange(0, ROWS)
    mask = row < n_query * GROUP
    at, member = row // GROUP, row % GROUP
    rows = at.to(tl.int64) * query_step + member * query_member
    n_clusters = tl.load(visible + head * n_query + at, mask=mask, other=0)
    start = tl.load(local_start + head * n_query + at, mask=mask, other=2**30)
    stop = tl.load(local_stop + head * n_query + at, mask=mask, other=0)
    query, key, value = query + head * query_head, key + head * key_head, value + head * value_head
    queries = tl.load(query + rows[:, None] + tl.arange(0, D)[None, :], mask=mask[:, None], other=0.0)
    peak, total, moved, output = _local(
        queries, key, value, start, stop, key_step, value_step, scale, ROWS, D, DV, LOCAL, PRECISION, INTERPRETED
    )
    threshold = tl.full([ROWS], float("inf"), tl.float32)
    n_compared, n_read, most = 0, 0, tl.max(n_clusters, 0)
    if most > 0:
        is_routed = n_clusters > 0
        peak, total, moved, output, local_lse, sink_lse = _sinks(
            peak, total, moved, output, queries, sink_key + head * key_head, sink_value + head * value_head,
            n_sinks, is_routed, key_step, value_step, scale, D, DV, PRECISION, INTERPRETED,
        )  # fmt: skip
        which = tl.where(is_routed, (n_clusters - 1) // clusters_per_cov, -1)
        first_cov, last_cov = tl.min(tl.where(is_routed, which, 2**30), 0), tl.max(which, 0)
        std = _std(
            queries, query, rows, mask, key_cov + head * n_covs * D * D, which, first_cov, last_cov, scale, n_dim,
            ROWS, D, PRECISION, MIN_STD, MAX_STD,
        )  # fmt: skip
        unit = tl.load(units + head * n_covs + which, mask=is_routed, other=1.0)
        centroids = centroid_key + head * n_tables * D
        mass = _centroid_lse(query, rows, mask, centroids, n_clusters, 0, most, scale, n_dim, ROWS, D, PRECISION)
        mass += LOG_SIZE + tl.minimum(0.5 * std * std, MAX_MASS_GAIN)
        mass = _log_sum(_log_sum(local_lse, sink_lse + LOG_SINK_WEIGHT), mass)
        threshold = tl.where(is_routed, mass - log_inverse, float("inf"))
        keys_of = head * n_tables * SIZE
        subs_of = head * n_tables * (SIZE // SUBCLUSTER)
        peak, total, moved, output, n_compared, n_read = _far(
            peak, total, moved, output, query, rows, mask, n_clusters, threshold, std, unit,
            key, value, key_step, value_step, centroids, centroid_value + head * n_tables * DV,
            positions + keys_of, int8 + keys_of * D, scales + keys_of, sub_int8 + subs_of * D,
            sub_scales + subs_of, spread + subs_of, radius + head * n_tables, 0, most,
            scale, n_dim, margin, exact_margin,
            ROWS, D, DV, SIZE, KEYS, PRECISION, INTERPRETED,
            SEARCH_STDS, HEAVY_STDS, HEAVY_INT8_ERROR, QUERY_MAX, MAX_GAIN, MAX_DISTANCE,
        )  # fmt: skip
        output = _project(
            output, query, rows, mask, moved * scale, key_value_cov + head * n_covs * D * DV, which,
            first_cov, last_cov, n_dim, D, DV, PRECISION,
        )  # fmt: skip
    place = (head * GROUP + member) * n_query + at
    output = output / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(result + place[:, None] * DV + tl.arange(0, DV)[None, :], output, mask=mask[:, None])
    tl.store(lse + place, peak + tl.log(total), mask=mask)
    tl.store(thresholds + place, threshold, mask=mask)
    own = counts + (head * tl.num_programs(0) + tile) * 2
    tl.store(own, n_compared)
    tl.store(own + 1, n_read)


@triton.jit
def decode_local(
    query, key, value, sink_key, sink_value, visible, local_start, local_stop,
    centroid_key, key_cov, key_value_cov, masses, stds, directions, peaks, totals, outputs,
    query_head, query_member, key_head, key_step, value_head, value_step,
    n_tables, n_covs, clusters_per_cov, n_sinks, clusters_per_split, n_dim, scale,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, LOCAL: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
    LOG_SINK_WEIGHT: tl.constexpr, MIN_STD: tl.constexpr, MAX_STD: tl.constexpr,
):  # fmt: skip
    """One query `[T, GROUP, 1, D]`: the last program reads local keys and sinks, others centroids."""
    head, split = tl.program_id(1).to(tl.int64), tl.program_id(0)
    splits = tl.num_programs(0)
    row = tl.arange(0, ROWS)
    mask = row < GROUP
    query, rows = query + head * query_head, row.to(tl.int64) * query_member
    n_visible = tl.load(visible + head)
    n_clusters = tl.where(mask, n_visible, 0)
    place = (head * splits + split) * ROWS + row
    if split < splits - 1:
        first = split * clusters_per_split
        last = tl.minimum(first + clusters_per_split, n_visible)
        centroids = centroid_key + head * n_tables * D
        mass = _centroid_lse(
            query, rows, mask, centroids, n_clusters, first, last, scale, n_dim, ROWS, D, PRECISION
        )
        tl.store(masses + place, mass)
    else:
        key, value = key + head * key_head, value + head * value_head
        queries = tl.load(query + rows[:, None] + tl.arange(0, D)[None, :], mask=mask[:, None], other=0.0)
        start = tl.where(mask, tl.load(local_start + head), 2**30)
        stop = tl.where(mask, tl.load(local_stop + head), 0)
        peak, total, moved, output = _local(
            queries, key, value, start, stop, key_step, value_step, scale,
            ROWS, D, DV, LOCAL, PRECISION, INTERPRETED,
        )  # fmt: skip
        peak, total, moved, output, local_lse, sink_lse = _sinks(
            peak, total, moved, output, queries, sink_key + head * key_head, sink_value + head * value_head,
            n_sinks, mask, key_step, value_step, scale, D, DV, PRECISION, INTERPRETED,
        )  # fmt: skip
        number = (n_visible - 1) // clusters_per_cov
        which = tl.zeros([ROWS], tl.int32) + number
        cov = key_cov + head * n_covs * D * D
        std = _std(
            queries, query, rows, mask, cov, which, number, number, scale, n_dim,
            ROWS, D, PRECISION, MIN_STD, MAX_STD,
        )  # fmt: skip
        factor = tl.zeros([ROWS], tl.float32) + scale
        along = tl.zeros([ROWS, DV], tl.float32)
        cov = key_value_cov + head * n_covs * D * DV
        along = _project(along, query, rows, mask, factor, cov, which, number, number, n_dim, D, DV, PRECISION)
        value_dim = tl.arange(0, DV)
        tl.store(masses + place, _log_sum(local_lse, sink_lse + LOG_SINK_WEIGHT))
        tl.store(stds + head * ROWS + row, std)
        tl.store(directions + (head * ROWS + row)[:, None] * DV + value_dim[None, :], along)
        tl.store(peaks + place, peak)
        tl.store(totals + place, total)
        tl.store(outputs + place[:, None] * DV + value_dim[None, :], output)


@triton.jit
def decode_far(
    query, key, value, visible, centroid_key, centroid_value, units, positions, int8, scales, sub_int8, sub_scales,
    spread, radius, masses, stds, directions, peaks, totals, outputs, thresholds, counts,
    query_head, query_member, key_head, key_step, value_head, value_step,
    n_tables, n_covs, clusters_per_cov, clusters_per_split, n_dim, scale, log_inverse, margin, exact_margin,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, SIZE: tl.constexpr,
    KEYS: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
    SEARCH_STDS: tl.constexpr, HEAVY_STDS: tl.constexpr, HEAVY_INT8_ERROR: tl.constexpr, QUERY_MAX: tl.constexpr,
    MAX_GAIN: tl.constexpr, MAX_DISTANCE: tl.constexpr, MAX_MASS_GAIN: tl.constexpr, LOG_SIZE: tl.constexpr,
):  # fmt: skip
    """The threshold from all masses, and the clusters of one split."""
    head, split = tl.program_id(1).to(tl.int64), tl.program_id(0)
    splits = tl.num_programs(0) + 1
    row = tl.arange(0, ROWS)
    mask = row < GROUP
    query, rows = query + head * query_head, row.to(tl.int64) * query_member
    n_visible = tl.load(visible + head)
    n_clusters = tl.where(mask, n_visible, 0)
    std = tl.load(stds + head * ROWS + row)
    mass = tl.full([ROWS], NEGATIVE, tl.float32)
    for other in range(0, splits - 1):
        mass = _log_sum(mass, tl.load(masses + (head * splits + other) * ROWS + row))
    mass += LOG_SIZE + tl.minimum(0.5 * std * std, MAX_MASS_GAIN)
    mass = _log_sum(mass, tl.load(masses + (head * splits + splits - 1) * ROWS + row))
    threshold = mass - log_inverse
    unit = tl.zeros([ROWS], tl.float32) + tl.load(units + head * n_covs + (n_visible - 1) // clusters_per_cov)
    first = split * clusters_per_split
    last = tl.minimum(first + clusters_per_split, n_visible)
    keys_of = head * n_tables * SIZE
    subs_of = head * n_tables * (SIZE // SUBCLUSTER)
    zeros = tl.zeros([ROWS], tl.float32)
    peak, total, moved, output, n_compared, n_read = _far(
        tl.full([ROWS], NEGATIVE, tl.float32), zeros, zeros, tl.zeros([ROWS, DV], tl.float32),
        query, rows, mask, n_clusters, threshold, std, unit, key + head * key_head, value + head * value_head,
        key_step, value_step, centroid_key + head * n_tables * D, centroid_value + head * n_tables * DV,
        positions + keys_of, int8 + keys_of * D, scales + keys_of, sub_int8 + subs_of * D, sub_scales + subs_of,
        spread + subs_of, radius + head * n_tables, first, last, scale, n_dim, margin, exact_margin,
        ROWS, D, DV, SIZE, KEYS, PRECISION, INTERPRETED,
        SEARCH_STDS, HEAVY_STDS, HEAVY_INT8_ERROR, QUERY_MAX, MAX_GAIN, MAX_DISTANCE,
    )  # fmt: skip
    place, value_dim = (head * splits + split) * ROWS + row, tl.arange(0, DV)
    output += moved[:, None] * tl.load(directions + (head * ROWS + row)[:, None] * DV + value_dim[None, :])
    tl.store(peaks + place, peak)
    tl.store(totals + place, total)
    tl.store(outputs + place[:, None] * DV + value_dim[None, :], output)
    if split == 0:
        tl.store(thresholds + head * GROUP + row, threshold, mask=mask)
    own = counts + (head * (splits - 1) + split) * 2
    tl.store(own, n_compared)
    tl.store(own + 1, n_read)


@triton.jit
def decode_merge(
    peaks, totals, outputs, result, lse, splits, GROUP: tl.constexpr, ROWS: tl.constexpr, DV: tl.constexpr
):
    """The softmax over all splits."""
    head, row, value_dim = tl.program_id(0).to(tl.int64), tl.arange(0, ROWS), tl.arange(0, DV)
    peak, total = tl.full([ROWS], NEGATIVE, tl.float32), tl.zeros([ROWS], tl.float32)
    output = tl.zeros([ROWS, DV], tl.float32)
    for split in range(0, splits):
        place = (head * splits + split) * ROWS + row
        own_peak = tl.load(peaks + place)
        highest = tl.maximum(peak, own_peak)
        shift = tl.where(highest == NEGATIVE, 0.0, highest)
        decay, own_decay = tl.exp(peak - shift), tl.exp(own_peak - shift)
        total = total * decay + tl.load(totals + place) * own_decay
        own = tl.load(outputs + place[:, None] * DV + value_dim[None, :])
        output = output * decay[:, None] + own * own_decay[:, None]
        peak = highest
    mask, place = row < GROUP, head * GROUP + row
    output = output / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(result + place[:, None] * DV + value_dim[None, :], output, mask=mask[:, None])
    tl.store(lse + place, peak + tl.log(total), mask=mask)
