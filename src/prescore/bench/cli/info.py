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
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts["versions"].items():
        table.add_row(name, value)
    table.add_row("device", facts["device"])
    table.add_row("threads", str(facts["threads"]))
    table.add_row("flash attention op", "present" if facts["flash_op"] else "missing (slower exact attention)")
    table.add_row("native operators", facts["native"])
    table.add_row("levels that can run", ", ".join(facts["native_levels"]))
    table.add_row("scorers", ", ".join(facts["scorers"]))
    for name, extra in facts["extras"].items():
        missing = ", ".join(extra["missing"])
        how = f"missing {missing}: pip install 'prescore\\[{name}]'" if missing else "present"
        table.add_row(f"extra {name}", how)
    Console(soft_wrap=True).print(table)


def collect() -> Values:
    """All facts as JSON values."""
    import torch

    from prescore.ops.native.library import describe_native, levels_of_processor
    from prescore.registry import list_scorers

    cuda = torch.cuda.is_available()
    return {
        "versions": versions(),
        "device": f"cuda ({torch.cuda.get_device_name()})"
        if cuda
        else f"cpu ({torch.backends.cpu.get_cpu_capability()})",
        "threads": torch.get_num_threads(),
        "flash_op": hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"),
        "native": describe_native(),
        "native_levels": list(levels_of_processor()),
        "scorers": list_scorers(),
        "extras": _extras(),
    }


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
