"""Calls with one thing wrong."""

import math
import random

import torch
from fuzz_terms import need

import prescore


def bad_input(case):
    """One thing wrong: a sentence of an allowed kind, and the inputs as they were."""
    draw = random.Random(f"{case.seed} bad")
    tensors, options = list(case.tensors()), {**case.options(), "key_padding_mask": case.padding()}
    need(all(t.numel() for t in tensors))
    number = draw.randrange(3)
    spoilt = draw.choice(
        [
            lambda t: t[0],
            lambda t: t[None],
            lambda t: t.int(),
            lambda t: t[..., :0],
            lambda t: t.to("meta"),
            lambda t: t.to_sparse(),
            lambda t: t.tolist(),
            lambda t: None,
            lambda t: t.cfloat(),
            lambda t: torch.cat((t, t), 0)[:0],
            lambda t: t[:, :0],
        ]
    )
    wrong = draw.choice(["tensor", "tensor", "option", "not a number"])
    if wrong == "tensor":
        tensors[number] = spoilt(tensors[number])
    elif wrong == "not a number":
        number = max(1, number)
        tensors[number][0, 0, -1, 0] = draw.choice([math.nan, math.inf, -math.inf])
        options["key_padding_mask"] = None
    else:
        name = draw.choice(
            ["is_causal", "scale", "dropout_p", "backend", "generator", "selection", "key_padding_mask"]
        )
        options[name] = draw.choice(["yes", -1.5j, [], object(), math.nan, 10**400, torch.ones(2), {}])
    before = [t.clone() if isinstance(t, torch.Tensor) and not t.is_meta else None for t in tensors]
    said = _refusal(tensors, case.config, options)
    if said is None:
        assert wrong != "not a number", "a key or value that is no number must be refused"
    else:
        assert said, "an error must say something"
        assert "\n" not in said, f"an error must be one sentence, got {said}"
        assert len(said) < 600, f"an error must be short, got {len(said)} characters"
    for tensor, copied in zip(tensors, before, strict=True):
        if copied is not None and copied.layout == torch.strided:
            assert torch.equal(tensor.nan_to_num(), copied.nan_to_num()), "inputs must not change"


def _refusal(tensors, config, options):
    """What an allowed error says; None when there was none."""
    try:
        prescore.prescored_attention(*tensors, config, **options)
    except (ValueError, TypeError) as error:  # Unsupported is a ValueError
        return str(error)
    return None
