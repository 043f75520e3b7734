"""The kernels of the Triton backend; `routed/reference.py` says what they compute, with the same names.

A tile has `ROWS` queries of one KV head: `MEMBERS` of its query heads, position by position. A tile of a prompt
has 64 positions of one head, which search less than as many rows of several heads. A tile of a step has all
heads. Three kernels run for both. The programs of a tile share local keys and clusters in `splits` parts; prompts
are not split.

- `bound`: local keys, sinks, int8 queries; the deviations of the logits within the clusters of each span, and the
  mass that the threshold counts.
- `far` takes sixteen clusters at a time. *Gate*: centroids of clusters and subclusters give, for each query and
  subcluster, the least whole number that the product of an int8 key must reach. *Scan*: int8 keys, the rows of the
  products, where some query searches; a key is listed if a query of the tile reaches its bound. No logit is
  stored. *Read*: the keys listed, of which a query takes those that reach its bound; then the centroids.
- `merge`: all splits, and what centroids move.

The running softmax of a row is its peak, sum and output, and for each span `moved`, the sum of weights times what
centroids move along `C'q`, under the peak that held at its end. Lengths are read on the device, so a captured
graph of a step serves every length. Keys and values lie at strides, or in pages of `PAGE` positions.
"""

import triton
import triton.language as tl

CLUSTERS = tl.constexpr(16)
"""Clusters whose centroids are compared at once."""
SUBCLUSTER = tl.constexpr(16)
PART = tl.constexpr(16)
"""Numbers of a query that are multiplied in float32 at once."""
NEGATIVE = tl.constexpr(float("-inf"))
NEVER = tl.constexpr(2.0**30)
"""A bound that no product reaches."""
PACK = tl.constexpr(256)
"""Flags of keys that are made into a list at once."""
LEAST_WORTH = tl.constexpr(1e-20)
"""Least logit that a unit of a product is taken to be worth."""
GATE = tl.constexpr(32)
"""Centroids of subclusters compared at once."""


