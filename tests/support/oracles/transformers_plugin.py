"""A pytest plugin that runs pre-scored attention under the name of sdpa, and notes which tests called it.

`oracles.transformers_suite` loads it, and reads the JSON file that it writes.
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
SDPA = "sdpa"
"""As configuration: sdpa stays, and is only counted."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where to write, the configuration as JSON, and what happens to unsupported features."""
    parser.addoption(REPORT, required=True)
    parser.addoption(CONFIG, default=SDPA)
    parser.addoption(ON_UNSUPPORTED, default="raise")


def pytest_configure(config: pytest.Config) -> None:
    """Replace sdpa before any test is collected."""
    notes = _Notes(Path(config.getoption(REPORT)))
    replace_sdpa(notes, config.getoption(CONFIG), config.getoption(ON_UNSUPPORTED))
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
        """Seed both runs alike."""
        from transformers import set_seed

        set_seed(0)
        for name, module in list(sys.modules.items()):
            if name.endswith("test_modeling_common"):
                module.global_rng.seed(0)  # where transformers' tests draw their inputs

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the worst outcome: a test passes where its parts (unittest's subTest) fail, which report first."""
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


def replace_sdpa(notes: _Notes, config: str, on_unsupported: str) -> None:
    """Register attention and mask under transformers' name `sdpa`; every call counts for the test that runs."""
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface

    from prescore.config import config_from_dict
    from prescore.integrations.transformers.attention import (
        default_patch,
        prescored_attention_forward,
        prescored_mask,
    )

    if config == SDPA:
        attend = AttentionInterface._global_mapping[SDPA]
    else:
        attend = prescored_attention_forward
        AttentionMaskInterface.register(SDPA, prescored_mask)
    made = None if config == SDPA else config_from_dict(json.loads(config))

    def count() -> None:
        notes.calls[notes.running] += 1

    # a graph counts while it is traced; a changing number would have it traced again at every call
    count = torch.compiler.assume_constant_result(count)

    def counted(module: Any, *args: Any, **kwargs: Any) -> Any:
        count()
        if made is not None:
            default_patch(module, made, on_unsupported)
        return attend(module, *args, **kwargs)

    AttentionInterface.register(SDPA, counted)
