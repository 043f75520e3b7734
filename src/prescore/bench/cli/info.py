"""`prescore info`: what is installed and what is missing."""

from __future__ import annotations

import json as jsonlib
import re
from importlib import metadata

from prescore.bench.cli.options import Json
from prescore.bench.records import Values, versions


def command(json: Json = False) -> None:
    """Show versions, device, threads, native operators, scorers and optional packages.

    Example: prescore info --json
    """
    facts = collect()
    if json:
        print(jsonlib.dumps(facts))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    rows = {
        **facts["versions"],
        "device": facts["device"],
        "threads": str(facts["threads"]),
        "flash attention op": "present" if facts["flash_op"] else "missing (slower exact attention)",
        "native operators": facts["native"],
        "scorers": ", ".join(facts["scorers"]),
    }
    for name, extra in facts["extras"].items():
        missing = ", ".join(extra["missing"])
        rows[f"extra {name}"] = f"missing {missing}{_line(name)}" if missing else "present"
    for name, value in rows.items():
        table.add_row(name, escape(value))
    Console(soft_wrap=True).print(table)


def collect() -> Values:
    """All facts as JSON values."""
    import torch

    from prescore.ops.native.library import describe_native
    from prescore.registry import list_scorers

    cuda = torch.cuda.is_available()
    name = torch.cuda.get_device_name() if cuda else torch.backends.cpu.get_cpu_capability()
    return {
        "versions": versions(),
        "device": f"{'cuda' if cuda else 'cpu'} ({name})",
        "threads": torch.get_num_threads(),
        "flash_op": hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"),
        "native": describe_native(),
        "scorers": list_scorers(),
        "extras": _extras(),
    }


def installation(module: str, prefer: str) -> str:
    """How to install a missing module, for the end of a sentence; empty = no extra has it.

    Of several extras with it the preferred one is named.
    """
    package = {"sklearn": "scikit-learn", "PIL": "pillow"}.get(module, module)
    found = [name for name, group in _extras().items() if package in (*group["present"], *group["missing"])]
    return _line(prefer if prefer in found else found[0]) if found else ""


def _line(extra: str) -> str:
    return f': pip install ".[{extra}]" in a clone of prescore'


def _extras() -> dict[str, dict[str, list[str]]]:
    """Packages of each optional group, read from the package's own metadata."""
    extras: dict[str, dict[str, list[str]]] = {}
    for requirement in metadata.requires("prescore") or []:
        match = re.match(r"([A-Za-z0-9._-]+).*extra\s*==\s*['\"]([^'\"]+)['\"]", requirement)
        if match:
            package, extra = match.groups()
            group = extras.setdefault(extra, {"present": [], "missing": []})
            group["present" if _installed(package) else "missing"].append(package)
    return extras


def _installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True
