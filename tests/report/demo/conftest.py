"""Records as a run of the demo leaves them."""

import pytest

from prescore.bench.records import Record


def loss_record(label, kind, loss, rows, seconds, *, window=1, comparison="equal rows", n_tokens=4096, **more):
    """Sixteen stretches, half of them a little harder; `settings` and `series` where they differ."""
    axes = {"series": more.get("series", label), "comparison": comparison}
    method = {"label": label, "kind": kind, "settings": more.get("settings", {}), "axes": axes}
    document = f"a <b> & c, window {window}"
    return Record(
        command="demo",
        key=f"demo-{label}-{window}-{comparison}",
        config={
            "part": "loss",
            "model": "tiny",
            "dtype": "float32",
            "document": document,
            "digest": "00",
            "n_tokens": n_tokens,
            "layers": "all",
            "method": method,
        },
        seed=0,
        figures={
            "loss": loss,
            "stretch_losses": [loss + (0.01 if part % 2 else -0.01) * (kind != "exact") for part in range(16)],
            "keys_per_query": rows,
            "attention_seconds": seconds,
            "forward_seconds": 2 * seconds,
        },
        seconds=3 * seconds,
        argv=["prescore", "demo", "--out", "a b"],
        versions={"python": "3.11", "torch": "2.13"},
        threads=2,
        created="2026-01-01T00:00:00Z",
    )


def token_record():
    kept = {"key-diff": {"3": [[0, 2], [0, 3]]}, "most attended": {"3": [[0, 1], [1, 2]]}}
    mass = {"key-diff": {"3": 0.25}, "most attended": {"3": 0.75}}
    return Record(
        command="demo",
        key="demo-tokens",
        config={"part": "tokens", "layers": [3]},
        seed=0,
        figures={"pieces": ["<The>", " cat", "\n", " sat"], "kept": kept, "mass": mass},
        seconds=1.0,
        created="2026-01-01T00:00:01Z",
    )


def reading_record():
    """Twelve tokens of which the last four can be asked, two heads: one that finds row 5, one that finds none."""
    words = ["<b>", " the", " cat", " sat", " on", "</script>", " mat", "\n", " and", " a", " dog", " came"]
    searching = [[500, 2500, 6000, 1000, 120, [3, 1], [1000], [5, 6000]] for _ in range(4)]
    searching[3] = [100, 1900, 7000, 1000, 40, [4, 2], [1000], [2, 4000, 5, 3000]]
    smooth = [[500, 2500, 0, 7000, 310, [3, 0], [7000], []] for _ in range(4)]
    return Record(
        command="demo",
        key="demo-reading",
        config={"part": "reading", "layers": [0, 1]},
        seed=0,
        figures={
            "pieces": words,
            "first": 8,
            "sinks": 1,
            "chunk": 4,
            "heads": [[0, 0], [1, 3]],
            "searching": 0,
            "smooth": 1,
            "looks": [searching, smooth],
        },
        seconds=1.0,
        created="2026-01-01T00:00:01Z",
    )


@pytest.fixture
def records():
    routed = {"exact_until": 2048, "chunk_size": 256}
    found = []
    for window in (1, 2):
        found += [
            loss_record("exact", "exact", 2.0, 2048.5, 4.0, window=window),
            loss_record("default", "prescored", 2.1, 512.0, 1.0, window=window, settings=routed),
            loss_record("local only", "local", 3.0, 384.0, 0.5, window=window),
            loss_record(
                "sliding window, 500", "baseline", 2.4, 513.0, 1.2, window=window, series="sliding window + sinks"
            ),
            loss_record(
                "selection, top 99", "prescored", 9.0, 514.0, 1.3, window=window, series="selection + sinks"
            ),
        ]
    more = {"comparison": "budgets", "n_tokens": 1024}
    found += [
        loss_record("exact", "exact", 2.5, 512.5, 0.5, **more),
        loss_record("local only", "local", 3.5, 96.0, 0.1, **more),
        loss_record("default, rows=512", "prescored", 2.6, 256.0, 0.2, series="default", **more),
        loss_record("default, rows=32", "prescored", 2.8, 128.0, 0.2, series="default", **more),
        loss_record("sliding window, 250", "baseline", 2.7, 256.0, 0.2, series="sliding window + sinks", **more),
        loss_record("sliding window, 120", "baseline", 3.0, 128.0, 0.2, series="sliding window + sinks", **more),
    ]
    return [*found, reading_record(), token_record()]
