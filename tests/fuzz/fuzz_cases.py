"""Random calls of `prescored_attention`: every shape, mask, configuration and option, from a seed."""

import dataclasses
import random
from dataclasses import dataclass, replace

import torch
from oracles.inputs import attention_tensors

import prescore
from prescore import Coupling, Exact, Hyper, Lsh, Routed, Selected
from prescore.scoring.base import as_scorer
from prescore.scoring.kmeans import ClusteringScorer

MASKS = ("none", "left", "right", "both", "holes", "one key", "a row without keys")


def inside_a_buffer(tensor):
    """Rows amid NaN, none of them aligned."""
    n, dim = tensor.shape[2:]
    room = tensor.new_full((*tensor.shape[:2], n + 8, dim + 4), torch.nan)
    return room[:, :, 3 : 3 + n, 1 : 1 + dim].copy_(tensor)


MEMORY = {
    "rows": lambda t: t,
    "columns": lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
    "heads inside": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "every second number": lambda t: torch.stack((t, t), dim=-1).flatten(-2)[..., ::2],
    "negated": lambda t: torch._neg_view(-t),
    "in a buffer": inside_a_buffer,
}
"""Where the numbers of a tensor lie."""
BACKENDS = ("auto", "native", "plain", "cpu-flash", "cuda-efficient")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Case:
    """One call; its repr, evaluated with `from prescore import *`, is the case again."""

    config: object
    n_keys: int = 8
    n_query: int = 8
    batch: int = 1
    kv_heads: int = 1
    heads_per_kv: int = 1
    dim: int = 4
    value_dim: int = 4
    dtype: torch.dtype = torch.float64
    is_causal: bool = True
    mask: str = "none"
    scale: float | None = None
    dropout_p: float = 0.0
    backend: str = "auto"
    given: bool = False
    keys: str = "gaussian"
    memory: str = "rows"
    seed: int = 0

    def tensors(self):
        """Query, key and value."""
        names = ("batch", "kv_heads", "n_query", "n_keys", "dim", "value_dim", "seed")
        sizes = {name: getattr(self, name) for name in names}
        query, key, value = attention_tensors(heads=self.kv_heads * self.heads_per_kv, **sizes)
        if self.keys == "equal":
            key = key[:, :, :1].expand_as(key)
        elif self.keys == "zero":
            key = torch.zeros_like(key)
        elif self.keys == "few":  # a few keys again and again, some of them long
            again = torch.arange(self.n_keys) % 3
            key = key[:, :, again.clamp_max(self.n_keys - 1)] * (1 + again[:, None])
        return tuple(MEMORY[self.memory](t.to(self.dtype)) for t in (query, key, value))

    def padding(self):
        """The mask, True = a real key; None for none."""
        draw = random.Random(f"{self.seed} mask")
        if self.mask == "none" or not self.batch:
            return None
        mask = torch.zeros(self.batch, self.n_keys, dtype=torch.bool)
        for row in mask:
            first, last = sorted(draw.sample(range(self.n_keys + 1), 2))
            row[0 if self.mask == "right" else first : self.n_keys if self.mask == "left" else last] = True
            if self.mask == "holes":
                row[:] = torch.tensor([draw.random() < 0.7 for _ in row], dtype=torch.bool)
            if self.mask == "one key":
                row[:] = False
                row[draw.randrange(self.n_keys)] = True
        if self.mask == "a row without keys":
            mask[-1] = False
        return mask

    def options(self):
        """All that is not a tensor of the sequence, as keyword arguments."""
        options = {name: getattr(self, name) for name in ("is_causal", "scale", "dropout_p", "backend")}
        return {**options, "generator": self.seed, **({"selection": self.selection()} if self.given else {})}

    def selection(self):
        """Some keys chosen by the caller."""
        key = self.tensors()[1]
        return prescore.select(key, "uniform", top_k=max(1, self.n_keys // 3), sinks=1, generator=self.seed)

    def run(self, tensors=None, mask=None, *, lse=False, **changes):
        """Call it, with other tensors and options where they are given."""
        tensors = self.tensors() if tensors is None else tensors
        mask = self.padding() if mask is None else mask
        options = {**self.options(), "key_padding_mask": mask, "return_aux": lse, **changes}
        result = prescore.prescored_attention(*tensors, self.config, **options)
        return (result[0], result[1].lse) if lse else result


def random_case(draw):
    """Any case."""
    n_keys = draw.choice([1, 2, 3, 5, 9, 17, 33, 40, 64, 65, 90, 130, draw.randrange(1, 260)])
    is_causal = draw.random() < 0.6
    n_query = draw.choice([n_keys, n_keys, n_keys, 1, draw.randrange(1, n_keys + 1)])
    if not is_causal and draw.random() < 0.2:
        n_query = draw.randrange(1, 80)
    config = random_config(draw, n_keys)
    given = isinstance(config, Selected) and draw.random() < 0.2
    if given and draw.random() < 0.6:
        config = Selected(remainder="none", min_seq_len=config.min_seq_len)
    dim = draw.choice([1, 2, 3, 4, 8, 16, 16, 32])
    case = Case(
        config,
        n_keys=n_keys,
        n_query=n_query,
        batch=draw.choice([1, 1, 2, 3]),
        kv_heads=draw.choice([1, 1, 2]),
        heads_per_kv=draw.choice([1, 2, 3]),
        dim=dim,
        value_dim=draw.choice([dim, dim, 1, 5]),
        dtype=draw.choice(DTYPES),
        is_causal=is_causal,
        mask=draw.choice(("none", "none", *MASKS)),
        scale=draw.choice([None, None, None, 1.0, 0.0, -0.7, 3, 1e-6]),
        dropout_p=draw.choice([0.0, 0.0, 0.0, 0.3]),
        backend=draw.choice(["auto", "auto", "auto", "plain", *BACKENDS]),
        given=given,
        keys=draw.choice(["gaussian"] * 6 + ["equal", "zero", "few"]),
        memory=draw.choice(["rows"] * 6 + list(MEMORY)),
        seed=draw.randrange(2**31),
    )
    return replace(case, backend="auto") if case.dropout_p else case


def random_config(draw, n_keys):
    """Any configuration whose fields mean something at this length; refused combinations are drawn again."""
    kind = draw.choice([Routed, Routed, Selected, Selected, Hyper, Exact])
    while True:
        drawn = {name: make(draw, n_keys) for name, make in FIELDS[kind].items()}
        fixed = LONG_BY_DEFAULT if kind is Routed else ()
        try:
            return kind(**{name: value for name, value in drawn.items() if name in fixed or draw.random() < 0.8})
        except ValueError:
            continue


def random_scorer(draw):
    """A scorer with settings of its own."""
    made = as_scorer(draw.choice(prescore.list_scorers()))
    known = {f.name for f in dataclasses.fields(made)}
    drawn = {name: make(draw) for name, make in SCORER_FIELDS.items() if name in known and draw.random() < 0.5}
    return dataclasses.replace(made, **drawn)


def _remainder(draw, n_keys):
    scorer = random_scorer(draw)
    clustered = isinstance(scorer, ClusteringScorer) and scorer.rule == "nearest" and draw.random() < 0.3
    return scorer if clustered else draw.choice(["centroids", "none"])


def _lsh(draw, n_keys):
    sizes = draw.choice([0, 1, 3, 8, 64]), draw.choice([1, 4, 16]), draw.randrange(1, 8)
    return Lsh(*sizes, draw.choice(["hash", "rank"]))


def _coupling(draw, n_keys):
    choices = (("exclude", "zero"), ("selected", "all"), ("exclude", "count"), ("selected", "all"))
    return Coupling(*(draw.choice((usual, usual, other)) for usual, other in choices))


def _leaf(draw, n_keys):
    return draw.choice([0, 1, 2, 4, 8, 16, 31, n_keys, n_keys + 1])


LONG_BY_DEFAULT = ("cluster_size", "chunk_size", "exact_until")
"""Fields of `Routed` whose defaults are for thousands of keys."""
FIELDS = {
    Routed: {
        "min_weight": lambda draw, n: draw.choice([1.0, 1 / 2, 1 / 8, 1 / 32, 1 / 128, 1 / (8 * n)]),
        "cluster_size": lambda draw, n: draw.choice([1, 2, 3, 8, 16, 20, 64]),
        "chunk_size": lambda draw, n: draw.choice([1, 2, 4, 7, 16, 64]),
        "sinks": lambda draw, n: draw.choice([0, 1, 4, 9]),
        "exact_until": lambda draw, n: draw.choice([0, 0, 0, 1, n // 2, n, n + 1]),
    },
    Selected: {
        "scorer": lambda draw, n: random_scorer(draw),
        "top_k": lambda draw, n: draw.choice([1, 2, 5, 12, n, 2 * n, 0.01, 0.4, 1.0, None]),
        "min_score": lambda draw, n: draw.choice([None, None, -1.0, 0.0, 0.5]),
        "selector": lambda draw, n: draw.choice(["top", "top", "sample"]),
        "sinks": lambda draw, n: draw.choice([0, 1, 4, 20]),
        "recent": lambda draw, n: draw.choice([0, 0, 1, 6]),
        "min_fraction": lambda draw, n: draw.choice([0.0, 0.0, 0.2, 1.0]),
        "remainder": _remainder,
        "inner": lambda draw, n: draw.choice([Exact(), _lsh(draw, n)]),
        "min_seq_len": _leaf,
        "leaf_inclusive": lambda draw, n: draw.random() < 0.3,
        "coupling": _coupling,
    },
    Hyper: {
        "lsh": _lsh,
        "sinks": lambda draw, n: draw.choice([0, 1, 5]),
        "min_seq_len": _leaf,
        "leaf_inclusive": lambda draw, n: draw.random() < 0.3,
    },
    Exact: {},
}
SCORER_FIELDS = {
    "n_clusters": lambda draw: draw.choice([1, 2, 5, 40]),
    "rule": lambda draw: draw.choice(["nearest", "farthest", "cluster-share", "sensitivity", "balanced"]),
    "max_iter": lambda draw: draw.choice([0, 1, 3]),
    "normalize": lambda draw: draw.random() < 0.5,
    "noise": lambda draw: draw.choice([0.0, 0.2]),
    "seeding": lambda draw: draw.choice(["k-means++", "random"]),
    "fit_size": lambda draw: draw.choice([None, 8, 64]),
    "sketch_size": lambda draw: draw.choice([4, 64]),
    "n_features": lambda draw: draw.choice([2, 8]),
    "n_tables": lambda draw: draw.choice([1, 3]),
    "window": lambda draw: draw.choice([2, 8]),
    "p": lambda draw: draw.choice([0.5, 1.0, 1.5, 2.0, 3.0]),
}
