"""Which tokens of a real text pre-scoring keeps, beside those that the model truly attends to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from prescore.api.scoring import select_by
from prescore.config import Selected
from prescore.evaluation.language.model import LanguageModel
from prescore.evaluation.language.perplexity import Window, described
from prescore.integrations.attend import Situation
from prescore.integrations.observe import observe
from prescore.records import Row
from prescore.values import Values

ATTENDED = "most attended"


def token_row(
    language_model: LanguageModel,
    window: Window,
    configs: Mapping[str, Selected],
    *,
    layers: Sequence[int],
    budget: int,
    seed: int = 0,
) -> Row:
    """The keys of the first half that each configuration keeps, by layer and KV head, as a row.

    In the causal recursion these are the keys that the second half's queries may meet. `most attended` are the
    `budget` keys that receive most of those queries' exact attention.

    Figures: `pieces` (the first half's tokens as text), `kept[method][layer][head]` (positions), and
    `mass[method][layer]` (share of the second half's attention to the first half that falls on kept keys).
    """
    return Row(
        config={
            "part": "tokens",
            **described(language_model, window),
            "layers": list(layers),
            "budget": budget,
            "methods": {name: config.to_dict() for name, config in configs.items()},
        },
        seed=seed,
        measure=lambda: _measure(language_model, window, configs, layers, budget, seed),
        cost=float(len(window.tokens)),
    )


def _measure(
    language_model: LanguageModel,
    window: Window,
    configs: Mapping[str, Selected],
    layers: Sequence[int],
    budget: int,
    seed: int,
) -> Values:
    half = len(window.tokens) // 2
    kept: dict[str, dict[str, list[list[int]]]] = {name: {} for name in (*configs, ATTENDED)}
    mass: dict[str, dict[str, float]] = {name: {} for name in kept}

    def look(query: Tensor, key: Tensor, situation: Situation) -> None:
        if situation.layer not in layers:
            return
        received = attention_received(query[:, :, half:], key, half)
        chosen = {
            name: select_by(key[:, :, :half], config, generator=seed).indices[0]
            for name, config in configs.items()
        }
        chosen[ATTENDED] = received.topk(min(budget, half), dim=-1).indices.sort().values
        for name, indices in chosen.items():
            kept[name][str(situation.layer)] = indices.tolist()
            mass[name][str(situation.layer)] = float(received.gather(1, indices).sum() / received.sum())

    with observe(language_model.model, look):
        language_model.hidden(window.tokens)
    pieces = [language_model.tokenizer.decode([number]) for number in window.tokens[:half].tolist()]
    return {"pieces": pieces, "kept": kept, "mass": mass}


@torch.no_grad()
def attention_received(query: Tensor, key: Tensor, n_counted: int) -> Tensor:
    """Attention mass `[Hkv, n_counted]` that the last positions' queries `[1, Hq, Nq, D]` give the first keys.

    Summed over the queries and over the query heads that share a KV head; one head at a time, to bound memory.
    """
    n_heads, n_query, dim = query.shape[1:]
    n_keys, group = key.shape[2], n_heads // key.shape[1]
    position = torch.arange(n_keys, device=key.device)
    hidden = position[None] > position[n_keys - n_query :, None]
    received = torch.zeros(key.shape[1], n_counted, device=key.device)
    for head in range(n_heads):
        logits = (query[0, head].float() @ key[0, head // group].float().t()) * dim**-0.5
        weights = logits.masked_fill_(hidden, -torch.inf).softmax(-1)
        received[head // group] += weights[:, :n_counted].sum(0)
    return received.cpu()
