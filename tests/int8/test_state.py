"""int8 layers never leave a model raw: saving, loading, tying, resizing, merging, hooks, fast paths of torch."""

import copy
import pickle

import pytest
import torch
from tiny_models import VOCABULARY, prompts, tiny
from torch import nn
from torch.nn.utils import prune

from prescore.errors import Unsupported
from prescore.int8.linear import Int8Linear, use_int8_weights


def logits(model, ids):
    with torch.no_grad():
        return model(ids).logits.float()


def close(got, wanted):
    """Up to what rounding of weights costs; raw numbers would be wrong by three orders of magnitude."""
    return float((got - wanted).detach().norm()) < 0.15 * float(wanted.detach().norm())


@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_model_is_an_ordinary_one_and_gives_the_same(tmp_path, tied):
    model = tiny("Llama", tie_word_embeddings=tied).to(torch.bfloat16)
    ids, _ = prompts()
    wanted, kind = logits(model, ids), type(model)
    use_int8_weights(model)
    rounded = logits(model, ids)
    model.save_pretrained(tmp_path)
    loaded, report = kind.from_pretrained(tmp_path, dtype=torch.bfloat16, output_loading_info=True)
    assert not any(report.values())
    assert not any(isinstance(module, Int8Linear) for module in loaded.modules())
    assert close(logits(loaded, ids), wanted)
    assert close(logits(use_int8_weights(loaded), ids), rounded)


def test_a_state_dict_is_that_of_the_model_before():
    model = tiny("Qwen2").to(torch.bfloat16)
    before = copy.deepcopy(model)
    ids, _ = prompts()
    use_int8_weights(model)
    state = model.state_dict()
    assert {name: tensor.dtype for name, tensor in state.items()} == {
        name: tensor.dtype for name, tensor in before.state_dict().items()
    }
    assert all(type(tensor) in (torch.Tensor, nn.Parameter) for tensor in state.values())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for module in model.modules():
            if isinstance(module, Int8Linear):
                module.weight = torch.zeros(module.out_features, module.in_features)
    for strict in (True, False):
        found = model.load_state_dict(before.state_dict(), strict=strict)
        assert not found.missing_keys
        assert not found.unexpected_keys
    assert close(logits(model, ids), logits(before, ids))
    layer = Int8Linear(nn.Linear(4, 8, bias=False))
    with pytest.raises(RuntimeError, match=r"weight must be \(8, 4\), got \(4, 4\)"):
        layer.load_state_dict({"weight": torch.ones(4, 4)})
    with pytest.raises(RuntimeError, match="Missing key"):
        layer.load_state_dict({})
    for twice in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(twice, ids), logits(model, ids))


def test_a_tied_output_layer_follows_the_embedding():
    model = use_int8_weights(tiny("Llama", tie_word_embeddings=True).to(torch.bfloat16))
    ids, _ = prompts()
    wanted = logits(model, ids)
    model.tie_weights()
    assert isinstance(model.lm_head, Int8Linear)
    assert torch.equal(logits(model, ids), wanted)
    model.get_input_embeddings().weight.data.mul_(2)
    model.tie_weights()
    assert close(model.lm_head.weight.float(), model.get_input_embeddings().weight.float())


@pytest.mark.parametrize("tied", [False, True])
def test_token_embeddings_are_resized(tied):
    model = use_int8_weights(tiny("Llama", tie_word_embeddings=tied).to(torch.bfloat16))
    ids, _ = prompts()
    wanted = logits(model, ids)
    model.resize_token_embeddings(VOCABULARY + 7)
    got = logits(model, ids)
    assert got.shape[-1] == VOCABULARY + 7
    assert close(got[..., :VOCABULARY], wanted)


WRITES = {
    "merge": lambda layer: setattr(layer.weight, "data", layer.weight.data + 1),
    "merge in place": lambda layer: layer.weight.data.add_(1),
    "augmented": lambda layer: layer.weight.data.__iadd__(1),
    "initialise": lambda layer: nn.init.normal_(layer.weight),
    "copy": lambda layer: layer.weight.copy_(torch.ones(8, 4)),
    "place": lambda layer: layer.weight.__setitem__(0, 1.0),
    "view": lambda layer: layer.weight[0].zero_(),
    "result": lambda layer: torch.add(torch.ones(8, 4), 1.0, out=layer.weight),
}


@pytest.mark.parametrize("write", WRITES)
@torch.no_grad()
def test_writing_to_a_weight_is_refused(write):
    layer = Int8Linear(nn.Linear(4, 8))
    before = layer.weight.clone()
    with pytest.raises(Unsupported, match="writing to an int8 weight cannot run: it is a copy"):
        WRITES[write](layer)
    assert torch.equal(layer.weight, before)
    before.add_(1)  # a copy is the caller's
    layer.weight = nn.Parameter(before)
    assert torch.allclose(layer.weight, before, atol=0.02)


@pytest.mark.parametrize("wrong", [torch.ones(8, 5), torch.ones(8), torch.ones(8, 4, dtype=torch.int8)])
def test_a_wrong_weight_is_refused(wrong):
    layer = Int8Linear(nn.Linear(4, 8))
    with pytest.raises(ValueError, match=r"weight must be floating \[outputs, 4\], got \("):
        layer.weight = wrong


@torch.no_grad()
def test_layers_of_torch_that_read_weights_themselves_give_the_same():
    block = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True).eval()
    model = nn.TransformerEncoder(block, 2).eval()
    inputs = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(0))
    wanted = model(inputs)
    use_int8_weights(model)
    assert sum(isinstance(module, Int8Linear) for module in model.modules()) == 4
    assert close(model(inputs), wanted)


@torch.no_grad()
def test_hooks_go_on():
    model, seen = nn.Sequential(nn.Linear(4, 8)), []
    handles = [
        model[0].register_forward_hook(lambda module, args, output: seen.append("after")),
        model[0].register_forward_pre_hook(lambda module, args, kwargs: seen.append("before"), with_kwargs=True),
    ]
    use_int8_weights(model)(torch.ones(1, 4))
    assert seen == ["before", "after"]
    for handle in handles:
        handle.remove()
    model(torch.ones(1, 4))
    assert len(seen) == 2


def test_a_layer_of_two_names_is_converted_once():
    model = nn.Module()
    model.first = model.second = nn.Linear(4, 8)
    model.inner = nn.Sequential(model.first)
    use_int8_weights(model)
    assert isinstance(model.first, Int8Linear)
    assert model.first is model.second is model.inner[0]


def test_what_cannot_be_converted_is_refused():
    with pytest.raises(ValueError, match=r"model must hold linear layers, got a Linear alone"):
        use_int8_weights(nn.Linear(4, 8))
    offloaded = nn.Sequential(nn.Linear(4, 8))
    offloaded[0].forward = lambda inputs: inputs
    with pytest.raises(Unsupported, match="the forward of a layer was replaced"):
        use_int8_weights(offloaded)
    pruned = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8))
    prune.random_unstructured(pruned[1], "weight", 0.5)
    with pytest.raises(Unsupported, match="the weight of 1 is computed at every call: remove weight norm"):
        use_int8_weights(pruned)
    assert type(pruned[0]) is nn.Linear
