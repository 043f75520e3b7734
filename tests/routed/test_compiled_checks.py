"""Nothing that compiled code could read or write outside of gets through to it."""

from dataclasses import fields, replace

import pytest
import torch
from oracles.inputs import attention_tensors

from prescore import Routed, prescored_attention
from prescore.routed import native as call
from prescore.routed import native as far
from prescore.routed import native as nodes
from prescore.routed import native as sampled
from prescore.routed.layout import make_layout
from prescore.routed.native import GradientBuffers

CONFIG = Routed(min_weight=1 / 8, cluster_size=16, chunk_size=32, sinks=3, exact_until=0)
WRONG = {
    "shorter": lambda t: t[..., :-1].contiguous(),
    "longer": lambda t: torch.cat((t, t[..., :1]), dim=-1),
    "another type": lambda t: t.to(torch.float64),
    "not side by side": lambda t: t.repeat_interleave(2, dim=-1)[..., ::2],
}


def records_gradients(monkeypatch, tolerance=None):
    """The calls of a forward pass and, without a tolerance, of its backward pass: name, problem, extra."""
    calls = []

    def run(name, problem, extra=None):
        calls.append((name, problem, extra))
        call.run(name, problem, extra)

    for module in (far, sampled):
        monkeypatch.setattr(module, "run", run)
    tensors = attention_tensors(heads=2, kv_heads=1, n_keys=150, dim=16, value_dim=32, dtype=torch.float32)
    tensors = [t.requires_grad_(tolerance is None) for t in tensors]
    output = prescored_attention(*tensors, CONFIG.replace(tolerance=tolerance), is_causal=True)
    if tolerance is None:
        output.sum().backward()
    if not calls:
        pytest.skip("no compiled code is built")
    return calls


def variants(problem, extra):
    """Each tensor of a call by its name, and a function that puts another in its place."""
    for name in ("output", "lse", "limit", "counts"):
        yield name, getattr(problem, name), lambda t, a=name: (replace(problem, **{a: t}), extra)
    for name in ("visible", "first", "stop") if problem.reads_near else ("visible",):
        own = getattr(problem.view, name)
        yield name, own, lambda t, a=name: (replace(problem, view=replace(problem.view, **{a: t})), extra)
    for name, own in tensors_of(problem.tables):
        yield name, own, lambda t, a=name: (replace(problem, tables=replace(problem.tables, **{a: t})), extra)
    for name, own in tensors_of(extra):
        yield name, own, lambda t, a=name: (problem, replace(extra, **{a: t}))
    if isinstance(extra, GradientBuffers):
        for number, own in enumerate(extra.learned):
            yield (
                f"learned {number}",
                own,
                lambda t, at=number: (problem, replace(extra, learned=swapped(extra.learned, at, t))),
            )


def tensors_of(held):
    found = [(f.name, getattr(held, f.name)) for f in fields(held)] if held is not None else []
    return [(name, own) for name, own in found if isinstance(own, torch.Tensor)]


def swapped(items, at, item):
    return (*items[:at], item, *items[at + 1 :])


@pytest.mark.parametrize("tolerance", [None, 0.3], ids=["forward and backward", "sampled"])
def test_a_wrong_tensor_is_refused(tolerance, monkeypatch):
    calls = records_gradients(monkeypatch, tolerance)
    names = {name for name, _, _ in calls}
    both = {"prescore_routed_forward", "prescore_routed_backward"}
    assert names == (both if tolerance is None else {"prescore_routed_near", "prescore_routed_sampled"})
    monkeypatch.setattr(call, "call_library", lambda *_: pytest.fail("compiled code must not be called"))
    for name, problem, extra in calls:
        every = list(variants(problem, extra))
        assert len(every) >= (13 if extra is None else 20)
        for _, tensor, put in every:
            for change in WRONG.values():
                with pytest.raises(ValueError, match="must"):
                    call.run(name, *put(change(tensor)))


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_rows_that_are_none_are_refused(name, monkeypatch):
    function, problem, extra = records_gradients(monkeypatch)[0]
    rows = getattr(problem, name)
    for wrong in (rows.double(), rows[:, :-1], rows.transpose(1, 2), rows[..., :-1], rows[:0]):
        with pytest.raises(ValueError, match="must"):
            call.run(function, replace(problem, **{name: wrong}), extra)


def test_samples_of_nodes_that_are_not_there_are_refused(monkeypatch):
    name, problem, extra = records_gradients(monkeypatch, 0.3)[1]
    place = extra.place
    for wrong in (place + 16, place - 16):
        with pytest.raises(ValueError, match="place must lie between 0 and 15"):
            call.run(name, problem, replace(extra, place=wrong))
    fewer = replace(extra, values=extra.values[:, :-16].contiguous())
    with pytest.raises(ValueError, match="must"):
        call.run(name, problem, fewer)


def test_chunks_outside_of_the_keys_are_refused():
    key, value = torch.zeros(1, 70, 16), torch.zeros(1, 70, 16)
    layout = make_layout(70, 70, causal=True, config=CONFIG)
    for begin, n_chunks in ((-1, 2), (7, 2), (0, 3)):
        with pytest.raises(ValueError, match="chunks must lie within 70 keys"):
            nodes.build_nodes_compiled(key, value, layout, begin, n_chunks)
    for wrong in (key.double(), key[:, :-1], key[..., :-1], key.transpose(1, 2)):
        with pytest.raises(ValueError, match="must"):
            nodes.build_nodes_compiled(key, wrong, layout, 0, 2)
