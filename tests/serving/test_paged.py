"""Requests over a paged cache, in any chunks and batches, get the rows of one contiguous call."""

import pytest
import torch
from routed_checks import needs_native

from prescore import Routed, prescored_attention, serving
from prescore.routed import native
from prescore.serving.paged import IDLE_STEPS, PagedIndex

CONFIG = Routed(exact_until=600, chunk_size=256)
BLOCK, SCALE, LAYERS = 128, 0.125, ("first", "second")


class Server:
    """Blocks, block tables and the keys of requests, as a server has them; `pool` are blocks in use order."""

    def __init__(self, *, reuse=True, n_blocks=40, dtype=torch.float32):
        self.paged = PagedIndex(CONFIG, BLOCK, reuse=reuse)
        self.cache = {name: torch.full((2, n_blocks, 2, BLOCK, 32), torch.nan, dtype=dtype) for name in LAYERS}
        self.free = torch.randperm(n_blocks, generator=torch.Generator().manual_seed(1)).tolist()

    def step(self, requests):
        """Each request is `(table, text, n_before, n_new)`; returns the outputs of each, one per layer."""
        for table, _, before, new in requests:
            while len(table) * BLOCK < before + new:
                table.append(self.free.pop())
        n_keys = [before + new for *_, before, new in requests]
        begun = self.paged.begin([table for table, *_ in requests], n_keys, [new for *_, new in requests])
        results = []
        for (table, text, before, new), request in zip(requests, begun, strict=True):
            outputs = []
            for name in LAYERS:
                query, key, value = (t[0, :, before : before + new] for t in text[name])
                for place in range(new):
                    block, offset = table[(before + place) // BLOCK], (before + place) % BLOCK
                    self.cache[name][0, block, :, offset] = key[:, place]
                    self.cache[name][1, block, :, offset] = value[:, place]
                if request is not None:
                    cache = (self.cache[name][0], self.cache[name][1])
                    rows = query.transpose(0, 1)
                    outputs.append(self.paged.attend(name, request, rows, cache, SCALE).transpose(0, 1))
            results.append(outputs)
        return results


def make_text(seed, length=1500, prefix=None, shared=0, dtype=torch.float32):
    """Queries, keys and values of each layer; the first `shared` tokens are those of `prefix`."""
    source = torch.Generator().manual_seed(seed)
    text = {}
    for name in LAYERS:
        own = [torch.randn(1, heads, length, 32, generator=source).to(dtype) for heads in (4, 2, 2)]
        for mine, other in zip(own, prefix[name] if prefix else (), strict=False):
            mine[:, :, :shared] = other[:, :, :shared]
        text[name] = own
    return text


def check(outputs, text, before, new):
    for name, got in zip(LAYERS, outputs, strict=True):
        query, key, value = (t[:, :, : before + new] for t in text[name])
        wanted = prescored_attention(query, key, value, config=CONFIG, is_causal=True, scale=SCALE)[0, :, before:]
        budget = 2e-5 if query.dtype == torch.float32 else 0.02
        off = (got.double() - wanted.double()).abs().amax(-1) > budget
        assert int(off.sum()) <= 2  # rounding may move a key across the threshold


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunks", [[1500], [512, 512, 450, 1, 1, 24], [700, 1, 1, 300, 200, 1, 3]])
def test_chunks_of_a_prompt_and_steps_equal_the_whole_call(chunks, dtype):
    server, text, table, before = Server(dtype=dtype), make_text(0, dtype=dtype), [], 0
    for new in chunks:
        (outputs,) = server.step([(table, text, before, new)])
        assert bool(outputs) == (before + new > CONFIG.sinks + 2 * CONFIG.chunk_size and before + new > 600)
        if outputs:
            check(outputs, text, before, new)
        before += new


@needs_native
def test_requests_of_different_lengths_share_a_batch():
    server, texts, tables = Server(), [make_text(seed) for seed in range(3)], [[], [], []]
    before = [0, 0, 0]
    for new in ([800, 100, 0], [300, 1, 700], [1, 1, 400], [1, 600, 1], [1, 1, 1]):
        batch = [row for row in range(3) if new[row]]
        results = server.step([(tables[row], texts[row], before[row], new[row]) for row in batch])
        for row, outputs in zip(batch, results, strict=True):
            assert bool(outputs) == (before[row] + new[row] > 600)
            if outputs:
                check(outputs, texts[row], before[row], new[row])
            before[row] += new[row]


@needs_native
def test_a_cached_prefix_uses_the_key_index_again(monkeypatch):
    server, first = Server(), make_text(0)
    table = []
    server.step([(table, first, 0, 1400)])
    assert [key.number for key in server.paged.chunks] == [0, 1, 2, 3]
    built, build = [], native.build_index
    monkeypatch.setattr(native, "build_index", lambda *given: built.append(given[3:]) or build(*given))
    second = make_text(1, prefix=first, shared=8 * BLOCK)
    shared = table[:8]
    (outputs,) = server.step([(shared, second, 8 * BLOCK, 400)])
    # chunks 0 to 2 end within the shared blocks; the fourth is the second request's own, in both layers
    assert built == [(CONFIG.sinks + 3 * CONFIG.chunk_size, 1)] * 2
    monkeypatch.undo()
    check(outputs, second, 8 * BLOCK, 400)


@needs_native
def test_an_overwritten_block_is_forgotten():
    server, first, table = Server(), make_text(0), []
    server.step([(table, first, 0, 1400)])
    assert len(server.paged.chunks) == 4
    server.free.extend(table[5:])  # the request ends; another one gets its last blocks
    second, own = make_text(1), []
    server.step([(own, second, 0, 1300)])
    assert set(own) & set(table[5:])
    numbers = sorted(key.number for key in server.paged.chunks)
    assert numbers == [0, 0, 1, 1, 2, 3]
    # a third request continues the first five blocks, and then other ones
    third = make_text(2, prefix=first, shared=5 * BLOCK)
    again = table[:5]
    (outputs,) = server.step([(again, third, 5 * BLOCK, 600)])
    check(outputs, third, 5 * BLOCK, 600)


@needs_native
def test_rows_of_an_overwritten_block_are_read_again():
    server, first, table = Server(), make_text(0), []
    server.step([(table, first, 0, 1400)])
    server.free.extend(reversed(table[4:]))  # the next requests get the same blocks in the same order
    short, own = make_text(1, prefix=first, shared=4 * BLOCK), table[:4]
    assert server.step([(own, short, 4 * BLOCK, 88)]) == [[]]  # too short to route, but it writes a block
    (outputs,) = server.step([(own, short, 4 * BLOCK + 88, 300)])
    assert own == table[: len(own)]
    check(outputs, short, 4 * BLOCK + 88, 300)


@needs_native
@pytest.mark.parametrize("back", [3, 40, 300, 800])
def test_tokens_taken_back_are_read_again(back):
    server, text, table = Server(), make_text(0), []
    server.step([(table, text, 0, 1200)])
    other = make_text(1, prefix=text, shared=1200 - back)
    (outputs,) = server.step([(table, other, 1200 - back, back + 2)])
    check(outputs, other, 1200 - back, back + 2)
    (outputs,) = server.step([(table, other, 1202, 1)])
    check(outputs, other, 1202, 1)


@needs_native
@pytest.mark.parametrize("reuse", [False, True])
def test_idle_sequences_are_dropped_and_read_again(reuse):
    server, text, table, other = Server(reuse=reuse), make_text(0), [], []
    server.step([(table, text, 0, 1200)])
    for step in range(IDLE_STEPS + 1):
        server.step([(other, make_text(1), step, 1)])
    assert not server.paged.sequences
    assert len(server.paged.chunks) == (3 if reuse else 0)
    (outputs,) = server.step([(table, text, 1200, 1)])
    check(outputs, text, 1200, 1)


def test_a_dummy_batch_does_not_route():
    assert PagedIndex(CONFIG, BLOCK, reuse=True).begin([[0] * 12], [1500], [1]) == [None]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("", None), ("0", None), ("1", Routed()), ('{"min_weight": 0.01}', Routed(min_weight=0.01))],
)
def test_the_variable_asks_for_a_configuration(monkeypatch, text, wanted):
    monkeypatch.setenv(serving.VARIABLE, text)
    assert serving.vllm_config() == wanted


@pytest.mark.parametrize("text", ["yes", "[1]", '{"min_weight": 2}', '{"weight": 1}'])
def test_a_wrong_variable_is_refused(monkeypatch, text):
    monkeypatch.setenv(serving.VARIABLE, text)
    with pytest.raises((ValueError, TypeError), match=r"must|unknown|unexpected"):
        serving.vllm_config()
