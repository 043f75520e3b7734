"""Context parallel: a model whose sequences lie on several ranks.

Each rank runs the model on its shard. Everything but attention works on single positions, so a rank needs to know
only where its shard begins, and attention needs the group. A forward without a cache reads a prompt. A forward
with one makes a step: its new tokens are the same on all ranks, and the last rank keeps their keys.
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
from prescore.integrations.decode import PROMPT
from prescore.integrations.report import CallTrace, Trace, what_ran
from prescore.parallel.comm import Group, agree
from prescore.parallel.entry import OWN_HEADS, attend_step
from prescore.types import Result

STEP_OF_ALL = "step over the keys of all ranks"


class ContextParallel:
    """What the layers of a model on several ranks share: the group, and facts about the running forward.

    Attributes:
        group: The ranks.
        n_before: Tokens before this forward, on all ranks; 0 = it reads a prompt.
        valid: `[B, n]`, True = a real key of this rank; None = no rank has padding.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.n_before = 0
        self.valid: Tensor | None = None
        self._depth = 0

    def enter(self) -> bool:
        """Before a forward; False for one inside another, which has nothing to agree on."""
        self._depth += 1
        return self._depth == 1

    def leave(self) -> None:
        """After a forward, also one that raised."""
        self._depth -= 1

    def agree(self, tokens: Tensor, mask: Tensor | None, n_before: int, refusal: ValueError | None = None) -> None:
        """Make sure that all ranks run the same forward, each on its shard.

        Args:
            tokens: `[B, n]` token numbers, or `[B, n, C]` embeddings.
            mask: `[B, n]`, 1 = a real token; None = all are.
            n_before: Tokens so far, on all ranks.
            refusal: Why this rank alone cannot run it; every rank raises it.
        """
        shape = tuple(tokens.shape[:2])
        if refusal is None and mask is not None and (mask.ndim != 2 or (not n_before and mask.shape != shape)):
            refusal = ValueError(
                f"attention_mask must have the shape {shape} of this rank's tokens, got {tuple(mask.shape)}"
            )
        checksum = None  # steps have the same tokens on all ranks, prompts do not
        if n_before:
            checksum = zlib.crc32(tokens.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        facts = {"input_ids shape": list(tokens.shape), "tokens so far": n_before, "new tokens": checksum}
        agree(self.group, facts, refusal)
        self.n_before = n_before
        if n_before:
            return
        padded = mask is not None and not bool(mask.bool().all())
        flag = torch.tensor([padded], dtype=torch.uint8, device=self.group.device)
        self.valid = None
        if bool(self.group.gather(flag).any()):
            real = torch.ones(shape, dtype=torch.bool, device=tokens.device)
            self.valid = real if mask is None else mask.bool()

    def positions(self, n_tokens: int, device: torch.device) -> Tensor:
        """`[1, n]`: the positions of this rank's tokens in the sequence."""
        first = self.n_before or self.group.rank * n_tokens
        return torch.arange(first, first + n_tokens, dtype=torch.int64, device=device)[None]


class ContextParallelAttention:
    """Attention of one layer on several ranks; see `prescore.integrations.attention.Attend`.

    Args:
        config: How to attend; None = the default.
        parallel: What the layers share.
        seed: As of `PrescoredAttention`.

    Attributes:
        last: What the last call did, on this rank; None before the first.
        query_heads: Query heads that the last call ran on this rank; None = this rank's positions of all heads.
        trace: What the calls since the last prompt began did.
    """

    def __init__(self, config: Config | None, parallel: ContextParallel, *, seed: int = 0) -> None:
        self.config = check_config(config)
        self.parallel = parallel
        self.seed = seed
        self.last: CallTrace | None = None
        self.query_heads: int | None = None
        self.trace = Trace()

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, context: AttentionContext) -> Tensor:
        """Attend to the keys of all ranks."""
        begin = time.perf_counter()
        self.last = None
        group, n_query, n_before = self.parallel.group, query.shape[2], self.parallel.n_before
        self.trace.begin(n_query)
        kind = "causal" if context.is_causal else "full"
        if n_before:
            valid = self.parallel.valid
            output = attend_step(group, query, key, value, valid=valid, scale=context.scale).output
            seconds = time.perf_counter() - begin
            call = CallTrace(STEP_OF_ALL, STEP_OF_ALL, kind, n_query, n_before + n_query, seconds)
        else:
            result = self._attend_prompt(query, key, value, context)
            output, stats, seconds = result.output, result.stats, time.perf_counter() - begin
            self.query_heads = stats.get(OWN_HEADS)
            name = "exact" if isinstance(self.config, Exact) else PROMPT
            n_keys = key.shape[2] * group.size
            ran = what_ran(self.config, PROMPT, n_keys, n_keys, is_causal=context.is_causal)
            path, ran = f"{name} on {group.size} ranks", f"{ran} on {group.size} ranks"
            call = CallTrace(path, ran, kind, n_keys, n_keys, seconds, result.count_reads, stats=stats)
        self.last = call
        self.trace.add(call)
        return output

    def _attend_prompt(self, query: Tensor, key: Tensor, value: Tensor, context: AttentionContext) -> Result:
        """A shard of a prompt; what this rank alone cannot run is refused by all."""
        refusal = None
        try:
            self._refuse(query, key, context)
        except ValueError as error:
            refusal = error
        seed = layer_seed(self.seed, context.layer)
        options = Options(context.is_causal, self.parallel.valid, context.scale, seed, dropout_p=context.dropout)
        return attend(query, key, value, self.config, options, group=self.parallel.group, refusal=refusal)

    def _refuse(self, query: Tensor, key: Tensor, context: AttentionContext) -> None:
        """Refuse what a layer asks for and ranks cannot do."""
        reasons = list(context.obstacles)
        if context.is_local:
            reasons.append("it has a sliding window, which reaches into other ranks' shards")
        if query.shape[2] != key.shape[2]:
            reasons.append(f"it has {query.shape[2]} queries for {key.shape[2]} keys that no cache of ours holds")
        elif (kind := context.form(query, key).kind) not in ("causal", "full"):
            reasons.append(
                f"the attention mask must be causal or full apart from padding on every rank, got {kind}"
            )
        if reasons:
            raise Unsupported(f"attention on several ranks in layer {context.layer} ({context.owner})", reasons)
