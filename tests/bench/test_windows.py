"""Windows by native code are those of a mask, in every shape that the comparisons use."""

import pytest
import torch
from oracles.inputs import attention_tensors
from routed_checks import needs_native
from torch.nn.functional import scaled_dot_product_attention

from prescore.bench import methods, windows
from prescore.bench.methods import Baseline, Local

CONFIGS = [
    *(Local(32, previous, sinks) for previous in (False, True) for sinks in (0, 4, 40)),
    *(Baseline("streaming", {"window": window, "sinks": sinks}) for window in (1, 50, 999) for sinks in (0, 4)),
]


def wanted(config, query, key, value, scale):
    """From a dense mask in float64."""
    position = torch.arange(query.shape[2])
    if isinstance(config, Local):
        start = position - position % 32 - (32 if config.previous_chunk else 0)
        sinks = config.sinks
    else:
        start, sinks = position - config.settings["window"] + 1, config.settings["sinks"]
    seen = (position >= start[:, None]) | (position < sinks)
    seen &= position <= position[:, None]
    query, key, value = (tensor.double() for tensor in (query, key, value))
    return scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale, enable_gqa=True)


@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_native), False])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_window_is_its_mask(config, native, monkeypatch):
    query, key, value = attention_tensors(
        heads=4, kv_heads=2, n_query=200, n_keys=200, dim=16, dtype=torch.float32
    )
    if native:
        monkeypatch.setattr(methods, "exact_attention", None)  # nothing falls back in silence
        monkeypatch.setattr(methods, "get_baseline", None)
    else:
        monkeypatch.setattr(windows.native, "can_run", lambda *_: False)
    for scale in (None, 0.3):
        output = config.attend(query, key, value, scale=scale, seed=0)
        torch.testing.assert_close(output.double(), wanted(config, query, key, value, scale), atol=2e-5, rtol=0)


@needs_native
def test_gradients_go_through_torch():
    query, key, value = attention_tensors(heads=2, n_query=64, n_keys=64, dim=16, dtype=torch.float32)
    query.requires_grad_()
    assert (
        windows.attend_window(query, key, value, torch.zeros(64, dtype=torch.int32), sinks=0, scale=None) is None
    )
    output = Local(32).attend(query, key, value, scale=None, seed=0)
    output.sum().backward()
    assert query.grad.abs().max() > 0
