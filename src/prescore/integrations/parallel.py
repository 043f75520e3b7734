"""A model whose sequences lie on several ranks: each rank runs it on its piece, and attention talks to the others.

Everything outside attention works on one position at a time, so a rank needs to know only where its piece begins,
and attention needs the group. A forward without a past is a piece of the prompt; with a past, new tokens are the
same on all ranks and their keys stay with the last one.
"""

from __future__ import annotations

import time
import zlib

import torch
from torch import Tensor

from prescore.attention import Options, attend
from prescore.config import Config, Exact, check_config
from prescore.errors import Unsupported
from prescore.integrations.attention import AttentionContext, layer_seed
from prescore.integrations.report import CallTrace, Trace, words_for_prompt
from prescore.parallel.comm import Group, agree
from prescore.parallel.entry import OWN_HEADS, attend_step
from prescore.types import Result

PIECES = "_prescore_pieces"
"""Attribute of keys that came out of a cache whose layers hold pieces: what they came from, a `HeldShard`."""
STEP_OF_ALL = "step over the keys of all ranks"


class HeldShard:
    """The keys of this rank in one layer, between the calls of a generation.

    Attributes:
        n_all: Tokens so far, on all ranks.
        is_step: Whether the last call brought further tokens, the same on all ranks.
        valid: `[B, n]`, True = a real key of this rank; None = all are.
    """

    def __init__(self) -> None:
        self.n_all = 0
        self.is_step = False
        self.valid: Tensor | None = None


class ContextParallel:
    """What the layers of a model on several ranks share.

    Attributes:
        group: The ranks.
        padded: Whether some sequence of the running forward has padding, on any rank.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.padded = False
        self._depth = 0

    def enter(self) -> bool:
        """At the beginning of a forward; False for one inside another, which has nothing to agree upon."""
        self._depth += 1
        return self._depth == 1

    def agree(self, tokens: Tensor, mask: Tensor | None, n_before: int, refusal: ValueError | None = None) -> None:
        """Make sure that all ranks run the same forward, each on its piece.

        Args:
            tokens: `[B, n]` token numbers, or `[B, n, C]` embeddings.
            mask: `[B, n]`, 1 = a real token; None = all are.
            n_before: Tokens of all ranks so far.
            refusal: What this rank alone has to say against it; every rank raises it.
        """
        if (
            refusal is None
            and mask is not None
            and (mask.ndim != 2 or (not n_before and mask.shape != tokens.shape[:2]))
        ):
            refusal = ValueError(
                f"attention_mask must have the shape {tuple(tokens.shape[:2])} of this rank's tokens, "
                f"got {tuple(mask.shape)}"
            )
        new = (
            zlib.crc32(tokens.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
            if n_before
            else "a piece"
        )
        facts = {"input_ids shape": list(tokens.shape), "past": n_before, "new tokens": new}
        agree(self.group, facts, refusal, self.group.device)
        if not n_before:
            hides = mask is not None and not bool(mask.bool().all())
            flag = torch.tensor([hides], dtype=torch.uint8, device=self.group.device)
            self.padded = bool(self.group.gather(flag).any())

    def leave(self) -> None:
        """After a forward, whatever came of it."""
        self._depth -= 1

    def positions(self, n_tokens: int, n_before: int, device: torch.device) -> Tensor:
        """`[1, n]`: where this rank's tokens stand in the whole sequence."""
        first = n_before or self.group.rank * n_tokens
        return torch.arange(first, first + n_tokens, device=device)[None]


class ContextParallelAttention:
    """Attention of one layer on several ranks; see `prescore.integrations.attention.Attend`.

    Args:
        config: How to attend; None = the default.
        together: What the layers share.
        seed: As of `PrescoredAttention`.

    Attributes:
        last: What the last call did, on this rank; None before the first.
        own_heads: Query heads that the last call ran on this rank; None = its own positions of all heads.
        history: What the calls since the last prompt began did.
    """

    def __init__(self, config: Config | None, parallel_group: ContextParallel, *, seed: int = 0) -> None:
        self.config = check_config(config)
        self.parallel_group = parallel_group
        self.seed = seed
        self.last: CallTrace | None = None
        self.own_heads: int | None = None
        self.history = Trace()

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, context: AttentionContext) -> Tensor:
        """Attend to the keys of all ranks."""
        begin = time.perf_counter()
        self.last = None
        held: HeldShard | None = getattr(key, PIECES, None)
        group, n_query = self.parallel_group.group, query.shape[2]
        self.history.begin(n_query)
        bars: tuple[float | None, float | None] = (None, None)
        if held is not None and held.is_step:
            attended = attend_step(group, query, key, value, valid=held.valid, scale=context.scale)
            output, path, n_keys, rows = attended.output, STEP_OF_ALL, held.n_all, None
            ran = path
        else:
            outcome = self._attend(query, key, value, context, held)
            self.own_heads = outcome.stats.get(OWN_HEADS)
            bars = outcome.stats.get("error_bound_max"), outcome.stats.get("refined")
            kind = "exact" if isinstance(self.config, Exact) else "prescored"
            output, path = outcome.attended.output, f"{kind} on {group.size} ranks"
            n_keys, count = key.shape[2] * group.size, outcome.count_reads
            n_query, rows = n_query * group.size, lambda: sum(count())
            words = words_for_prompt(self.config, n_query, n_keys, is_causal=context.is_causal)
            ran = f"{words} on {group.size} ranks"
        seconds = time.perf_counter() - begin
        kind = "causal" if context.is_causal else "full"
        self.last = CallTrace(path, kind, n_query, n_keys, seconds, rows, None, ran, *bars)
        self.history.add(self.last)
        return output

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, context: AttentionContext, held: HeldShard | None
    ) -> Result:
        """A piece of a prompt; what this rank alone cannot do is refused by all."""
        refusal, valid = None, None
        try:
            self._refuse(query, key, context)
            valid = self._valid(query, key, context)
        except ValueError as error:
            refusal = error
        if held is not None:
            held.valid = valid
        seed = layer_seed(self.seed, context.layer)
        options = Options(context.is_causal, valid, context.scale, seed, dropout_p=context.dropout)
        group = self.parallel_group.group
        return attend(query, key, value, self.config, options, group=group, refusal=refusal)

    def _refuse(self, query: Tensor, key: Tensor, context: AttentionContext) -> None:
        """What a layer asks for and ranks cannot do together."""
        reasons = list(context.obstacles)
        if context.is_local:
            reasons.append("it has a sliding window, which no piece can see on its own")
        if query.shape[2] != key.shape[2]:
            reasons.append(f"it has {query.shape[2]} queries for {key.shape[2]} keys that no cache of ours holds")
        if reasons:
            raise Unsupported(f"attention on several ranks in layer {context.layer} ({context.owner})", reasons)

    def _valid(self, query: Tensor, key: Tensor, context: AttentionContext) -> Tensor | None:
        """`[B, n]` real keys of this rank, where any rank has padding; None = there is none."""
        form = context.form(query, key)
        if form.kind not in ("causal", "full"):
            reason = "the attention mask must be causal or full beside padding on every rank"
            raise Unsupported(
                f"attention on several ranks in layer {context.layer}", [f"{reason}, got {form.kind}"]
            )
        if not self.parallel_group.padded:
            return None
        if form.valid is not None:
            return form.valid
        return torch.ones(key.shape[0], key.shape[2], dtype=torch.bool, device=key.device)
