"""Nothing that compiled code could read or write outside of gets through to it."""

from dataclasses import fields, replace

import pytest
import torch

from prescore import Routed, prescored_attention
from prescore.routed.compiled import call, far, nodes, sampled
from prescore.routed.compiled.buffers import GradientBuffers
from prescore.routed.layout import make_layout
from prescore.testing.inputs import attention_tensors

CONFIG = Routed(rows=4, leaf_size=16, chunk_size=32, sinks=3, exact_until=0)
ARGUMENTS = ("name", "query", "rows", "tables", "view", "seen", "results", "extra", "more")
WRONG = {
    "shorter": lambda t: t[..., :-1].contiguous(),
    "longer": lambda t: torch.cat((t, t[..., :1]), dim=-1),
    "another type": lambda t: t.to(torch.float64),
    "not side by side": lambda t: t.repeat_interleave(2, dim=-1)[..., ::2],
}


def recorded(monkeypatch, tolerance=None):
    """The calls of a forward pass and, without a tolerance, of its backward pass."""
    calls = []

    def run(*arguments):
        calls.append(dict(zip(ARGUMENTS, arguments, strict=False)))
        call.run(*arguments)

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


def variants(given):
    """Each tensor of a call by its name, and a function that puts another in its place."""
    for number, name in enumerate(("visible", "first", "stop")):
        if given["seen"][number] is not None:
            yield name, given["seen"][number], lambda t, at=number: {"seen": swapped(given["seen"], at, t)}
    for number, name in enumerate(("output", "lse", "limit", "counts")):
        yield name, given["results"][number], lambda t, at=number: {"results": swapped(given["results"], at, t)}
    yield "query", given["query"], lambda t: {"query": t}
    for holder in ("tables", "extra"):
        held = given.get(holder)
        for field in fields(held) if held is not None else ():
            own = getattr(held, field.name)
            if isinstance(own, torch.Tensor):
                yield field.name, own, lambda t, a=holder, b=held, c=field.name: {a: replace(b, **{c: t})}
    if isinstance(given.get("extra"), GradientBuffers):
        learned = given["extra"].learned
        for number, own in enumerate(learned):
            yield (
                f"learned {number}",
                own,
                lambda t, at=number: {"extra": replace(given["extra"], learned=swapped(learned, at, t))},
            )


def swapped(items, at, item):
    return (*items[:at], item, *items[at + 1 :])


@pytest.mark.parametrize("tolerance", [None, 0.3], ids=["forward and backward", "sampled"])
def test_a_wrong_tensor_is_refused(tolerance, monkeypatch):
    calls = recorded(monkeypatch, tolerance)
    names = {given["name"] for given in calls}
    both = {"prescore_routed_forward", "prescore_routed_backward"}
    assert names == (both if tolerance is None else {"prescore_routed_sampled"})
    monkeypatch.setattr(call, "call_library", lambda *_: pytest.fail("compiled code must not be called"))
    for given in calls:
        every = list(variants(given))
        assert len(every) >= (13 if given.get("extra") is None else 20)
        for _, tensor, put in every:
            for change in WRONG.values():
                with pytest.raises(ValueError, match="must"):
                    call.run(**{**given, **put(change(tensor))})


@pytest.mark.parametrize("name", ["key", "value"])
def test_rows_that_are_none_are_refused(name, monkeypatch):
    given = recorded(monkeypatch)[0]
    at = ("key", "value").index(name)
    rows = given["rows"][at]
    for wrong in (rows.double(), rows[:, :-1], rows.transpose(1, 2), rows[..., :-1], rows[:0]):
        with pytest.raises(ValueError, match="must"):
            call.run(**{**given, "rows": swapped(given["rows"], at, wrong)})


def test_samples_of_nodes_that_are_not_there_are_refused(monkeypatch):
    given = recorded(monkeypatch, 0.3)[0]
    place = given["extra"].place
    for wrong in (place + 16, place - 16):
        with pytest.raises(ValueError, match="place must lie between 0 and 15"):
            call.run(**{**given, "extra": replace(given["extra"], place=wrong)})
    with pytest.raises(ValueError, match="must"):
        call.run(**{**given, "more": given["more"] + 16})


def test_chunks_outside_of_the_keys_are_refused():
    key, value = torch.zeros(1, 70, 16), torch.zeros(1, 70, 16)
    layout = make_layout(70, 70, causal=True, config=CONFIG)
    for begin, n_chunks in ((-1, 2), (7, 2), (0, 3)):
        with pytest.raises(ValueError, match="chunks must lie within 70 keys"):
            nodes.build_nodes_compiled(key, value, layout, begin, n_chunks)
    for wrong in (key.double(), key[:, :-1], key[..., :-1], key.transpose(1, 2)):
        with pytest.raises(ValueError, match="must"):
            nodes.build_nodes_compiled(key, wrong, layout, 0, 2)
