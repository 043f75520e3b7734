"""The default as vLLM's attention backend on CPUs. `prescore.serving.register_vllm` installs it.

Requests of at most `exact_until` keys, and layers that `Routed` cannot run, use vLLM's own attention. Others are
read through the block table into rows (`paged.PagedIndex`): vLLM's CPU kernels store the keys of a block column by
column, which a query that reads single keys cannot use.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from prescore.routed import native
from prescore.serving import vllm_config
from prescore.serving.paged import PagedIndex, PagedRequest

logger = init_logger("vllm.prescore")


class PrescoredBackend(CPUAttentionBackend):
    """vLLM's CPU backend, with routed attention for long requests."""

    @staticmethod
    def get_impl_cls() -> type[PrescoredImpl]:
        """The attention of a layer."""
        return PrescoredImpl

    @staticmethod
    def get_builder_cls() -> type[PrescoredMetadataBuilder]:
        """What prepares a step."""
        return PrescoredMetadataBuilder


@dataclass
class PrescoredMetadata(CPUAttentionMetadata):
    """A step.

    Attributes:
        paged: Rows and key indexes of the long requests.
        routed: The long requests.
        others: The step of the other requests; None = there are none.
        other_rows: Their queries.
    """

    paged: PagedIndex | None = None
    routed: list[PagedRequest] = field(default_factory=list)
    others: CPUAttentionMetadata | None = None
    other_rows: Tensor | None = None


class PrescoredMetadataBuilder(CPUAttentionMetadataBuilder):
    """Splits each step into long requests and others."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config, cache = vllm_config(), self.vllm_config.cache_config
        reuse = bool(cache.enable_prefix_caching)
        self._paged = None if config is None else PagedIndex(config, self.block_size, reuse=reuse)
        if self.vllm_config.kv_transfer_config is not None:
            logger.warning_once("prescore is not used: a KV connector writes blocks that it does not see.")
            self._paged = None

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        """The metadata of a step, as vLLM makes it, with the long requests apart."""
        common = common_attn_metadata
        whole = super().build(common_prefix_len, common, fast_build)
        if self._paged is None or whole.causal is not True or whole.encoder_cache is not None:
            return whole
        n_keys, starts = whole.seq_lens.tolist(), whole.query_start_loc.tolist()[: len(whole.seq_lens) + 1]
        n_new = [stop - start for start, stop in pairwise(starts)]
        requests = self._paged.begin(whole.block_table[: len(n_keys)].tolist(), n_keys, n_new)
        routed = [request for request in requests if request is not None]
        if not routed:
            return whole
        few = [number for number, request in enumerate(requests) if request is None]
        others, rows = None, None
        if few:
            rows = torch.cat(
                [torch.arange(starts[i], starts[i + 1], dtype=torch.int64, device="cpu") for i in few]
            )
            others = super().build(common_prefix_len, _some_requests(common, few, n_keys, n_new, rows), fast_build)
        inherited = {item.name: getattr(whole, item.name) for item in fields(CPUAttentionMetadata)}
        return PrescoredMetadata(**inherited, paged=self._paged, routed=routed, others=others, other_rows=rows)


def _some_requests(
    common: CommonAttentionMetadata, few: list[int], n_keys: list[int], n_new: list[int], rows: Tensor
) -> CommonAttentionMetadata:
    lengths = torch.tensor([0, *(n_new[number] for number in few)], dtype=torch.int32, device="cpu")
    starts, some = lengths.cumsum(0, dtype=torch.int32), torch.tensor(few, dtype=torch.int64, device="cpu")
    return replace(
        common,
        num_reqs=len(few),
        num_actual_tokens=len(rows),
        max_query_len=max(n_new[number] for number in few),
        max_seq_len=max(n_keys[number] for number in few),
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=common.seq_lens[some],
        block_table_tensor=common.block_table_tensor[some],
        slot_mapping=common.slot_mapping[rows],
    )


class PrescoredImpl(CPUAttentionBackendImpl):
    """The attention of one layer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._layout_known: bool | None = None
        config, self._reason = vllm_config(), ""
        query = torch.empty(1, self.num_heads, 1, self.head_size, dtype=torch.float32, device="cpu")
        reasons = {
            "a sliding window is local already": self.sliding_window > 0,
            "logits are capped": bool(self.logits_soft_cap),
            "it has ALiBi": self.alibi_slopes is not None,
            "it has learned sinks": self.sinks is not None,
            f"it is {self.attn_type}": self.attn_type != AttentionType.DECODER,
            "its KV cache is quantized": self.is_fp8_kv_cache,
            "; ".join(native.unsupported(query, self.head_size, config) if config else ["not asked for"]): True,
        }
        self._reason = "; ".join(text for text, holds in reasons.items() if holds and text)
        if self._reason and config is not None:
            logger.info_once("prescore: some layers use vLLM's own attention: %s", self._reason)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend for all requests of a step; see `CPUAttentionBackendImpl.forward`."""
        scales = (output_scale, output_block_scale)
        metadata = attn_metadata
        if self._reason or not isinstance(metadata, PrescoredMetadata) or not self._knows_layout(layer, kv_cache):
            return super().forward(layer, query, key, value, kv_cache, metadata, output, *scales)
        rows, paged = metadata.other_rows, metadata.paged
        if rows is not None:
            others = torch.empty_like(output[: len(rows)])
            super().forward(layer, query[rows], key[rows], value[rows], kv_cache, metadata.others, others, *scales)
            output[rows] = others
        cache = _key_and_value_blocks(kv_cache)
        shaped = output.view(len(output), self.num_heads, -1)
        for request in metadata.routed:
            queries = query[request.queries].view(-1, self.num_heads, self.head_size)
            if paged is not None:
                shaped[request.queries] = paged.attend(layer.layer_name, request, queries, cache, self.scale)
        return output

    def _knows_layout(self, layer: Any, kv_cache: Tensor) -> bool:
        """Whether the cache holds keys by columns and values by rows: written and read back, once."""
        if self._layout_known is None:
            probe = torch.zeros((1, *kv_cache.shape[1:]), dtype=kv_cache.dtype, device=kv_cache.device)
            shape = (kv_cache.shape[2], self.num_kv_heads, self.head_size)
            key, value = torch.randn(2, *shape, dtype=torch.float32, device="cpu").to(kv_cache.dtype)
            slots = torch.arange(len(key), dtype=torch.int64, device="cpu")
            self.do_kv_cache_update(layer, key, value, probe, slots)
            keys, values = _key_and_value_blocks(probe)
            self._layout_known = all(
                torch.equal(read[0].transpose(0, 1), wrote) for read, wrote in ((keys, key), (values, value))
            )
            if not self._layout_known:
                logger.warning_once("prescore is not used: the KV cache of %s has another layout.", layer.isa)
        return self._layout_known


def _key_and_value_blocks(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values `[blocks, Hkv, block_size, D]` of vLLM's CPU cache, as views."""
    n_blocks, n_heads, size, width = kv_cache.shape
    key, value = kv_cache.view(n_blocks, n_heads, 2 * size, width // 2).chunk(2, dim=2)
    return key.view(n_blocks, n_heads, width // 2, size).transpose(2, 3), value
