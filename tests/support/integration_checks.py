"""What every adapter must keep, whatever its library."""

import pytest
import torch
from tiny_models import leftovers

import prescore


def check_undo_in_any_order(model, run, first, second, layers):
    """The newest application acts, in all layers, and each undo takes back its own; a second one does nothing."""
    before = run(model)
    with prescore.apply(model, first):
        of_first = run(model)
    with prescore.apply(model, second, layers=layers):
        of_second = run(model)
    assert not torch.allclose(of_first, of_second, atol=1e-6)
    for is_first_undone in (True, False):
        both = [prescore.apply(model, first), prescore.apply(model, second, layers=layers)]
        assert torch.equal(run(model), of_second)
        undone, left = both if is_first_undone else reversed(both)
        for _ in range(2):
            undone.undo()
            assert torch.equal(run(model), of_second if is_first_undone else of_first)
        left.undo()
        assert torch.equal(run(model), before)
        assert not leftovers(model)
    with pytest.raises(RuntimeError, match="inside"), prescore.apply(model, first):
        raise RuntimeError("inside")
    assert not leftovers(model)


def check_dropout(model, run, config):
    """Attention dropout in training is drawn from torch's generator; in evaluation nothing global is read."""
    with prescore.apply(model.eval(), config):
        expected = run(model)
        model.train()
        torch.manual_seed(2)
        first, second = run(model), run(model)
        torch.manual_seed(2)
        assert torch.equal(run(model), first)
        assert not torch.allclose(first, second)
        assert not torch.allclose(first, expected)
        model.eval()
        state = torch.random.get_rng_state()
        assert torch.equal(run(model), expected)
        assert torch.equal(torch.random.get_rng_state(), state)
