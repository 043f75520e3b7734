"""The kernels of the Triton backend; `routed/reference.py` says what they compute, with the same names.

A tile has `ROWS` queries of one KV head: all query heads of that head, position by position. Three kernels run for
prompts and for single steps. Steps share the clusters of a KV head among `splits` programs, prompts do not.

- `local_part`: local keys, sinks, int8 queries; beside it, the deviations of the logits within the clusters of
  each span, and the mass of the centroids for the threshold.
- `far_part` takes sixteen clusters at a time. Their centroids and those of their subclusters give one bit for each
  query and subcluster. Clusters that no query of the tile searches are skipped; of the others, products of int8
  keys give the hits. The keys that some query of the tile reads are written to memory as a dense list, which has
  room for all of them. Then the list is read: exact logits where one is heavy, values, softmax; and the centroids.
- `merge`: all splits, and what centroids move.

The running softmax of a row is its peak, sum and output, and for each span `moved`, the sum of weights times what
centroids move along `C'q`, under the peak that held at its end. Registers are scarce: what can be loaded again is
loaded again, and matrices are multiplied in parts.
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
def _tile(tile, head, n_query, visible, query_member, query_step, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Of a tile: rows, where they are queries, their places in `query`, and the clusters that each sees."""
    row = tile * ROWS + tl.arange(0, ROWS)
    mask = row < n_query * GROUP
    at, member = row // GROUP, row % GROUP
    rows = at.to(tl.int64) * query_step + member * query_member
    return row, mask, rows, tl.load(visible + head * n_query + at, mask=mask, other=0)


