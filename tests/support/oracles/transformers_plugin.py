"""A pytest plugin that puts pre-scored attention in the place of sdpa, and notes which tests reached it.

`oracles.transformers_suite` loads it; what it learns goes to a JSON file.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


REPORT = "--prescore-report"
CONFIG = "--prescore-config"
ON_UNSUPPORTED = "--prescore-on-unsupported"
KEPT = "sdpa"
"""As configuration: sdpa stays, and is only counted."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where to write, which configuration, in JSON, attends, and what becomes of what it cannot honour."""
    parser.addoption(REPORT, required=True)
    parser.addoption(CONFIG, default=KEPT)
    parser.addoption(ON_UNSUPPORTED, default="raise")


def pytest_configure(config: pytest.Config) -> None:
    """Take the place of sdpa before any test is collected."""
    notes = _Notes(Path(config.getoption(REPORT)))
    take_the_place_of_sdpa(notes, config.getoption(CONFIG), config.getoption(ON_UNSUPPORTED))
    config.pluginmanager.register(notes)


class _Notes:
    """What each test did."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.running = ""
        self.calls: defaultdict[str, int] = defaultdict(int)
        self.tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.running = nodeid

    def pytest_runtest_setup(self) -> None:
        """Let both runs draw the same, so that chance does not tell them apart."""
        from transformers import set_seed

        set_seed(0)
        for name, module in list(sys.modules.items()):
            if name.endswith("test_modeling_common"):
                module.global_rng.seed(0)  # where transformers' tests draw their inputs

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the worst: parts of a test (unittest's subTest) report before it, and it passes where they fail."""
        said = report.longreprtext[-2000:]
        is_part = hasattr(report, "context")
        known = self.tests.get(report.nodeid, {})
        is_whole = not is_part and (report.when == "call" or report.outcome == "skipped")
        if known.get("outcome") != "failed" and (is_whole or report.outcome == "failed"):
            self.tests[report.nodeid] = {"outcome": report.outcome, "said": [said]}
        elif is_part and report.outcome == "failed":
            known["said"].append(said)

    def pytest_sessionfinish(self) -> None:
        found = {name: {**test, "calls": self.calls[name]} for name, test in self.tests.items()}
        self.path.write_text(json.dumps(found))


def take_the_place_of_sdpa(notes: _Notes, config: str, on_unsupported: str) -> None:
    """Register attention and mask under transformers' name `sdpa`; every call counts for the test that runs."""
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface

    from prescore.config import config_from_dict
    from prescore.integrations.transformers.attention import (
        default_patch,
        prescored_attention_forward,
        prescored_mask,
    )

    if config == KEPT:
        attend = AttentionInterface._global_mapping[KEPT]
    else:
        attend = prescored_attention_forward
        AttentionMaskInterface.register(KEPT, prescored_mask)
    made = None if config == KEPT else config_from_dict(json.loads(config))

    def count() -> None:
        notes.calls[notes.running] += 1

    # a graph counts while it is traced; a number that it had to watch would have it traced at every call
    count = torch.compiler.assume_constant_result(count)

    def counted(module: Any, *args: Any, **kwargs: Any) -> Any:
        count()
        if made is not None:
            default_patch(module, made, on_unsupported)
        return attend(module, *args, **kwargs)

    AttentionInterface.register(KEPT, counted)
