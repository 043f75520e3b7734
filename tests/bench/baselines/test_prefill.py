"""Rules of other methods for long prompts, each against its definition: one query, key or tile at a time."""

import math

import pytest
import torch
from baseline_reference import assert_differ, assert_same, dense, inputs

from prescore.bench.baselines import BASELINES

N, SIZE = 23, 6


def dense_of(tensors, choose, **options):
    """Own chunk up to the query, and of the keys before it those in `choose(b, h, i, first)`."""
    query, key, value = tensors
    start = N - query.shape[2]
    visible = torch.zeros(2, 4, query.shape[2], N, dtype=torch.bool)
    for b in range(2):
        for h in range(4):
            for i in range(start, N):
                first = i - i % SIZE
                visible[b, h, i - start, first : i + 1] = True
                visible[b, h, i - start, [j for j in choose(b, h, i, first) if j < first]] = True
    return dense(query, key, value, visible)


def best(scores, count):
    """Indices of the highest of a list, the earlier of equal ones."""
    return sorted(range(len(scores)), key=lambda j: (-scores[j], j))[:count]


def kept(scores, first_kept):
    """Scores of pages, that of the first above all others."""
    return [float("inf"), *scores[1:]] if first_kept and scores else scores


@pytest.mark.parametrize("n_query", [23, 9])
@pytest.mark.parametrize("first_kept", [True, False])
@pytest.mark.parametrize(("budget", "page_size"), [(4, 2), (7, 3), (8, 4), (3, 4)])
def test_quest_reads_pages_by_the_largest_logit_that_they_could_hold(n_query, budget, page_size, first_kept):
    query, key, _ = tensors = inputs(n_query=n_query)

    def choose(b, h, i, first):
        own, keys = query[b, h, i - N + n_query], key[b, h // 2, :first]
        bounds = (
            [
                sum(max(float(x * page[:, d].min()), float(x * page[:, d].max())) for d, x in enumerate(own))
                for page in keys.split(page_size)
            ]
            if first
            else []
        )
        return [
            page * page_size + j
            for page in best(kept(bounds, first_kept), budget // page_size)
            for j in range(page_size)
        ]

    options = {"budget": budget, "page_size": page_size, "keep_first": first_kept, "chunk_size": SIZE}
    got = BASELINES["quest"](*tensors, **options, is_causal=True)
    assert_same(got, dense_of(tensors, choose))


def softmax_rows(query, key, rows, n_query):
    """Causal softmax weights of one head's queries at positions `rows` over earlier keys; missing rows are 0."""
    weights = torch.zeros(len(rows), N, dtype=torch.float64)
    for place, i in enumerate(rows):
        if i >= N - n_query and i >= 0:
            weights[place, : i + 1] = (key[: i + 1] @ query[i - N + n_query] * key.shape[1] ** -0.5).softmax(0)
    return weights


@pytest.mark.parametrize("n_query", [23, 16])
@pytest.mark.parametrize(("budget", "window", "kernel_size"), [(5, 3, 1), (4, 2, 3), (2, 3, 5), (30, 2, 3)])
def test_snapkv_keeps_what_the_window_before_a_chunk_weighs_most(n_query, budget, window, kernel_size):
    query, key, _ = tensors = inputs(n_query=n_query)

    def choose(b, h, i, first):
        voters = range(max(0, first - window), first)
        heads = (h // 2 * 2, h // 2 * 2 + 1)
        votes = sum(softmax_rows(query[b, head], key[b, h // 2], voters, n_query).sum(0) for head in heads)[:first]
        half = kernel_size // 2
        pooled = [
            float("inf") if j in voters else float(votes[max(0, j - half) : j + half + 1].max())
            for j in range(first)
        ]
        # of equal votes, as among neighbours, the later key is kept
        return sorted(range(first), key=lambda j: (-pooled[j], -j))[:budget]

    options = {"budget": budget, "window": window, "kernel_size": kernel_size, "chunk_size": SIZE}
    assert_same(BASELINES["snapkv"](*tensors, **options, is_causal=True), dense_of(tensors, choose))


@pytest.mark.parametrize("n_query", [23, 9])
@pytest.mark.parametrize(("budget", "window", "sinks"), [(6, 4, 1), (5, 1, 0), (9, 30, 2)])
def test_minference_reads_the_columns_and_diagonals_of_the_last_queries(n_query, budget, window, sinks):
    query, key, _ = tensors = inputs(n_query=n_query)

    def choose(b, h, i, first):
        rows = range(N - window, N)
        weights = softmax_rows(query[b, h], key[b, h // 2], rows, n_query)
        columns = [float("inf") if j < sinks else float(weights[:, j].sum()) for j in range(N)]
        diagonals = [
            sum(float(weights[place, row - o]) for place, row in enumerate(rows) if row - o >= 0) for o in range(N)
        ]
        slashes = best(diagonals, budget // 2)
        return {*best(columns, budget - budget // 2), *(i - o for o in slashes if o <= i)}

    options = {"budget": budget, "window": window, "sinks": sinks, "chunk_size": SIZE}
    assert_same(BASELINES["minference"](*tensors, **options, is_causal=True), dense_of(tensors, choose))


def heavier(weights):
    """The share of the weight that is heavier than each."""
    ordered = best(weights, len(weights))
    return [
        sum(weights[j] for j in ordered[: ordered.index(place)]) / sum(weights) for place in range(len(weights))
    ]


@pytest.mark.parametrize("n_query", [23, 14])
@pytest.mark.parametrize("tau", [0.0, 0.25, 1.0])
@pytest.mark.parametrize(("budget", "size"), [(5, 3), (4, 2), (7, 3), (1, 2)])
def test_flexprefill_reads_blocks_up_to_one_share_of_the_weight(n_query, tau, budget, size):
    """No head is query-aware with the least `tau`, some with the middle one, all with the largest."""
    query, key, _ = tensors = inputs(n_query=n_query)
    scale, start, n_blocks = 8**-0.5, N - n_query, -(-N // size)
    blocks = [range(block * size, min(N, (block + 1) * size)) for block in range(n_blocks)]
    asked = [block for block in range(n_blocks) if blocks[block][-1] >= start]
    read, n_aware = [], 0
    for b in range(2):
        scores, n_read = {}, 0
        for h in range(4):
            means = torch.stack([key[b, h // 2, list(block)].mean(0) for block in blocks])
            weights = softmax_rows(query[b, h], key[b, h // 2], range(N - size, N), n_query)
            columns = [float(weights[:, list(block)].sum()) / size for block in blocks]
            slashes = [0.0] * n_blocks
            for place in range(size):
                for j in range(N - size + place + 1):
                    slashes[(N - size + place - j) // size] += float(weights[place, j]) / size
            estimate = (means @ query[b, h, -size:].mean(0) * scale).softmax(0).tolist()
            middle = [(p + q) / 2 for p, q in zip(estimate, columns, strict=True)]
            divergence = sum(
                p * math.log(p / m) / 2
                for row in (estimate, columns)
                for p, m in zip(row, middle, strict=True)
                if p
            )
            vertical, slash = heavier(columns), heavier(slashes)
            shares = {(i, j): min(vertical[j], slash[i - j]) for i in asked for j in range(i + 1)}
            if divergence**0.5 < tau:
                n_aware += 1
                rows = {i: query[b, h, [p - start for p in blocks[i] if p >= start]].mean(0) for i in asked}
                flat = {
                    (i, j): weight
                    for i in asked
                    for j, weight in enumerate((means[: i + 1] @ rows[i] * scale).softmax(0).tolist())
                }
                shares = dict(zip(flat, heavier(list(flat.values())), strict=True))
            for (i, j), share in shares.items():
                if j < i * size // SIZE * SIZE // size:
                    scores[h, i, j] = -1.0 if j == 0 else share
            n_read += sum(min(budget // size, i * size // SIZE * SIZE // size) for i in asked)
        read.append(sorted(scores, key=lambda place: (scores[place], place))[:n_read])
    assert n_aware in {0.0: [0], 0.25: range(1, 8), 1.0: [8]}[tau]

    def choose(b, h, i, first):
        return [p for head, row, block in read[b] if (head, row) == (h, i // size) for p in blocks[block]]

    options = {"budget": budget, "tau": tau, "block_size": size, "chunk_size": SIZE}
    assert_same(BASELINES["flexprefill"](*tensors, **options, is_causal=True), dense_of(tensors, choose))


@pytest.mark.parametrize("n_query", [23, 11])
@pytest.mark.parametrize("first_kept", [True, False])
@pytest.mark.parametrize(("budget", "block_size", "stride"), [(4, 4, 2), (6, 3, 3), (2, 2, 1), (8, 4, 4)])
def test_xattention_reads_blocks_by_their_antidiagonals(n_query, budget, block_size, stride, first_kept):
    query, key, _ = tensors = inputs(n_query=n_query)

    def row(tensor, position, n_rows):
        return tensor[position - N + n_rows] if N - n_rows <= position < N else torch.zeros(8, dtype=torch.float64)

    def choose(b, h, i, first):
        keys, begin = key[b, h // 2], i - (i - first) % block_size
        n_past = -(-first // block_size) * block_size // stride
        sums = [0.0] * (n_past * stride // block_size)
        for tile in range(begin, begin + block_size, stride):
            if not any(N - n_query <= p < min(N, first + SIZE) for p in range(tile, tile + stride)):
                continue
            past = [[p if p < first else N for p in range(s * stride, (s + 1) * stride)] for s in range(n_past)]
            own = [list(range(t, t + stride)) for t in range(first, tile + 1, stride)]
            # tiles of the chunk hold no key of the next one
            own = [[p if p < first + SIZE else N for p in places] for places in own]
            real = [
                places
                for places in past + own
                if any(p < N for p in places) and (places in past or any(p >= N - n_query for p in places))
            ]
            logits = torch.stack(
                [
                    sum(
                        row(
                            query[b, h],
                            tile + stride - 1 - d if tile + stride - 1 - d < first + SIZE else N,
                            n_query,
                        )
                        @ row(keys, p, N)
                        for d, p in enumerate(places)
                    )
                    for places in real
                ]
            ) * (8**-0.5 / stride)
            for places, weight in zip(real, logits.softmax(0).tolist(), strict=True):
                if places in past:
                    sums[past.index(places) * stride // block_size] += weight
        return [
            block * block_size + j
            for block in best(kept(sums, first_kept), budget // block_size)
            for j in range(block_size)
        ]

    options = {"budget": budget, "block_size": block_size, "stride": stride, "keep_first": first_kept}
    options["chunk_size"] = SIZE
    assert_same(BASELINES["xattention"](*tensors, **options, is_causal=True), dense_of(tensors, choose))


SETTINGS = {
    "quest": {"budget": 4, "page_size": 2},
    "snapkv": {"budget": 4, "window": 2, "kernel_size": 1},
    "minference": {"budget": 6, "window": 3, "sinks": 0},
    "flexprefill": {"budget": 6, "block_size": 3},
    "xattention": {"budget": 6, "block_size": 3, "stride": 1},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_what_later_tokens_change(name):
    """Nothing in Quest and SnapKV, the own block in XAttention, all earlier rows in the others."""
    before = inputs()
    after = [tensor.clone() for tensor in before]
    for tensor in after:
        tensor[:, :, 20:] = tensor[:, :, 20:] * 9 + 1
    options = {**SETTINGS[name], "chunk_size": SIZE, "is_causal": True}
    left, right = ([t[:, :, :20] for t in BASELINES[name](*tensors, **options)] for tensors in (before, after))
    if name in ("quest", "snapkv"):
        assert_same(left, right)
    else:
        assert_differ(left, right)
    if name == "xattention":
        assert_same([t[:, :, :18] for t in left], [t[:, :, :18] for t in right])


@pytest.mark.parametrize("name", SETTINGS)
def test_only_quest_reads_a_prompt_in_chunks_as_a_whole(name):
    tensors = inputs()
    options = {**SETTINGS[name], "chunk_size": SIZE, "is_causal": True}
    whole = BASELINES[name](*tensors, **options)
    first = BASELINES[name](*(t[:, :, :14] for t in tensors), **options)
    last = BASELINES[name](tensors[0][:, :, 14:], *tensors[1:], **options)
    pieces = [torch.cat(pair, 2) for pair in zip(first, last, strict=True)]
    (assert_same if name == "quest" else assert_differ)(whole, pieces)
