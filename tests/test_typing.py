"""What a type checker says about a user's script: a right one passes `mypy --strict`, each mistake is found."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy", reason="the type checker is in the extra dev")

ROOT = Path(__file__).parent.parent
RIGHT = """
import torch
from torch import Tensor

import prescore
from prescore import Aux, KMeans, Routed, Selected, Selection, Stats


def attend(query: Tensor, key: Tensor, value: Tensor, *, explain: bool) -> Tensor:
    config = Selected(KMeans(n_clusters=8), top_k=0.25, sinks=4).replace(recent=2)
    output: Tensor = prescore.prescored_attention(query, key, value, config, is_causal=True)
    told: tuple[Tensor, Aux] = prescore.prescored_attention(query, key, value, Routed(min_weight=1 / 16), return_aux=True)
    either = prescore.prescored_attention(query, key, value, return_aux=explain)
    stats: Stats = told[1].stats
    rows: float = stats.keys_per_query
    chosen: Selection = prescore.select(key, "key-diff", top_k=8)
    print(rows, stats.error_bound_max, chosen.indices.shape, prescore.list_scorers())
    return output if isinstance(either, tuple) else either


def on_a_model(model: torch.nn.Module) -> float | None:
    with prescore.apply(model, {"all": Routed(), "first:2": None}) as applied:
        return applied.report().rows("prefill")
"""
WRONG = {
    "Selected(top_k='many')": "arg-type",
    "Selected(topk=3)": "call-arg",
    "Routed(min_weight=1 / 2.5)": "arg-type",
    "KMeans(n_cluster=3)": "call-arg",
    "prescored_attention(query, query)": "call-overload",
    "prescored_attention(query, query, query, return_aux=True).shape": "attr-defined",
    "prescored_attention(query, query, query)[1].stats": "attr-defined",
    "prescored_attention(query, query, query, return_aux=True)[1].stats.rows": "attr-defined",
    "apply(torch.nn.Linear(2, 2), config=3)": "arg-type",
    "apply(torch.nn.Linear(2, 2)).reports()": "attr-defined",
    "select(query, top_k=3).index": "attr-defined",
}


@pytest.mark.slow
def test_a_right_script_passes_and_every_mistake_is_found(tmp_path):
    (tmp_path / "right.py").write_text(RIGHT)
    header = "import torch\nfrom prescore import *\nquery = torch.zeros(1, 1, 8, 4)\n"
    (tmp_path / "wrong.py").write_text(header.replace("*", names()) + "\n".join(WRONG) + "\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", "", "--no-error-summary"]
    # the cache of the repository is warm after `make lint`
    command += ["--cache-dir", str(ROOT / ".mypy_cache"), "right.py", "wrong.py"]
    environment = {**os.environ, "MYPYPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    found = re.findall(r"^(\w+)\.py:(\d+): error: .*\[([\w-]+)\]$", done.stdout, re.MULTILINE)
    assert [line for line in done.stdout.splitlines() if line.startswith("right.py")] == []
    errors = {int(line) - 4: kind for file, line, kind in found if file == "wrong"}
    assert errors == dict(enumerate(WRONG.values())), done.stdout


def names():
    return ", ".join(sorted({re.match(r"\w+", line).group() for line in WRONG}))