@triton.jit
def _tile(
    tile, length, n_query, n_sinks, chunk_size, exact_until, n_chunks, clusters_per_chunk, query_member,
    query_step, MEMBERS: tl.constexpr, ROWS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Of a tile: rows, where they are queries, places in `query`, the clusters and local keys that each sees."""
    row = tile * ROWS + tl.arange(0, ROWS)
    at, member = row // MEMBERS, row % MEMBERS
    mask = at < n_query
    stop, chunks = tl.zeros([ROWS], tl.int32) + length, tl.zeros([ROWS], tl.int32) + n_chunks
    if CAUSAL:
        stop += at + 1 - n_query
        seen = tl.maximum((stop - 1 - n_sinks) // chunk_size - 1, 0)
        chunks = tl.where(stop > exact_until, tl.minimum(seen, chunks), 0)
    chunks, stop = tl.where(mask, chunks, 0), tl.where(mask, stop, 0)
    start = tl.where(chunks > 0, n_sinks + chunks * chunk_size, tl.where(mask, 0, 2**30))
    rows = at.to(tl.int64) * query_step + member * query_member
    return row, mask, rows, chunks * clusters_per_chunk, start, stop


@triton.jit
def _share(first, last, split, splits, STEP: tl.constexpr):
    """The part of a range that belongs to a split, in whole steps; from 0 to 0 where it is empty."""
    size = tl.cdiv(tl.cdiv(last - first, STEP), splits) * STEP
    begin, end = first + split * size, tl.minimum(first + (split + 1) * size, last)
    return tl.where(begin < end, begin, 0), tl.where(begin < end, end, 0)


@triton.jit
def _places(position, inside, pages, page_step, step, PAGE: tl.constexpr):
    """Where keys or values at these positions lie."""
    if PAGE:
        page = tl.load(pages + position // PAGE, mask=inside, other=0)
        return page.to(tl.int64) * page_step + (position % PAGE).to(tl.int64) * step
    else:
        return position.to(tl.int64) * step


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
def _entries(n_clusters, span, clusters_per_span, clusters_per_cov):
    """Which rows read the covariance of the whole span; which entry of `key_cov` the others read, -1 = none."""
    last = (n_clusters - 1) // clusters_per_span
    entry = tl.where((span == last) & (n_clusters > 0), (n_clusters - 1) // clusters_per_cov, -1)
    return (span < last) & (n_clusters > 0), entry


@triton.jit
def _project_span(
    output, query, rows, row_mask, factor, span_matrix, matrix, n_clusters, span, clusters_per_span,
    clusters_per_cov, n_dim, D: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`_project` by the covariances that the rows read for a span."""
    whole, entry = _entries(n_clusters, span, clusters_per_span, clusters_per_cov)
    last = tl.where(tl.max(whole.to(tl.int32), 0) > 0, span, span - 1)
    output = _project(
        output, query, rows, row_mask, factor, span_matrix, tl.where(whole, span, -1), span, last, n_dim,
        D, WIDTH, PRECISION,
    )  # fmt: skip
    first, last = tl.min(tl.where(entry < 0, 2**30, entry), 0), tl.max(entry, 0)
    return _project(output, query, rows, row_mask, factor, matrix, entry, first, last, n_dim, D, WIDTH, PRECISION)


@triton.jit
def _normal(x):
    """Of `reference._log_normal_cdf`: `min(y, 0)`, `exp(-|y|)`, and the slope times `1 + exp(-|y|)`."""
    x = tl.minimum(tl.maximum(x, -4.0), 8.0)
    y = x * (1.5976 + 0.07056 * x * x)
    small = tl.exp(-tl.abs(y))
    return tl.minimum(y, 0.0), small, tl.where(y >= 0.0, small, 1.0) * (1.5976 + 0.21168 * x * x)


@triton.jit
def _centroids(distance, std, unread, MAX_GAIN: tl.constexpr, MAX_DISTANCE: tl.constexpr):
    """What logits gain, the log of the unread keys included, and moves, as in `reference.centroid_corrections`."""
    inverse = 1.0 / std
    x = tl.minimum(tl.maximum(distance, -MAX_DISTANCE), MAX_DISTANCE) * inverse[:, None]
    shifted, small, slope = _normal(x - std[:, None])
    unshifted, other, _ = _normal(x)
    ratio = 1.0 / (1.0 + small)
    gain = (0.5 * std * std)[:, None] + shifted - unshifted
    gain = tl.minimum(tl.maximum(gain + tl.log((1.0 + other) * ratio), -MAX_GAIN), MAX_GAIN)
    gain = tl.where(unread > 0, gain + tl.log(tl.maximum(unread, 1.0)), NEGATIVE)
    return gain, tl.minimum(tl.maximum(1.0 - slope * ratio * inverse[:, None], -1.0), 1.0)


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
    ROWS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """`[ROWS, CLUSTERS]`. In half precision centroids are the sum of two numbers, and queries are exact."""
    logits = tl.zeros([ROWS, CLUSTERS], tl.float32)
    for start in tl.range(0, n_dim, WIDTH, disable_licm=True):
        part = start + tl.arange(0, WIDTH)
        queries = tl.load(query + rows[:, None] + part[None, :], mask=row_mask[:, None], other=0.0)
        inside = (column < last)[None, :]
        centroids = tl.load(centroid_key + column[None, :] * D + part[:, None], mask=inside, other=0.0)
        rounded = centroids.to(queries.dtype)
        logits += _dot(queries, rounded, PRECISION, INTERPRETED)
        if queries.dtype != tl.float32:
            rest = (centroids - rounded.to(tl.float32)).to(queries.dtype)
            logits += _dot(queries, rest, PRECISION, INTERPRETED)
    return logits * scale


@triton.jit
def _deviation(
    query, rows, row_mask, span_key_cov, key_cov, n_clusters, span, clusters_per_span, clusters_per_cov, scale,
    n_dim, ROWS: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr, MIN_STD: tl.constexpr,
    MAX_STD: tl.constexpr,
):  # fmt: skip
    """`[ROWS]` standard deviations of the logits within the clusters of a span, and of the keys themselves."""
    dim = tl.arange(0, D)
    along = _project_span(
        tl.zeros([ROWS, D], tl.float32), query, rows, row_mask, tl.zeros([ROWS], tl.float32) + scale, span_key_cov,
        key_cov, n_clusters, span, clusters_per_span, clusters_per_cov, n_dim, D, D, PRECISION,
    )  # fmt: skip
    scaled = tl.load(query + rows[:, None] + dim[None, :], mask=row_mask[:, None], other=0.0)
    variance = tl.sum(along * (scaled.to(tl.float32) * scale), 1)
    variance = tl.where(variance == variance, variance, MAX_STD * MAX_STD)
    whole, entry = _entries(n_clusters, span, clusters_per_span, clusters_per_cov)
    matrix = tl.where(whole, span, tl.maximum(entry, 0)).to(tl.int64) * D * D
    places, reads = matrix[:, None] + dim[None, :] * (D + 1), (whole | (entry >= 0))[:, None]
    of_span = tl.load(span_key_cov + places, mask=reads & whole[:, None], other=0.0)
    trace = tl.sum(of_span + tl.load(key_cov + places, mask=reads & ~whole[:, None], other=0.0), 1)
    least: tl.constexpr = MIN_STD * MIN_STD
    return tl.sqrt(tl.minimum(tl.maximum(variance, least), MAX_STD * MAX_STD)), tl.sqrt(tl.maximum(trace, least))


@triton.jit
def bound(
    query, key, value, pages, lengths, centroid_key, span_key_cov, key_cov, masses, stds, reaches, query_rows,
    query_int8, query_units, visible, peaks, totals, outputs, query_head, query_member, query_step, key_batch,
    key_head, key_page, key_step, value_batch, value_head, value_page, value_step, pages_step, kv_heads, n_query,
    n_rows, n_tables, n_covs, n_spans, spans, clusters_per_span, clusters_per_cov, clusters_per_chunk,
    chunk_size, n_chunks, exact_until, n_sinks, n_dim, scale, margin,
    GROUP: tl.constexpr, MEMBERS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    SIZE: tl.constexpr, LOCAL: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRETED: tl.constexpr, SEARCH_STDS: tl.constexpr, HEAVY_STDS: tl.constexpr,
    LOG_SINK_WEIGHT: tl.constexpr, MIN_STD: tl.constexpr, MAX_STD: tl.constexpr, QUERY_MAX: tl.constexpr,
    MAX_MASS_GAIN: tl.constexpr, MASS_KEYS: tl.constexpr, MASS_SHARE: tl.constexpr,
):  # fmt: skip
    """Queries `[T, G, n, D]`, keys and values by sequence and head: one split of the local keys and clusters."""
    tile, split, unit = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    splits, head = tl.num_programs(1), unit // (GROUP // MEMBERS)
    sequence, kv_head = head // kv_heads, head % kv_heads
    row, mask, rows, n_clusters, start, stop = _tile(
        tile, tl.load(lengths + sequence), n_query, n_sinks, chunk_size, exact_until, n_chunks, clusters_per_chunk,
        query_member, query_step, MEMBERS, ROWS, CAUSAL,
    )  # fmt: skip
    query += head * query_head + unit % (GROUP // MEMBERS) * MEMBERS * query_member
    key += sequence * key_batch + kv_head * key_head
    value += sequence * value_batch + kv_head * value_head
    pages += sequence * pages_step
    first, last = _share(0, tl.max(n_clusters, 0), split, splits, CLUSTERS)
    at, is_routed = (unit * splits + split) * n_rows + row, n_clusters > 0
    of_spans = ((unit * splits + split) * spans - first // clusters_per_span) * n_rows + row
    for span in tl.range(first // clusters_per_span, tl.cdiv(last, clusters_per_span), disable_licm=True):
        std, length = _deviation(
            query, rows, mask, span_key_cov + head * n_spans * D * D, key_cov + head * n_covs * D * D, n_clusters,
            span, clusters_per_span, clusters_per_cov, scale, n_dim, ROWS, D, PRECISION, MIN_STD, MAX_STD,
        )  # fmt: skip
        # `reference.search_bounds`
        tl.store(stds + of_spans + span * n_rows, std)
        reach = tl.maximum(HEAVY_STDS - margin / std, SEARCH_STDS) * std / length
        tl.store(reaches + of_spans + span * n_rows, reach)
    # `reference.logit_threshold`
    mass, total = tl.full([ROWS], NEGATIVE, tl.float32), tl.zeros([ROWS], tl.float32)
    for block in tl.range(first, last, CLUSTERS, disable_licm=True):
        column = block + tl.arange(0, CLUSTERS)
        logits = _centroid_logits(
            query,
            rows,
            mask,
            centroid_key + head * n_tables * D,
            column,
            last,
            scale,
            n_dim,
            ROWS,
            WIDTH,
            D,
            PRECISION,
            INTERPRETED,
        )
        std = tl.load(stds + of_spans + block // clusters_per_span * n_rows)
        logits += tl.minimum(0.5 * std * std, MAX_MASS_GAIN)[:, None]
        seen = (column[None, :] < n_clusters[:, None]) & (column < last)[None, :]
        mass, total = _add_mass(mass, total, tl.where(seen, logits, NEGATIVE))
    share = MASS_KEYS / (tl.maximum(n_clusters, 1) * SIZE)
    share = tl.maximum(share * tl.sqrt(share), MASS_SHARE)
    mass += tl.log(total) + tl.log(SIZE * tl.minimum(share, 1.0))
    dim, value_dim = tl.arange(0, D), tl.arange(0, DV)
    peak, total = tl.full([ROWS], NEGATIVE, tl.float32), tl.zeros([ROWS], tl.float32)
    moved, output = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, DV], tl.float32)
    first, last = _share(tl.min(start), tl.max(stop), split, splits, LOCAL)
    for begin in tl.range(first, last, LOCAL, disable_licm=True):
        position = begin + tl.arange(0, LOCAL)
        inside = position < last
        logits = _logits(
            query, rows, mask, key, _places(position, inside, pages, key_page, key_step, PAGE), inside, scale,
            n_dim, ROWS, LOCAL, WIDTH, PRECISION, INTERPRETED,
        )  # fmt: skip
        seen = (position[None, :] >= start[:, None]) & (position[None, :] < stop[:, None]) & inside[None, :]
        places = _places(position, inside, pages, value_page, value_step, PAGE)
        values = tl.load(value + places[:, None] + value_dim[None, :], mask=inside[:, None], other=0.0)
        peak, total, moved, output = _fold(
            peak, total, moved, output, tl.where(seen, logits, NEGATIVE), values, PRECISION, INTERPRETED
        )
    mass = _log_sum(mass, peak + tl.log(total))
    if split == 0:
        sink_peak, sink_total = tl.full([ROWS], NEGATIVE, tl.float32), tl.zeros([ROWS], tl.float32)
        for begin in tl.range(0, n_sinks, 16, disable_licm=True):
            position = begin + tl.arange(0, 16)
            inside = position < n_sinks
            logits = _logits(
                query, rows, mask, key, _places(position, inside, pages, key_page, key_step, PAGE), inside, scale,
                n_dim, ROWS, 16, WIDTH, PRECISION, INTERPRETED,
            )  # fmt: skip
            logits = tl.where(inside[None, :] & is_routed[:, None], logits, NEGATIVE)
            sink_peak, sink_total = _add_mass(sink_peak, sink_total, logits)
            places = _places(position, inside, pages, value_page, value_step, PAGE)
            values = tl.load(value + places[:, None] + value_dim[None, :], mask=inside[:, None], other=0.0)
            peak, total, moved, output = _fold(peak, total, moved, output, logits, values, PRECISION, INTERPRETED)
        mass = _log_sum(mass, sink_peak + tl.log(sink_total) + LOG_SINK_WEIGHT)
        given = tl.load(query + rows[:, None] + dim[None, :], mask=mask[:, None], other=0.0)
        scaled = given.to(tl.float32) * scale
        # `reference.quantize`; adding 1.5 * 2^23 rounds to the nearest even whole number
        step = tl.max(tl.abs(scaled), 1) / QUERY_MAX
        numbers = scaled / tl.maximum(step, 1.1754943508222875e-38)[:, None]
        numbers = (numbers + 12582912.0) - 12582912.0
        numbers = tl.minimum(tl.maximum(numbers, -QUERY_MAX), QUERY_MAX)
        tl.store(visible + unit * n_rows + row, n_clusters)
        tl.store(query_units + unit * n_rows + row, step)
        rows_of_unit = (unit * n_rows + row)[:, None] * D + dim[None, :]
        tl.store(query_rows + rows_of_unit, given)
        tl.store(query_int8 + rows_of_unit, numbers.to(tl.int8))
    tl.store(masses + at, mass)
    tl.store(peaks + at, peak)
    tl.store(totals + at, total)
    tl.store(outputs + at[:, None] * DV + value_dim[None, :], output)


@triton.jit
def _gate(
    query_int8, query_units, reaches, sub_int8, sub_scales, scales, spread, least, bounds, flags, parts, n_inside,
    ROWS: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Which subclusters are searched, as in `reference.search_bounds`; `least [CLUSTERS, ROWS]` is set.

    Stores `bounds [CLUSTERS * S, ROWS]`, +inf where a row does not search a subcluster, and in `parts` the runs of
    `KEYS` keys that some row searches. Returns how many runs these are, and how many keys are compared by all
    rows.
    """
    S: tl.constexpr = SIZE // SUBCLUSTER
    RUNS: tl.constexpr = CLUSTERS * SIZE // KEYS
    dim, row = tl.arange(0, D), tl.arange(0, ROWS)
    numbers = tl.load(query_int8 + row[None, :] * D + dim[:, None])
    reach = tl.load(reaches + row) / tl.maximum(tl.load(query_units + row), LEAST_WORTH)
    STEP: tl.constexpr = min(GATE.value, CLUSTERS.value * S)
    n_searched = tl.zeros([STEP], tl.int32)
    for begin in tl.range(0, CLUSTERS * S, STEP, disable_licm=True):
        sub = begin + tl.arange(0, STEP)
        inside = sub < n_inside * S
        keys = tl.load(sub_int8 + sub[:, None] * D + dim[None, :], mask=inside[:, None], other=0)
        worth = tl.load(sub_scales + sub // S, mask=inside, other=0.0)
        offsets = tl.dot(keys, numbers).to(tl.float32) * worth[:, None]
        highest = offsets + reach[None, :] * tl.load(spread + sub, mask=inside, other=0.0)[:, None]
        worth = tl.load(scales + sub // S, mask=inside, other=0.0)
        bound_of = tl.load(least + (sub // S)[:, None] * ROWS + row[None, :])
        searched = highest >= bound_of * worth[:, None]
        tl.store(bounds + sub[:, None] * ROWS + row[None, :], tl.where(searched, bound_of, float("inf")))
        n_rows = tl.sum(searched.to(tl.int32), 1)
        tl.store(flags + sub, (n_rows > 0).to(tl.int8))
        n_searched += n_rows
    tl.debug_barrier()
    subs: tl.constexpr = KEYS // SUBCLUSTER
    run = tl.arange(0, RUNS)
    some = tl.max(tl.load(flags + run[:, None] * subs + tl.arange(0, subs)[None, :]).to(tl.int32), 1)
    tl.store(parts + tl.cumsum(some, 0) - some, run, mask=some > 0)
    return tl.sum(some, 0), tl.sum(n_searched, 0) * SUBCLUSTER


@triton.jit
def _scan(
    query_int8, int8, whole_bounds, parts, flags, hits, n_parts,
    ROWS: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """List the keys of the runs in `parts` that reach the bound of some row; returns how many these are."""
    slot, dim, row = tl.arange(0, KEYS), tl.arange(0, D), tl.arange(0, ROWS)
    tl.debug_barrier()
    tl.store(flags + tl.arange(0, CLUSTERS * SIZE), tl.zeros([CLUSTERS * SIZE], tl.int8))
    tl.debug_barrier()
    numbers = tl.load(query_int8 + row[None, :] * D + dim[:, None])
    for place in tl.range(0, n_parts, num_stages=STAGES):
        part = tl.load(parts + place)
        at = part * KEYS + slot
        keys = tl.load(int8 + at[:, None] * D + dim[None, :])
        least = tl.load(whole_bounds + part * KEYS // SIZE * ROWS + row)
        above = tl.max(tl.dot(keys, numbers) - least[None, :], 1)
        tl.store(flags + at, (above >= 0).to(tl.int8))
    tl.debug_barrier()
    n_hits = 0
    for begin in tl.range(0, CLUSTERS * SIZE, PACK, disable_licm=True):
        at = begin + tl.arange(0, PACK)
        flag = tl.load(flags + at).to(tl.int32)
        tl.store(hits + n_hits + tl.cumsum(flag, 0) - flag, at, mask=flag > 0)
        n_hits += tl.sum(flag, 0)
    tl.debug_barrier()
    return n_hits


@triton.jit
def _lowered(limits, stds, margin, ROWS: tl.constexpr, HEAVY_INT8_ERROR: tl.constexpr):
    """What int8 logits must reach, as in `reference.search_bounds`."""
    row = tl.arange(0, ROWS)
    return tl.load(limits + row) - tl.maximum(HEAVY_INT8_ERROR * tl.load(stds + row) - margin, 0.0)


@triton.jit
def far(
    key, value, pages, centroid_key, centroid_value, positions, int8, scales, sub_int8, sub_scales, spread, radius,
    masses, stds, reaches, query_rows, query_int8, query_units, visible, limits, peaks, totals, moves, move_peaks,
    outputs, least, bounds, whole_bounds, parts, flags, hits, counts, key_batch, key_head, key_page, key_step,
    value_batch, value_head, value_page, value_step, pages_step, kv_heads, first_work, n_units, n_tiles, splits,
    n_rows, n_tables, spans, clusters_per_span, n_dim, scale, log_inverse, margin, exact_margin,
    GROUP: tl.constexpr, MEMBERS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    SIZE: tl.constexpr, KEYS: tl.constexpr, READ: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
    PAGE: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr, HEAVY_INT8_ERROR: tl.constexpr,
    MAX_GAIN: tl.constexpr, MAX_DISTANCE: tl.constexpr,
):  # fmt: skip
    """Tiles from `first_work` on, the longest first; each program has memory for bounds and keys listed."""
    S: tl.constexpr = SIZE // SUBCLUSTER
    value_dim, in_tile, dim = tl.arange(0, DV), tl.arange(0, ROWS), tl.arange(0, D)
    memory = tl.program_id(0).to(tl.int64) * CLUSTERS
    bounds, least, whole_bounds = bounds + memory * S * ROWS, least + memory * ROWS, whole_bounds + memory * ROWS
    parts, flags, hits = parts + memory * SIZE // KEYS, flags + memory * SIZE, hits + memory * SIZE
    number = first_work + tl.program_id(0)
    tile, split = n_tiles - 1 - number // (splits * n_units), number % splits
    unit = tl.cast(number // splits % n_units, tl.int64)
    head = unit // (GROUP // MEMBERS)
    sequence, kv_head = head // kv_heads, head % kv_heads
    keys = key + sequence * key_batch + kv_head * key_head
    values = value + sequence * value_batch + kv_head * value_head
    table = pages + sequence * pages_step
    of_tile, of_split = unit * n_rows + tile * ROWS, (unit * splits + split) * n_rows + tile * ROWS
    n_clusters = tl.load(visible + of_tile + in_tile)
    first, last = _share(0, tl.max(n_clusters, 0), split, splits, CLUSTERS)
    of_spans = ((unit * splits + split) * spans - first // clusters_per_span) * n_rows + tile * ROWS
    # `reference.logit_threshold`
    mass = tl.full([ROWS], NEGATIVE, tl.float32)
    for other in tl.range(0, splits, disable_licm=True):
        mass = _log_sum(mass, tl.load(masses + (unit * splits + other) * n_rows + tile * ROWS + in_tile))
    limits += of_split
    tl.store(limits + in_tile, tl.where(n_clusters > 0, mass - log_inverse, float("inf")))
    n_compared, n_read = 0, 0
    for block in tl.range(first, last, CLUSTERS, disable_licm=True):
        tl.debug_barrier()  # memory of the block before is free
        # `reference.search_bounds`
        of_span = of_spans + block // clusters_per_span * n_rows
        cluster = block + tl.arange(0, CLUSTERS)
        inside, begin = cluster < last, head * n_tables + block
        logits = _centroid_logits(
            query_rows + of_tile * D, in_tile * D, in_tile >= 0, centroid_key + head * n_tables * D, cluster,
            last, scale, n_dim, ROWS, WIDTH, D, PRECISION, INTERPRETED,
        )  # fmt: skip
        seen = (cluster[None, :] < tl.load(visible + of_tile + in_tile)[:, None]) & inside[None, :]
        logits = tl.where(seen, logits, NEGATIVE)
        reach, units = tl.load(reaches + of_span + in_tile), tl.load(query_units + of_tile + in_tile)
        lowered = _lowered(limits, stds + of_span, margin, ROWS, HEAVY_INT8_ERROR)
        distance = lowered[:, None] - logits
        wide = tl.load(radius + head * n_tables + cluster, mask=inside, other=0.0)
        near = (reach[:, None] * wide[None, :] >= distance) & (distance < float("inf"))
        n_near = tl.sum(tl.sum(near.to(tl.int32), 1), 0)
        n_hits = 0
        if n_near > 0:
            worths = tl.load(scales + begin + tl.arange(0, CLUSTERS), mask=inside, other=0.0)
            needed = distance / tl.maximum(worths[None, :] * units[:, None], LEAST_WORTH)
            needed = tl.where(near, needed, float("inf"))
            into = tl.arange(0, CLUSTERS)[None, :] * ROWS + in_tile[:, None]
            tl.store(least + into, needed)
            needed = tl.minimum(tl.maximum(tl.ceil(needed), -NEVER), NEVER)
            tl.store(whole_bounds + into, needed.to(tl.int32))
            tl.debug_barrier()
            n_parts, n_searched = _gate(
                query_int8 + of_tile * D, query_units + of_tile, reaches + of_span, sub_int8 + begin * S * D,
                sub_scales + begin, scales + begin, spread + begin * S, least, bounds, flags, parts, last - block,
                ROWS, D, SIZE, KEYS,
            )  # fmt: skip
            n_compared += n_searched + n_near * S
            n_hits = _scan(
                query_int8 + of_tile * D, int8 + begin * SIZE * D, whole_bounds, parts, flags, hits, n_parts,
                ROWS, D, SIZE, KEYS, STAGES,
            )  # fmt: skip
        # registers are scarce in the scan, so the softmax waits in memory
        peak, total = tl.load(peaks + of_split + in_tile), tl.load(totals + of_split + in_tile)
        state = of_split * DV + in_tile[:, None] * DV + value_dim[None, :]
        output, is_first = tl.load(outputs + state), (block == first) | (block % clusters_per_span == 0)
        moved = tl.load(moves + of_span + in_tile, mask=(in_tile >= 0) & (is_first == 0), other=0.0)
        read_counts = tl.zeros([ROWS, CLUSTERS], tl.float32)
        for start in tl.range(0, n_hits, READ, disable_licm=True):
            # `reference.find_keys`, `reference.hit_logits`
            slot = start + tl.arange(0, READ)
            listed = slot < n_hits
            slot = tl.load(hits + slot, mask=listed, other=0)
            position = tl.load(positions + begin * SIZE + slot, mask=listed, other=0)
            int8_keys = tl.load(
                int8 + (begin * SIZE + slot)[None, :] * D + dim[:, None], mask=listed[None, :], other=0
            )
            numbers = tl.load(query_int8 + of_tile * D + in_tile[:, None] * D + dim[None, :])
            bound_of = tl.load(
                bounds + (slot // SUBCLUSTER)[None, :] * ROWS + in_tile[:, None], mask=listed[None, :],
                other=float("inf"),
            )  # fmt: skip
            above = tl.dot(numbers, int8_keys).to(tl.float32) - bound_of
            worth = tl.load(scales + begin + slot // SIZE, mask=listed, other=0.0)
            worth = worth[None, :] * tl.load(query_units + of_tile + in_tile)[:, None]
            is_read = above >= 0
            of_cluster = (slot // SIZE)[:, None] == tl.arange(0, CLUSTERS)[None, :]
            read_counts += tl.dot(is_read.to(tl.float16), of_cluster.to(tl.float16))
            lowered = _lowered(limits, stds + of_span, margin, ROWS, HEAVY_INT8_ERROR)
            pending = lowered[:, None] + above * tl.maximum(worth, LEAST_WORTH)
            pending = tl.where(is_read, pending, NEGATIVE)
            heavy = pending >= (tl.load(limits + in_tile) + exact_margin)[:, None]
            if tl.max(tl.max(heavy.to(tl.int32), 1), 0) > 0:
                exact = _logits(
                    query_rows + of_tile * D, in_tile * D, in_tile >= 0, keys,
                    _places(position, listed, table, key_page, key_step, PAGE), listed, scale, n_dim,
                    ROWS, READ, WIDTH, PRECISION, INTERPRETED,
                )  # fmt: skip
                pending = tl.where(heavy, exact, pending)
            places = _places(position, listed, table, value_page, value_step, PAGE)
            some = tl.load(values + places[:, None] + value_dim[None, :], mask=listed[:, None], other=0.0)
            peak, total, moved, output = _fold(peak, total, moved, output, pending, some, PRECISION, INTERPRETED)
        n_read += tl.sum(tl.sum(read_counts, 1), 0).to(tl.int32)
        # `reference.far_terms`, `reference.far_sums`
        std = tl.load(stds + of_span + in_tile)
        distance = tl.load(limits + in_tile)[:, None] - logits
        gain, move = _centroids(distance, std, SIZE - read_counts, MAX_GAIN, MAX_DISTANCE)
        columns = logits + gain
        centroids = tl.load(
            centroid_value + (head * n_tables + cluster)[:, None] * DV + value_dim[None, :],
            mask=inside[:, None], other=0.0,
        )  # fmt: skip
        peak, total, moved, output = _fold(peak, total, moved, output, columns, centroids, PRECISION, INTERPRETED)
        shift = tl.where(peak == NEGATIVE, 0.0, peak)
        moved += tl.sum(tl.exp(columns - shift[:, None]) * move, 1)
        # the last block of a span stays
        tl.store(moves + of_span + in_tile, moved)
        tl.store(move_peaks + of_span + in_tile, peak)
        tl.store(peaks + of_split + in_tile, peak)
        tl.store(totals + of_split + in_tile, total)
        tl.store(outputs + state, output)
    tl.store(counts + number * 2, n_compared)
    tl.store(counts + number * 2 + 1, n_read)


@triton.jit
def merge(
    span_key_value_cov, key_value_cov, query_rows, visible, limits, peaks, totals, moves, move_peaks, outputs,
    result, lse, thresholds, splits, n_query, n_rows, n_covs, n_spans, spans, clusters_per_span,
    clusters_per_cov, n_dim, scale, GROUP: tl.constexpr, MEMBERS: tl.constexpr, ROWS: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The softmax over all splits, with what centroids move along `C'q`."""
    tile, unit, value_dim = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, DV)
    head, member = unit // (GROUP // MEMBERS), unit % (GROUP // MEMBERS) * MEMBERS
    row, in_tile = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, ROWS)
    n_clusters, query_rows = tl.load(visible + unit * n_rows + row), query_rows + (unit * n_rows + tile * ROWS) * D
    peak, total = tl.full([ROWS], NEGATIVE, tl.float32), tl.zeros([ROWS], tl.float32)
    output = tl.zeros([ROWS, DV], tl.float32)
    for split in tl.range(0, splits, disable_licm=True):
        at = (unit * splits + split) * n_rows + row
        part_peak = tl.load(peaks + at)
        highest = tl.maximum(peak, part_peak)
        shift = tl.where(highest == NEGATIVE, 0.0, highest)
        decay, part_decay = tl.exp(peak - shift), tl.exp(part_peak - shift)
        total = total * decay + tl.load(totals + at) * part_decay
        part_output = tl.load(outputs + at[:, None] * DV + value_dim[None, :])
        output = output * decay[:, None] + part_output * part_decay[:, None]
        peak = highest
    shift = tl.where(peak == NEGATIVE, 0.0, peak)
    for split in tl.range(0, splits, disable_licm=True):
        first, last = _share(0, tl.max(n_clusters, 0), split, splits, CLUSTERS)
        first //= clusters_per_span
        for span in tl.range(first, tl.cdiv(last, clusters_per_span), disable_licm=True):
            at = ((unit * splits + split) * spans + span - first) * n_rows + row
            moved = tl.load(moves + at) * tl.exp(tl.load(move_peaks + at) - shift)
            output = _project_span(
                output, query_rows, in_tile * D, in_tile >= 0, moved * scale,
                span_key_value_cov + head * n_spans * D * DV, key_value_cov + head * n_covs * D * DV, n_clusters,
                span, clusters_per_span, clusters_per_cov, n_dim, D, DV, PRECISION,
            )  # fmt: skip
    place, mask = (head * GROUP + member + row % MEMBERS) * n_query + row // MEMBERS, row < n_query * MEMBERS
    output = output / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(result + place[:, None] * DV + value_dim[None, :], output, mask=mask[:, None])
    tl.store(lse + place, peak + tl.log(total), mask=mask)
    tl.store(thresholds + place, tl.load(limits + unit * splits * n_rows + row), mask=mask)
