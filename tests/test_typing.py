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
    routed = Routed(min_weight=1 / 16, cluster_size=64)
    both: tuple[Tensor, Aux] = prescore.prescored_attention(query, key, value, routed, return_aux=True)
    either = prescore.prescored_attention(query, key, value, return_aux=explain)
    stats: Stats = both[1].stats
    keys_read: float = stats.keys_per_query
    chosen: Selection = prescore.select(key, "key-diff", top_k=8)
    print(keys_read, stats.mass_read, chosen.indices.shape, prescore.list_scorers())
    return output if isinstance(either, tuple) else either


def on_a_model(model: torch.nn.Module) -> str:
    with prescore.apply(model, {"all": Routed(), "first:2": None}) as applied:
        return str(applied.report())
"""
WRONG = {
    "Selected(top_k='many')": "arg-type",
    "Selected(topk=3)": "call-arg",
    "Selected(min_score='high')": "arg-type",
    "Routed(min_weight='512')": "arg-type",
    "Routed(rows=512)": "call-arg",
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
    names = ", ".join(sorted({re.match(r"\w+", line).group() for line in WRONG}))
    header = f"import torch\nfrom prescore import {names}\nquery = torch.zeros(1, 1, 8, 4)\n"
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text(header + "\n".join(WRONG) + "\n")
    # from the top with its settings, so that the cache is warm after `make lint`
    command = [sys.executable, "-m", "mypy", "--no-error-summary", *map(str, sorted(tmp_path.glob("*.py")))]
    environment = {**os.environ, "MYPYPATH": "src"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    found = re.findall(r"(\w+)\.py:(\d+): error: .*\[([\w-]+)\]$", done.stdout, re.MULTILINE)
    assert {file for file, _, _ in found} == {"wrong"}, done.stdout
    errors = {int(line) - 4: kind for _, line, kind in found}
    assert errors == dict(enumerate(WRONG.values())), done.stdout
