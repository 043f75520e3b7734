"""A causal language model ready to be measured: loading, its head in blocks, contexts past the trained length."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prescore import checks
from prescore.bench.records import Values
from prescore.errors import Unsupported
from prescore.int8.linear import Int8Linear, use_int8_weights
from prescore.integrations.offline import SMOLLM2, load_model
from prescore.integrations.torchvision import mend_torchvision

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
INT8 = "int8"
WEIGHTS = (INT8, "bfloat16", "float32")
_ROPE = "yarn"


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """A model of transformers with its tokenizer.

    Attributes:
        name: What records call it.
        model: In evaluation mode, on its device.
        tokenizer: Called with a text, gives `input_ids`.
    """

    name: str
    model: Any
    tokenizer: Any

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return torch.device(next(self.model.parameters()).device)

    @property
    def dtype(self) -> str:
        """Name of the weights' dtype."""
        if any(isinstance(module, Int8Linear) for module in self.model.modules()):
            return INT8
        return str(next(self.model.parameters()).dtype).removeprefix("torch.")

    @property
    def trained_length(self) -> int | None:
        """Positions the model was trained on, where its configuration says so."""
        config = self.model.config.get_text_config(decoder=True)
        # ChatGLM calls it seq_length
        return getattr(config, "max_position_embeddings", getattr(config, "seq_length", None))

    def encode(self, text: str, *, special: bool = True) -> Tensor:
        """Token numbers `[N]`; `special=False` leaves out what the tokenizer adds around every text."""
        numbers = self.tokenizer(text, verbose=False, add_special_tokens=special)["input_ids"]
        return torch.tensor(numbers, dtype=torch.int64)

    def opening(self) -> Tensor:
        """Tokens that the tokenizer puts before every text, such as a beginning-of-text token; often none."""
        whole, plain = self.encode("a"), self.encode("a", special=False)
        for begin in range(len(whole) - len(plain) + 1):
            if torch.equal(whole[begin : begin + len(plain)], plain):
                return whole[:begin]
        return whole[:0]

    @torch.no_grad()
    def hidden(self, tokens: Tensor) -> Tensor:
        """Last hidden states `[N, C]` of one sequence `[N]`, without a cache."""
        base: nn.Module = self.model.base_model
        states: Tensor = base(input_ids=tokens[None].to(self.device), use_cache=False).last_hidden_state
        # ChatGLM puts the sequence before the batch
        return states[0] if states.shape[0] == 1 else states[:, 0]

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `[..., V]` of hidden states, in float32 at least."""
        head = self.model.get_output_embeddings()
        head = self.model.base_model.output_layer if head is None else head
        logits: Tensor = head(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        cap = getattr(self.model.config.get_text_config(decoder=True), "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def check_head(self) -> None:
        """Refuse a model whose logits are not what `hidden` and `logits` make of its states."""
        tokens = torch.arange(1, 9)
        ours = self.logits(self.hidden(tokens))
        with torch.no_grad():
            theirs = self.model(input_ids=tokens[None].to(self.device), use_cache=False).logits[0]
        # both run the same operators; the width of bfloat16 is all that may differ
        if not torch.allclose(ours, theirs.to(ours.dtype), rtol=2**-7, atol=2**-7):
            raise Unsupported(
                f"measuring {self.name}", ["its logits are not its output embedding applied to its last states"]
            )

    @contextmanager
    def extended(self, length: int) -> Iterator[Values | None]:
        """Positions up to `length` inside the block: RoPE is scaled (YaRN, no training) past the trained length.

        Yields:
            The scaling in words for a record, or None when nothing had to be done.
        """
        trained = self.trained_length
        if trained is None or length <= trained:
            yield None
            return
        base = self.model.base_model
        rotary = getattr(base, "rotary_emb", None)
        settings = getattr(base.config, "rope_parameters", None)
        if rotary is None or not isinstance(settings, dict) or settings.get("rope_type", "default") != "default":
            raise Unsupported(
                f"{length} tokens in {self.name}, trained on {trained},", ["its positions are not plain RoPE"]
            )
        config = copy.deepcopy(base.config)
        config.rope_parameters = {
            **settings,
            "rope_type": _ROPE,
            "factor": length / trained,
            "original_max_position_embeddings": trained,
        }
        base.rotary_emb = type(rotary)(config).to(self.device)
        try:
            yield {"rope": _ROPE, "factor": length / trained, "trained_length": trained}
        finally:
            base.rotary_emb = rotary


def load_language_model(
    name: str = SMOLLM2,
    *,
    dtype: str = "float32",
    weights: str | None = None,
    device: str = "cpu",
    trust_remote_code: bool = False,
    check_head: bool = True,
) -> LanguageModel:
    """Load a model and its tokenizer by name, see `prescore.integrations.offline.load_model`.

    `weights` is `int8` (`use_int8_weights`, everything else in bfloat16), another word for a `dtype`, or None.
    With `check_head` a model whose losses cannot be measured is refused, see `LanguageModel.check_head`.
    """
    checks.one_of("dtype", dtype, tuple(DTYPES))
    if weights is not None:
        checks.one_of("weights", weights, WEIGHTS)
        dtype = "bfloat16" if weights == INT8 else weights
    checks.device("device", device)
    mend_torchvision()
    logging: Any = importlib.import_module("transformers.utils.logging")
    logging.disable_progress_bar()  # the commands show their own progress
    model, tokenizer = load_model(name, dtype=dtype, trust_remote_code=trust_remote_code)
    model = model.to(device=device).eval()
    if weights == INT8:
        use_int8_weights(model)
    loaded = LanguageModel(name, model, tokenizer)
    if check_head:
        loaded.check_head()
    return loaded
