"""Turn records of version 1, which hold the settings of one flat configuration, into records of version 2.

    python experiments/convert_v1.py experiments

takes record files, or folders of them. Figures stay as they are, and so does the command line that made them; the
settings become what `to_dict` of a version 2 configuration writes, and the row is named anew, so that `--resume`
finds it. A record of version 2 is left alone. What version 2 cannot say is refused by name, and then no file is
changed.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from prescore.config import Config, Coupling, Exact, Hyper, Lsh, Routed, Selected
from prescore.records import Record, read_records, row_key
from prescore.registry import get_scorer
from prescore.scorers.base import Scorer
from prescore.scorers.clustered import ClusteringScorer
from prescore.scorers.kmeans import KMeans

SCORING = ("rule", "n_clusters", "max_iter", "normalize", "noise", "p", "sketch_size", "seeding", "fit_size")
CLUSTERING = ("n_clusters", "max_iter", "normalize", "seeding", "fit_size")
LSH = ("block_size", "sample_size", "n_projections", "alignment")
V1_FIELDS = frozenset(
    (
        *("method", "top_k", *SCORING, "selector", "sinks", "recent", "min_fraction", "inner", *LSH),
        *("min_seq_len", "leaf_inclusive", "remainder", "coupling", "rows", "leaf_size", "chunk_size"),
        *("tolerance", "refresh_every", "on_unsupported"),
    )
)
UNTOUCHED = ("speed", "planted")
"""Commands whose rows never held a configuration."""


class CannotTranslate(ValueError):
    """Something of version 1 that version 2 has no words for."""


def config_from_v1(settings: Mapping[str, Any], *, n_keys: int, is_causal: bool) -> Config:
    """What a flat configuration of version 1 did with so many keys."""
    odd = sorted(V1_FIELDS ^ set(settings))
    if odd:
        raise CannotTranslate(
            f"settings must have the fields of version 1, got {', '.join(odd)} too much or missing"
        )
    for name, usual in (("refresh_every", None), ("on_unsupported", "raise")):
        if settings[name] != usual:
            raise CannotTranslate(
                f"{name} must be {usual!r}, as it is no configuration any more, got {settings[name]!r}"
            )
    if settings["inner"] not in ("hyper", "exact", "routed"):
        raise CannotTranslate(f"inner must be hyper, exact or routed, got {settings['inner']!r}")
    if settings["inner"] == "routed" and routes(settings, n_keys, is_causal):
        return _routed(settings, is_causal)
    if settings["tolerance"] is not None:
        raise CannotTranslate(f"tolerance must be None where nothing is routed, got {settings['tolerance']!r}")
    exactly = settings["inner"] != "hyper"
    coupling = Coupling(**settings["coupling"])
    if keeps_all(settings):
        if exactly:
            return Exact()
        if coupling == Coupling() and not settings["recent"]:
            names = ("sinks", "min_seq_len", "leaf_inclusive")
            return Hyper(_lsh(settings), **{name: settings[name] for name in names})
    return _selected(settings, coupling, exactly=exactly, is_causal=is_causal)


def routes(settings: Mapping[str, Any], n_keys: int, is_causal: bool) -> bool:
    """Whether version 1 routed with `inner="routed"`: its budget had to leave every key reachable."""
    chunk = settings["chunk_size"]
    if settings["recent"] > (chunk if is_causal else 0):
        return False
    if keeps_all(settings):
        return True
    whole = min(n_keys, chunk) if is_causal else n_keys
    return isinstance(settings["top_k"], int) and settings["top_k"] >= whole


def keeps_all(settings: Mapping[str, Any]) -> bool:
    """Whether the budget says "all keys", whatever their number."""
    kept = settings["top_k"]
    return not kept or (isinstance(kept, float) and kept == 1.0)


def _routed(settings: Mapping[str, Any], is_causal: bool) -> Routed:
    names = ("rows", "leaf_size", "chunk_size", "sinks", "tolerance")
    # "at most this many queries" instead of "fewer", which never held for causal calls
    inclusive = settings["leaf_inclusive"] and not is_causal
    return Routed(exact_until=settings["min_seq_len"] + inclusive, **{name: settings[name] for name in names})


def _selected(settings: Mapping[str, Any], coupling: Coupling, *, exactly: bool, is_causal: bool) -> Selected:
    if exactly and settings["min_fraction"]:
        # a failed delta test ran HyperAttention over all keys, and runs exact attention now
        raise CannotTranslate(f"min_fraction must be 0 with exact attention, got {settings['min_fraction']!r}")
    remainder = "none" if coupling.mask == "zero" or keeps_all(settings) else _remainder(settings)
    if not settings["top_k"] and (settings["sinks"] or settings["recent"]):
        coupling = coupling.replace(
            mask="exclude"
        )  # without a budget nothing was zeroed, and these were read apart
    names = ("selector", "sinks", "recent", "min_fraction", "min_seq_len", "leaf_inclusive")
    given = {name: settings[name] for name in names}
    if exactly:
        coupling = Coupling(mask=coupling.mask)
        given["leaf_inclusive"] = False
        if not is_causal:
            del given["min_seq_len"]  # there are no causal leaves, and it did nothing
    return Selected(
        scorer=_scorer(settings),
        top_k=1.0 if keeps_all(settings) else settings["top_k"],
        remainder=remainder,
        inner=Exact() if exactly else _lsh(settings),
        coupling=coupling,
        **given,
    )


def _lsh(settings: Mapping[str, Any]) -> Lsh:
    return Lsh(**{name: settings[name] for name in LSH})


def _scorer(settings: Mapping[str, Any]) -> Scorer:
    kind = get_scorer(settings["method"])
    known = {field.name for field in dataclasses.fields(kind)}
    for name in ("normalize", "noise"):
        if settings[name] and name not in known:
            raise CannotTranslate(f"{name} must be off for {settings['method']}, got {settings[name]!r}")
    made: Scorer = kind(**_given(settings, [name for name in SCORING if name in known]))
    return made


def _remainder(settings: Mapping[str, Any]) -> str | ClusteringScorer:
    """Stand-ins of a scorer without clusters had k-means clusters under the same fields."""
    if settings["remainder"] != "centroids" or issubclass(get_scorer(settings["method"]), ClusteringScorer):
        return str(settings["remainder"])
    own = KMeans(**_given(settings, CLUSTERING))
    return "centroids" if own == KMeans() else own


def _given(settings: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    # None was "as the scorer does by default", and is what those fields that may be None are by default
    return {name: settings[name] for name in names if settings[name] is not None}


def converted(record: Record) -> Record:
    """The same row in the words of version 2."""
    config = dict(record.config)
    if record.command in ("vision", "coverage"):
        if "config" in config:
            n_keys = record.figures.get("n_tokens") or record.figures["n_keys"]
            config["config"] = _settings(config["config"], n_keys=n_keys, is_causal=False)
    elif record.command in ("perplexity", "retrieval"):
        method = config["method"]
        if method["kind"] == "prescored":
            settings = _settings(method["settings"], n_keys=config["n_tokens"], is_causal=True)
            config["method"] = {**method, "settings": settings}
    elif record.command not in UNTOUCHED:
        raise CannotTranslate(f"command must be one that wrote records in version 1, got {record.command!r}")
    return dataclasses.replace(record, config=config, key=row_key(record.command, config, record.seed))


def _settings(settings: Mapping[str, Any], *, n_keys: int, is_causal: bool) -> dict[str, Any]:
    if "type" in settings:
        return dict(settings)
    return config_from_v1(settings, n_keys=n_keys, is_causal=is_causal).to_dict()


def converted_file(path: Path) -> str:
    """The text of a record file in version 2."""
    lines: dict[str, str] = {}
    for number, record in enumerate(read_records(path), start=1):
        try:
            new = converted(record)
        except (ValueError, TypeError, KeyError) as error:
            raise CannotTranslate(f"{path}, record {number}: {error}") from error
        if new.key in lines:
            raise CannotTranslate(f"{path}, record {number}: another record means the same row, {new.key}")
        lines[new.key] = new.to_json()
    return "".join(f"{line}\n" for line in lines.values())


def main(arguments: list[str]) -> int:
    """Convert all files, or none."""
    if not arguments:
        print(__doc__)  # noqa: T201
        return 2
    places = [Path(argument) for argument in arguments]
    files = [
        file
        for place in places
        for file in ([place] if place.is_file() else sorted(place.rglob("records*.jsonl")))
    ]
    try:
        texts = {file: converted_file(file) for file in files}
    except CannotTranslate as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 2
    for file, text in texts.items():
        if text == file.read_text(encoding="utf-8"):
            continue
        part = file.with_name(f"{file.name}.{os.getpid()}")
        part.write_text(text, encoding="utf-8")
        part.replace(file)
        print(f"{file}: {text.count(chr(10))} records of version 2")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
