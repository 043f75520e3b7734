"""The public functions of attention."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from prescore import checks
from prescore.api.run import Options, attend_call, attend_counting, attend_together, attend_with_lse
from prescore.api.scoring import Generator, nothing_selected
from prescore.config import Config, Exact, Hyper
from prescore.types import Attended, Aux, Selection, Stats


@overload
def prescored_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: Config | None = None,
    *,
    is_causal: bool = False,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    generator: Generator = None,
    selection: Selection | None = None,
    dropout_p: float = 0.0,
    dropout_generator: Generator = None,
    group: object = None,
    backend: str = "auto",
    return_aux: Literal[False] = False,
) -> Tensor: ...


@overload
def prescored_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: Config | None = None,
    *,
    is_causal: bool = False,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    generator: Generator = None,
    selection: Selection | None = None,
    dropout_p: float = 0.0,
    dropout_generator: Generator = None,
    group: object = None,
    backend: str = "auto",
    return_aux: Literal[True],
) -> tuple[Tensor, Aux]: ...


@overload
def prescored_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: Config | None = None,
    *,
    is_causal: bool = False,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    generator: Generator = None,
    selection: Selection | None = None,
    dropout_p: float = 0.0,
    dropout_generator: Generator = None,
    group: object = None,
    backend: str = "auto",
    return_aux: bool,
) -> Tensor | tuple[Tensor, Aux]: ...


def prescored_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: Config | None = None,
    *,
    is_causal: bool = False,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    generator: Generator = None,
    selection: Selection | None = None,
    dropout_p: float = 0.0,
    dropout_generator: Generator = None,
    group: object = None,
    backend: str = "auto",
    return_aux: bool = False,
) -> Tensor | tuple[Tensor, Aux]:
    """Attention over the keys that matter.

    Args:
        query: `[B, Hq, Nq, D]`.
        key: `[B, Hkv, Nk, D]`, `Hq` a multiple of `Hkv`; finite where it is not padding.
        value: `[B, Hkv, Nk, Dv]`, likewise.
        config: How to attend: a `Routed`, `Selected`, `Hyper` or `Exact`; None = `Routed()`.
        is_causal: Queries are the last `Nq` positions and see no later key.
        key_padding_mask: `[B, Nk]`, True = a real key. Queries of padded keys see the real keys before them; in
            causal mode one that is no number is read as zeros.
        scale: Factor of the logits, any finite number; `D ** -0.5` by default.
        generator: Seed, generator or None.
        selection: With a `Selected`: use this selection instead of making one. Without a configuration: as
            `Selected(remainder="none")` would, exactly over these keys (in causal mode beside its exact leaves).
        dropout_p: Probability of dropping an attention weight, for training: the kept ones are scaled by
            `1 / (1 - p)`, lse counts all keys as before, and a stand-in is dropped as a whole. Which ones are
            dropped is drawn apart for each sequence and head, and drawn again in the backward pass rather than
            stored. The fused operators cannot do this: the plain backend runs, which is slower.
        dropout_generator: Seed or generator of the dropout alone, so that it may change from step to step
            while the selection does not; None = from `generator` too.
        group: A `torch.distributed` process group or one-dimensional `DeviceMesh` whose ranks hold equal,
            consecutive pieces of the sequence: every rank passes its piece of query, key, value and mask, gets its
            piece of the result, and must take part in the backward pass. No `selection` and no dropout there, and
            `Aux.selection` is empty: what was selected stays with the ranks that hold it. See docs/parallel.md.
        backend: Operator backend: `auto`, `cpu-flash`, `cuda-efficient` or `plain`.
        return_aux: Also return lse, the selection and statistics.

    Returns:
        The output `[B, Hq, Nq, Dv]`, or `(output, Aux)`.
    """
    checks.boolean("return_aux", return_aux)
    options = Options(
        is_causal, key_padding_mask, scale, generator, selection, dropout_p, dropout_generator, backend
    )
    if group is not None:
        outcome = attend_together(query, key, value, config, options, group, explain=return_aux)
        attended = outcome.attended
        return (attended.output, Aux(attended.lse, [], Stats.of(outcome.stats))) if return_aux else attended.output
    if not return_aux:
        return attend_counting(query, key, value, config, options).output
    call, outcome = attend_call(query, key, value, config, options, explain=True)
    attended = call.restore(outcome.attended)
    kept = [call.restore_selection(chosen) for chosen in outcome.selections]
    chosen = kept if is_causal else kept[0] if kept else nothing_selected(key)
    return attended.output, Aux(attended.lse, chosen, Stats.of(outcome.stats))


def exact_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    group: object = None,
    backend: str = "auto",
) -> Attended:
    """Softmax attention over all real keys.

    Args:
        query: `[B, Hq, Nq, D]`.
        key: `[B, Hkv, Nk, D]`, `Hq` a multiple of `Hkv`; keys are not repeated.
        value: `[B, Hkv, Nk, Dv]`.
        is_causal: Queries are the last `Nq` positions and see no later key.
        key_padding_mask: `[B, Nk]`, True = a real key.
        scale: Factor of the logits, `D ** -0.5` by default.
        group: Ranks that hold pieces of the sequence, as in `prescored_attention`.
        backend: `auto`, `cpu-flash`, `cuda-efficient` or `plain`.

    Returns:
        Output and lse; a query that sees nothing has output 0 and lse -inf.
    """
    options = Options(is_causal, key_padding_mask, scale, backend=backend)
    if group is not None:
        return attend_together(query, key, value, Exact(), options, group, explain=True).attended
    return attend_with_lse(query, key, value, Exact(), options)


def hyper_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: Hyper | None = None,
    *,
    is_causal: bool = False,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    generator: Generator = None,
    backend: str = "auto",
) -> Attended:
    """HyperAttention over all keys: LSH blocks plus a sampled residual; `config=None` is `Hyper.published()`."""
    config = Hyper.published() if config is None else config
    checks.instance("config", config, (Hyper,))
    options = Options(is_causal, key_padding_mask, scale, generator, backend=backend)
    return attend_with_lse(query, key, value, config, options)