@triton.jit
def _logits(
    query, rows, row_mask, key, places, inside, scale, n_dim,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """`[ROWS, KEYS]` logits of the keys at `places`, `WIDTH` numbers of the head dimension at a time."""
    logits = tl.zeros([ROWS, KEYS], tl.float32)
    for start in tl.range(0, n_dim, WIDTH, disable_licm=True):
        part = start + tl.arange(0, WIDTH)
        queries = tl.load(query + rows[:, None] + part[None, :], mask=row_mask[:, None], other=0.0)
        keys = tl.load(key + places[None, :] + part[:, None], mask=inside[None, :], other=0.0)
        logits += _dot(queries, keys, PRECISION, INTERPRETED)
    return logits * scale


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
        of_number = tl.where(which == number, factor, 0.0)
        base = matrix + tl.cast(number, tl.int64) * D * WIDTH
        for start in tl.range(0, n_dim, PART, disable_licm=True):
            part = start + tl.arange(0, PART)
            queries = tl.load(query + rows[:, None] + part[None, :], mask=row_mask[:, None], other=0.0)
            some = tl.load(base + part[:, None] * WIDTH + column[None, :])
            output += tl.dot(queries.to(tl.float32) * of_number[:, None], some, input_precision=PRECISION)
    return output


@triton.jit
def _covariance(n_clusters, span, n_spans, clusters_per_span, clusters_per_cov):
    """Which covariance each row reads for a span: of a complete one, or of the last one of the row; -1 = none."""
    last = (n_clusters - 1) // clusters_per_span
    own = tl.where((span == last) & (n_clusters > 0), n_spans + (n_clusters - 1) // clusters_per_cov, -1)
    return tl.where((span < last) & (n_clusters > 0), span, own)


@triton.jit
def _project_span(
    output, query, rows, row_mask, factor, matrix, n_clusters, span, n_spans, clusters_per_span, clusters_per_cov,
    n_dim, D: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`_project` by the covariances that the rows read for a span."""
    which = _covariance(n_clusters, span, n_spans, clusters_per_span, clusters_per_cov)
    last = tl.where(tl.max(tl.where(which == span, 1, 0), 0) > 0, span, span - 1)
    output = _project(
        output, query, rows, row_mask, factor, matrix, tl.where(which < n_spans, which, -1), span, last, n_dim,
        D, WIDTH, PRECISION,
    )  # fmt: skip
    which = tl.where(which < n_spans, -1, which)
    first, last = tl.min(tl.where(which < 0, 2**30, which), 0), tl.max(which, 0)
    return _project(output, query, rows, row_mask, factor, matrix, which, first, last, n_dim, D, WIDTH, PRECISION)


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
def _std(
    query, rows, row_mask, key_cov, n_clusters, span, n_spans, clusters_per_span, clusters_per_cov, scale, n_dim,
    ROWS: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr, MIN_STD: tl.constexpr, MAX_STD: tl.constexpr,
):  # fmt: skip
    """`[ROWS]` standard deviation of the logits within the clusters of a span, as `reference.far_logits`."""
    dim = tl.arange(0, D)
    along = _project_span(
        tl.zeros([ROWS, D], tl.float32), query, rows, row_mask, tl.zeros([ROWS], tl.float32) + scale, key_cov,
        n_clusters, span, n_spans, clusters_per_span, clusters_per_cov, n_dim, D, D, PRECISION,
    )  # fmt: skip
    scaled = tl.load(query + rows[:, None] + dim[None, :], mask=row_mask[:, None], other=0.0)
    variance = tl.sum(along * (scaled.to(tl.float32) * scale), 1)
    variance = tl.where(variance == variance, variance, MAX_STD * MAX_STD)
    return tl.sqrt(tl.minimum(tl.maximum(variance, MIN_STD * MIN_STD), MAX_STD * MAX_STD))


@triton.jit
def local_part(
    query, key, value, sink_key, sink_value, visible, local_start, local_stop, centroid_key, key_cov,
    masses, stds, query_int8, query_units, peaks, totals, outputs,
    query_head, query_member, query_step, key_head, key_step, value_head, value_step,
    n_query, n_rows, n_tables, n_covs, n_spans, spans, clusters_per_span, clusters_per_cov, clusters_per_split,
    n_sinks, n_dim, scale,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, LOCAL: tl.constexpr,
    WIDTH: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
    LOG_SINK_WEIGHT: tl.constexpr, MIN_STD: tl.constexpr, MAX_STD: tl.constexpr, QUERY_MAX: tl.constexpr,
    MAX_MASS_GAIN: tl.constexpr,
):  # fmt: skip
    """Queries `[T, G, n, D]`: the last program of a tile reads local keys and sinks, others weigh centroids."""
    tile, split, head = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    splits = tl.num_programs(1) - 1
    row, mask, rows, n_clusters = _tile(tile, head, n_query, visible, query_member, query_step, GROUP, ROWS)
    most = tl.max(n_clusters, 0)
    query = query + head * query_head
    if split < splits:
        first = split * clusters_per_split
        last = tl.minimum(first + clusters_per_split, most)
        centroids = centroid_key + head * n_tables * D
        for span in tl.range(first // clusters_per_span, tl.cdiv(last, clusters_per_span), disable_licm=True):
            std = _std(
                query, rows, mask, key_cov + head * n_covs * D * D, n_clusters, span, n_spans, clusters_per_span,
                clusters_per_cov, scale, n_dim, ROWS, D, PRECISION, MIN_STD, MAX_STD,
            )  # fmt: skip
            tl.store(stds + (head * spans + span) * n_rows + row, std)
        tl.debug_barrier()  # other threads may load them
        # `reference.mass_logits`, but for what all clusters gain
        mass, total = tl.full([ROWS], NEGATIVE, tl.float32), tl.zeros([ROWS], tl.float32)
        for block in tl.range(first, last, CLUSTERS, disable_licm=True):
            column = block + tl.arange(0, CLUSTERS)
            logits = _centroid_logits(query, rows, mask, centroids, column, last, scale, n_dim, ROWS, D, PRECISION)
            std = tl.load(stds + (head * spans + block // clusters_per_span) * n_rows + row)
            logits += tl.minimum(0.5 * std * std, MAX_MASS_GAIN)[:, None]
            seen = (column[None, :] < n_clusters[:, None]) & (column < last)[None, :]
            mass, total = _add_mass(mass, total, tl.where(seen, logits, NEGATIVE))
        tl.store(masses + (head * (splits + 1) + split) * n_rows + row, mass + tl.log(total))
    else:
        dim, value_dim, is_routed = tl.arange(0, D), tl.arange(0, DV), n_clusters > 0
        start = tl.load(local_start + head * n_query + row // GROUP, mask=mask, other=2**30)
        stop = tl.load(local_stop + head * n_query + row // GROUP, mask=mask, other=0)
        peak, total = tl.full([ROWS], NEGATIVE, tl.float32), tl.zeros([ROWS], tl.float32)
        moved, output = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, DV], tl.float32)
        key, value, end = key + head * key_head, value + head * value_head, tl.max(stop)
        for begin in tl.range(tl.min(start), end, LOCAL, disable_licm=True):
            position = begin + tl.arange(0, LOCAL)
            far, inside = position.to(tl.int64), position < end
            logits = _logits(
                query, rows, mask, key, far * key_step, inside, scale, n_dim,
                ROWS, LOCAL, WIDTH, PRECISION, INTERPRETED,
            )  # fmt: skip
            seen = (position[None, :] >= start[:, None]) & (position[None, :] < stop[:, None])
            logits = tl.where(seen, logits, NEGATIVE)
            values = tl.load(
                value + far[:, None] * value_step + value_dim[None, :], mask=inside[:, None], other=0.0
            )
            peak, total, moved, output = _fold(peak, total, moved, output, logits, values, PRECISION, INTERPRETED)
        if most > 0:
            mass = peak + tl.log(total)
            key, value = sink_key + head * key_head, sink_value + head * value_head
            sink_peak, sink_total = tl.full([ROWS], NEGATIVE, tl.float32), tl.zeros([ROWS], tl.float32)
            for begin in tl.range(0, n_sinks, 16, disable_licm=True):
                position = begin + tl.arange(0, 16)
                inside = position < n_sinks
                logits = _logits(
                    query, rows, mask, key, position * key_step, inside, scale, n_dim,
                    ROWS, 16, WIDTH, PRECISION, INTERPRETED,
                )  # fmt: skip
                logits = tl.where(inside[None, :] & is_routed[:, None], logits, NEGATIVE)
                sink_peak, sink_total = _add_mass(sink_peak, sink_total, logits)
                values = tl.load(
                    value + position[:, None] * value_step + value_dim[None, :], mask=inside[:, None], other=0.0
                )
                peak, total, moved, output = _fold(
                    peak, total, moved, output, logits, values, PRECISION, INTERPRETED
                )
            mass = _log_sum(mass, sink_peak + tl.log(sink_total) + LOG_SINK_WEIGHT)
            tl.store(masses + (head * (splits + 1) + splits) * n_rows + row, mass)
        at = head * splits * n_rows + row
        tl.store(peaks + at, peak)
        tl.store(totals + at, total)
        tl.store(outputs + at[:, None] * DV + value_dim[None, :], output)
        if most > 0:
            scaled = tl.load(query + rows[:, None] + dim[None, :], mask=mask[:, None], other=0.0)
            scaled = scaled.to(tl.float32) * scale
            # `reference.quantize`; adding 1.5 * 2^23 rounds to the nearest even whole number
            unit = tl.max(tl.abs(scaled), 1) / QUERY_MAX
            numbers = scaled / tl.maximum(unit, 1.1754943508222875e-38)[:, None]
            numbers = (numbers + 12582912.0) - 12582912.0
            numbers = tl.minimum(tl.maximum(numbers, -QUERY_MAX), QUERY_MAX)
            at = head * n_rows + row
            tl.store(query_units + at, unit)
            tl.store(query_int8 + at[:, None] * D + dim[None, :], numbers.to(tl.int8))


@triton.jit
def _int8_logits(
    query_int8, query_units, int8, scales, n_keys, ROWS: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr
):
    """`[ROWS, KEYS]` logits of int8 keys and int8 queries; 0 from `n_keys` on."""
    row, slot, dim = tl.arange(0, ROWS), tl.arange(0, KEYS), tl.arange(0, D)
    numbers = tl.load(query_int8 + row[:, None] * D + dim[None, :])
    keys = tl.load(int8 + slot[None, :] * D + dim[:, None], mask=(slot < n_keys)[None, :], other=0)
    worth = tl.load(scales + slot, mask=slot < n_keys, other=0.0)
    return tl.dot(numbers, keys).to(tl.float32) * worth[None, :] * tl.load(query_units + row)[:, None]


@triton.jit
def _search(
    query, rows, row_mask, query_int8, query_units, n_clusters, threshold, lowered, reach,
    centroid_key, positions, int8, scales, sub_int8, sub_scales, spread, radius, estimates, hits,
    block, last, scale, n_dim,
    ROWS: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Clusters from `block` on: logits, which are seen, keys read of each; numbers of keys listed, compared, read.

    The keys that some row reads are listed: positions in `hits`, int8 logits `[keys, ROWS]` in `estimates`, -inf
    where a row does not read the key.
    """
    S: tl.constexpr = SIZE // SUBCLUSTER
    PARTS: tl.constexpr = SIZE // KEYS
    PART_BITS: tl.constexpr = KEYS // SUBCLUSTER
    PART_MASK: tl.constexpr = tl.constexpr(2) ** PART_BITS - 1
    slot, row = tl.arange(0, KEYS), tl.arange(0, ROWS)
    cluster = block + tl.arange(0, CLUSTERS)
    inside = cluster < last
    seen = (cluster[None, :] < n_clusters[:, None]) & inside[None, :]
    logits = _centroid_logits(query, rows, row_mask, centroid_key, cluster, last, scale, n_dim, ROWS, D, PRECISION)
    # `reference.search_bounds`
    distance = lowered[:, None] - logits
    wide = tl.load(radius + cluster, mask=inside, other=0.0)
    near = (reach[:, None] * wide[None, :] >= distance) & seen & (threshold < float("inf"))[:, None]
    counts = tl.zeros([ROWS, CLUSTERS], tl.int32)
    n_found, n_read = 0, 0
    n_near = tl.sum(tl.sum(near.to(tl.int32), 1), 0)
    n_compared = n_near * S
    if n_near > 0:
        worths = sub_scales + tl.cast(block, tl.int64) * S
        offsets = _int8_logits(
            query_int8, query_units, sub_int8 + tl.cast(block, tl.int64) * S * D, worths, (last - block) * S,
            ROWS, D, CLUSTERS * S,
        )  # fmt: skip
        sub = tl.arange(0, CLUSTERS * S)
        widths = tl.load(spread + tl.cast(block, tl.int64) * S + sub, mask=sub < (last - block) * S, other=0.0)
        highest = tl.reshape(offsets + reach[:, None] * widths[None, :], [ROWS, CLUSTERS, S])
        searched = ((highest >= distance[:, :, None]) & near[:, :, None]).to(tl.int32)
        bits = tl.sum(searched << tl.arange(0, S)[None, None, :], 2)
        n_compared += tl.sum(tl.sum(tl.sum(searched, 2), 1), 0) * SUBCLUSTER
        for step in tl.range(0, CLUSTERS * PARTS, disable_licm=True):
            is_own = (tl.arange(0, CLUSTERS) == step // PARTS)[None, :]
            own_bits = tl.sum(tl.where(is_own, bits, 0), 1)
            own_bits = (own_bits >> (step % PARTS * PART_BITS)) & PART_MASK
            if tl.max(own_bits, 0) > 0:
                # `reference.find_keys`
                begin = tl.cast(block, tl.int64) * SIZE + step * KEYS
                above = _int8_logits(
                    query_int8, query_units, int8 + begin * D, scales + begin, KEYS, ROWS, D, KEYS
                )
                logit = tl.sum(tl.where(is_own, logits, 0.0), 1)
                is_open = ((own_bits[:, None] >> (slot // SUBCLUSTER)[None, :]) & 1) > 0
                hit = is_open & (above >= (lowered - logit)[:, None])
                own_counts = tl.sum(hit.to(tl.int32), 1)
                counts += tl.where(is_own, own_counts[:, None], 0)
                n_read += tl.sum(own_counts, 0)
                some = tl.max(hit.to(tl.int32), 0)
                goes_to = n_found + tl.cumsum(some, 0) - some
                estimate = tl.where(hit, above + logit[:, None], NEGATIVE)
                tl.store(estimates + goes_to[None, :] * ROWS + row[:, None], estimate, mask=(some > 0)[None, :])
                tl.store(hits + goes_to, tl.load(positions + begin + slot), mask=some > 0)
                n_found += tl.sum(some, 0)
    return logits, seen, counts, n_found, n_compared, n_read


@triton.jit
def far_part(
    query, key, value, visible, centroid_key, centroid_value, units, positions, int8, scales, sub_int8, sub_scales,
    spread, radius, masses, stds, query_int8, query_units, peaks, totals, moves, move_peaks, outputs, estimates,
    hits, thresholds, counts, query_head, query_member, query_step, key_head, key_step, value_head, value_step,
    n_heads, n_tiles, splits, n_query, n_rows, n_tables, n_covs, n_spans, spans, spans_per_split,
    clusters_per_span, clusters_per_cov, clusters_per_split, n_dim, scale, log_inverse, margin, exact_margin,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, SIZE: tl.constexpr,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
    SEARCH_STDS: tl.constexpr, HEAVY_STDS: tl.constexpr, HEAVY_INT8_ERROR: tl.constexpr,
    MAX_GAIN: tl.constexpr, MAX_DISTANCE: tl.constexpr, MASS_KEYS: tl.constexpr, MASS_SHARE: tl.constexpr,
):  # fmt: skip
    """Each program runs many tiles, the longest first, with the same memory for its lists of keys."""
    value_dim, in_tile = tl.arange(0, DV), tl.arange(0, ROWS)
    hits += tl.program_id(0).to(tl.int64) * CLUSTERS * SIZE
    estimates += tl.program_id(0).to(tl.int64) * CLUSTERS * SIZE * ROWS
    for number in tl.range(tl.program_id(0), n_tiles * splits * n_heads, tl.num_programs(0), disable_licm=True):
        tile, split = n_tiles - 1 - number // (splits * n_heads), number % splits
        head = tl.cast(number // splits % n_heads, tl.int64)
        row, mask, rows, n_clusters = _tile(tile, head, n_query, visible, query_member, query_step, GROUP, ROWS)
        most, is_routed = tl.max(n_clusters, 0), n_clusters > 0
        # `reference.threshold`
        mass = tl.full([ROWS], NEGATIVE, tl.float32)
        for other in tl.range(0, splits, disable_licm=True):
            mass = _log_sum(mass, tl.load(masses + (head * (splits + 1) + other) * n_rows + row))
        share = MASS_KEYS / (tl.maximum(n_clusters, 1) * SIZE)
        share = tl.maximum(share * tl.sqrt(share), MASS_SHARE)
        mass += tl.log(SIZE * tl.minimum(share, 1.0))
        mass = _log_sum(mass, tl.load(masses + (head * (splits + 1) + splits) * n_rows + row))
        threshold = tl.where(is_routed, mass - log_inverse, float("inf"))
        at = (head * GROUP + row % GROUP) * n_query + row // GROUP
        tl.store(thresholds + at, threshold, mask=mask & (split == 0))
        first = split * clusters_per_split
        last = tl.minimum(first + clusters_per_split, most)
        n_compared, n_read = 0, 0
        # the first split goes on from the local part
        at, is_first = (head * splits + split) * n_rows + row, in_tile + split == in_tile
        peak = tl.load(peaks + at, mask=is_first, other=NEGATIVE)
        total = tl.load(totals + at, mask=is_first, other=0.0)
        whole = at[:, None] * DV + value_dim[None, :]
        output = tl.load(outputs + whole, mask=is_first[:, None], other=0.0)
        moved = tl.zeros([ROWS], tl.float32)
        for block in tl.range(first, last, CLUSTERS, disable_licm=True):
            # `reference.search_bounds`
            span = block // clusters_per_span
            std = tl.load(stds + (head * spans + span) * n_rows + row)
            which = tl.maximum(_covariance(n_clusters, span, n_spans, clusters_per_span, clusters_per_cov), 0)
            reach = (
                tl.maximum(HEAVY_STDS - margin / std, SEARCH_STDS) * std / tl.load(units + head * n_covs + which)
            )
            lowered = threshold - tl.maximum(HEAVY_INT8_ERROR * std - margin, 0.0)
            moved *= tl.where(block % clusters_per_span == 0, 0.0, 1.0)  # a span begins
            tl.debug_barrier()  # lists are shared by all threads
            logits, seen, own_counts, n_found, more_compared, more_read = _search(
                query + head * query_head, rows, mask, query_int8 + (head * n_rows + tile * ROWS) * D,
                query_units + head * n_rows + tile * ROWS, n_clusters, threshold, lowered, reach,
                centroid_key + head * n_tables * D, positions + head * n_tables * SIZE,
                int8 + head * n_tables * SIZE * D, scales + head * n_tables * SIZE,
                sub_int8 + head * n_tables * (SIZE // SUBCLUSTER) * D,
                sub_scales + head * n_tables * (SIZE // SUBCLUSTER),
                spread + head * n_tables * (SIZE // SUBCLUSTER), radius + head * n_tables, estimates, hits,
                block, last, scale, n_dim,
                ROWS, D, SIZE, KEYS, PRECISION,
            )  # fmt: skip
            n_compared, n_read = n_compared + more_compared, n_read + more_read
            tl.debug_barrier()
            for begin in tl.range(0, n_found, KEYS, disable_licm=True):
                slot = begin + tl.arange(0, KEYS)
                listed = slot < n_found
                pending = tl.load(
                    estimates + slot[None, :] * ROWS + in_tile[:, None], mask=listed[None, :], other=NEGATIVE
                )
                position = tl.load(hits + slot, mask=listed, other=0)
                heavy = pending >= (threshold + exact_margin)[:, None]
                if tl.max(tl.max(heavy.to(tl.int32), 1), 0) > 0:
                    exact = _logits(
                        query + head * query_head, rows, mask, key + head * key_head, position * key_step,
                        listed, scale, n_dim, ROWS, KEYS, WIDTH, PRECISION, INTERPRETED,
                    )  # fmt: skip
                    pending = tl.where(heavy, exact, pending)
                values = tl.load(
                    value + head * value_head + position[:, None] * value_step + value_dim[None, :],
                    mask=listed[:, None], other=0.0,
                )  # fmt: skip
                peak, total, moved, output = _fold(
                    peak, total, moved, output, pending, values, PRECISION, INTERPRETED
                )
            # `reference.far_terms`, `reference.far_sums`
            std = tl.load(stds + (head * spans + block // clusters_per_span) * n_rows + row)
            gain, move = _centroid_corrections(threshold[:, None] - logits, std[:, None], MAX_GAIN, MAX_DISTANCE)
            unread = SIZE - own_counts
            columns = logits + gain + tl.log(tl.maximum(unread, 1).to(tl.float32))
            columns = tl.where(seen & (unread > 0), columns, NEGATIVE)
            cluster = block + tl.arange(0, CLUSTERS)
            values = tl.load(
                centroid_value + (head * n_tables + cluster)[:, None] * DV + value_dim[None, :],
                mask=(cluster < last)[:, None], other=0.0,
            )  # fmt: skip
            peak, total, moved, output = _fold(peak, total, moved, output, columns, values, PRECISION, INTERPRETED)
            shift = tl.where(peak == NEGATIVE, 0.0, peak)
            moved += tl.sum(tl.exp(columns - shift[:, None]) * move, 1)
            # the last block of a span stays
            part = block // clusters_per_span - first // clusters_per_span
            of_span = ((head * splits + split) * spans_per_split + part) * n_rows + row
            tl.store(moves + of_span, moved)
            tl.store(move_peaks + of_span, peak)
        tl.store(peaks + at, peak)
        tl.store(totals + at, total)
        tl.store(outputs + whole, output)
        tl.store(counts + number * 2, n_compared)
        tl.store(counts + number * 2 + 1, n_read)


@triton.jit
def merge(
    query, visible, key_value_cov, peaks, totals, moves, move_peaks, outputs, result, lse,
    query_head, query_member, query_step, n_query, n_rows, splits, n_covs, n_spans, spans_per_split,
    clusters_per_span, clusters_per_cov, clusters_per_split, n_dim, scale,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The softmax over all splits, with what centroids move along `C'q`."""
    tile, head, value_dim = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, DV)
    row, mask, rows, n_clusters = _tile(tile, head, n_query, visible, query_member, query_step, GROUP, ROWS)
    peak, total = tl.full([ROWS], NEGATIVE, tl.float32), tl.zeros([ROWS], tl.float32)
    output = tl.zeros([ROWS, DV], tl.float32)
    for split in tl.range(0, splits, disable_licm=True):
        at = (head * splits + split) * n_rows + row
        part_peak = tl.load(peaks + at)
        highest = tl.maximum(peak, part_peak)
        shift = tl.where(highest == NEGATIVE, 0.0, highest)
        decay, part_decay = tl.exp(peak - shift), tl.exp(part_peak - shift)
        total = total * decay + tl.load(totals + at) * part_decay
        part_output = tl.load(outputs + at[:, None] * DV + value_dim[None, :])
        output = output * decay[:, None] + part_output * part_decay[:, None]
        peak = highest
    most, shift = tl.max(n_clusters, 0), tl.where(peak == NEGATIVE, 0.0, peak)
    for split in tl.range(0, splits, disable_licm=True):
        first = split * clusters_per_split // clusters_per_span
        last = tl.cdiv(tl.minimum((split + 1) * clusters_per_split, most), clusters_per_span)
        for span in tl.range(first, last, disable_licm=True):
            at = ((head * splits + split) * spans_per_split + span - first) * n_rows + row
            moved = tl.load(moves + at) * tl.exp(tl.load(move_peaks + at) - shift)
            output = _project_span(
                output, query + head * query_head, rows, mask, moved * scale,
                key_value_cov + head * n_covs * D * DV, n_clusters, span, n_spans, clusters_per_span,
                clusters_per_cov, n_dim, D, DV, PRECISION,
            )  # fmt: skip
    at = (head * GROUP + row % GROUP) * n_query + row // GROUP
    output = output / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(result + at[:, None] * DV + value_dim[None, :], output, mask=mask[:, None])
    tl.store(lse + at, peak + tl.log(total), mask=mask)
