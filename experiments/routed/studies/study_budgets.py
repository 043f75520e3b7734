"""(c) Budgets per layer and per head, derived from the prompt itself."""

from __future__ import annotations

from dataclasses import asdict

from budgets import Budgets, attend_budgets
from clusters import Clustering
from variant import Variant

STUDY = "budgets"


def variants() -> list[Variant]:
    """Equal rows, then every rule in every scope, at two sizes of leaves."""
    rules: dict[str, Budgets | None] = {"equal rows": None}
    for scope, words in (("head", "heads of a layer"), ("layer", "layers"), ("all", "layers and heads")):
        for rule in ("unresolved", "root", "greedy"):
            rules[f"{words}, {rule}"] = Budgets(scope, rule)
    made = []
    for leaf in (128, 64):
        for label, budgets in rules.items():
            settings = {"leaf": leaf, "budgets": None if budgets is None else asdict(budgets)}
            made.append(
                Variant(
                    STUDY,
                    f"leaf {leaf}, {label}",
                    lambda view, _, budgets=budgets, leaf=leaf: attend_budgets(
                        view, budgets, Clustering(leaf=leaf)
                    ),
                    settings,
                )
            )
    return made
