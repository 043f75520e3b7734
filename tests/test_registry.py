"""Scorers and baselines of installed packages: found by their entry points, left out with a warning if broken."""

import sys
from unittest.mock import patch

import pytest

import prescore
from prescore import registry
from prescore.bench.baselines import BASELINES, REGISTERED, get_baseline, list_baselines, register_baseline

SCORER = """
from dataclasses import dataclass
from prescore import Scorer, register_scorer

@register_scorer("of-a-package")
@dataclass(frozen=True)
class OfAPackage(Scorer):
    def score(self, keys, *, valid, streams):
        return keys.sum(-1)
"""
BASELINE = """
from prescore import exact_attention
from prescore.bench.baselines import register_baseline

@register_baseline("of-a-package", settings=lambda leaf, top_k: {}, keys_read=lambda length, settings: length)
def everything(query, key, value, **options):
    return exact_attention(query, key, value, is_causal=options["is_causal"])
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Make a package with a module and entry points, as pip would; its registrations disappear afterwards."""
    prescore.list_scorers()
    monkeypatch.syspath_prepend(tmp_path)

    def make(name, text, group):
        (tmp_path / f"{name}.py").write_text(text)
        about = tmp_path / f"{name}-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(f"[{group}]\n{name} = {name}\n")
        registry.load_entry_points.cache_clear()

    with patch.dict(registry._SCORERS), patch.dict(REGISTERED):
        yield make
    for name in ("a_scorer_package", "a_baseline_package", "a_broken_package"):
        sys.modules.pop(name, None)
    registry.load_entry_points.cache_clear()


def test_installed_scorers_and_baselines_are_known_by_their_names(install):
    assert "of-a-package" not in prescore.list_scorers()
    install("a_scorer_package", SCORER, "prescore.scorers")
    assert "of-a-package" in prescore.list_scorers()
    assert type(prescore.Selected("of-a-package", 8).scorer).__name__ == "OfAPackage"
    prescore.testing.check_scorer("of-a-package")
    assert list_baselines() == list(BASELINES)
    install("a_baseline_package", BASELINE, "prescore.baselines")
    assert list_baselines() == [*BASELINES, "of-a-package"]
    assert get_baseline("of-a-package").__name__ == "everything"
    assert get_baseline("oracle") is BASELINES["oracle"]


def test_a_broken_package_is_left_out_with_one_warning(install):
    install("a_broken_package", "1 / 0", "prescore.scorers")
    with pytest.warns(UserWarning, match="entry point 'a_broken_package' of prescore.scorers was left out .Zero"):
        assert "kmeans" in prescore.list_scorers()
    prescore.list_scorers()  # no second warning


def test_baselines_have_names_of_their_own(install):
    first, second = list_baselines, get_baseline  # any functions
    own = {"settings": lambda leaf, top_k: {}, "keys_read": lambda length, settings: 1.0}
    assert register_baseline("mine", **own)(first) is first
    register_baseline("mine", **own)(first)  # loaded again
    with pytest.raises(ValueError, match=r"name must be new, got 'mine', which .* has already"):
        register_baseline("mine", **own)(second)
    with pytest.raises(TypeError, match="name must be a non-empty str, got 3"):
        register_baseline(3, **own)
    register_baseline("oracle", **own)(first)
    assert get_baseline("oracle") is BASELINES["oracle"]  # ours keep their names
