"""A pytest plugin that puts pre-scored attention in the place of sdpa, and notes which tests reached it.

`prescore.testing.transformers_suite` loads it; what it learns goes to a JSON file.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

REPORT = "--prescore-report"
CONFIG = "--prescore-config"
KEPT = "sdpa"
"""As configuration: sdpa stays, and is only counted."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where to write, and which configuration, in JSON, attends."""
    parser.addoption(REPORT, required=True)
    parser.addoption(CONFIG, default=KEPT)


def pytest_configure(config: pytest.Config) -> None:
    """Take the place of sdpa before any test is collected."""
    notes = _Notes(Path(config.getoption(REPORT)))
    take_the_place_of_sdpa(notes, config.getoption(CONFIG))
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

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        decides = report.when == "call" or report.outcome != "passed"
        if decides:
            said = "" if report.outcome == "passed" else report.longreprtext[-2000:]
            self.tests[report.nodeid] = {"outcome": report.outcome, "said": said}

    def pytest_sessionfinish(self) -> None:
        found = {name: {**test, "calls": self.calls[name]} for name, test in self.tests.items()}
        self.path.write_text(json.dumps(found))


def take_the_place_of_sdpa(notes: _Notes, config: str) -> None:
    """Register attention and mask under transformers' name `sdpa`; every call counts for the test that runs."""
    from transformers import AttentionInterface, AttentionMaskInterface

    from prescore.config import config_from_dict
    from prescore.integrations.transformers.door import default_seat, prescored_attention_forward, prescored_mask

    if config == KEPT:
        attend = AttentionInterface._global_mapping[KEPT]
    else:
        attend = prescored_attention_forward
        AttentionMaskInterface.register(KEPT, prescored_mask)
    made = None if config == KEPT else config_from_dict(json.loads(config))

    def counted(module: Any, *args: Any, **kwargs: Any) -> Any:
        notes.calls[notes.running] += 1
        if made is not None:
            default_seat(module, made)
        return attend(module, *args, **kwargs)

    AttentionInterface.register(KEPT, counted)
