"""A row that is planned today has the name of the committed one, so that `--resume` finds it."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

from prescore.bench.language.experiments import MethodChoice, Scale, default_leaf, experiment_methods
from prescore.bench.language.held_out import HELD_OUT, measured_after, measured_first
from prescore.bench.language.methods import asked_for
from prescore.bench.language.needles import TASK, Needles, needles_row
from prescore.bench.language.perplexity import loss_row
from prescore.bench.language.retrieval import Question, retrieval_row
from prescore.bench.records import read_records, row_key
from prescore.bench.speed.heads import HeadsSetting, LayerSetting, SavedHeads, heads_row, layer_rows, measure_parts
from prescore.bench.speed.studies import DecodeSetting, ParallelSetting, decode_rows, parallel_row
from prescore.bench.speed.timing import Setting, length_rows
from prescore.bench.vision.accuracy import Grid, Study, study_rows
from prescore.bench.vision.coverage import CoverageGrid, VisionSubject, coverage_rows
from prescore.bench.vision.models import Preprocessing, VisionModel
from prescore.config import Routed

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
ON_RANKS = MethodChoice(names=("kmeans", "default"))
"""What `perplexity --parallel` was asked for: the paper's preset and the default as it is."""
ABOUT_IMAGES = ("arch", "resolution", "batch_size", "model", "images", "n_images")


def folders(pattern):
    return pytest.mark.parametrize("path", sorted(EXPERIMENTS.glob(pattern)), ids=lambda path: path.parent.name)


def keys(command, rows):
    return {row_key(command, row.config, row.seed) for row in rows}


def centroid(config):
    """What a language row asks of its model and of its document."""
    model = SimpleNamespace(name=config["model"], dtype=config["dtype"])
    return model, SimpleNamespace(name=config["document"], document=config["document"], digest=config["digest"])


def windows_beside(record, path):
    """The sliding window of as many rows as the default read, which its record of the same text says."""
    same = ("model", "document", "n_tokens")
    return [
        measured_after(other)
        for other in read_records(path)
        if other.config["method"]["label"] == "default" and all(other.config[f] == record.config[f] for f in same)
    ]


def fields_set(record):
    """What `--set` had changed in the default."""
    settings, usual = record.config["method"]["settings"], Routed().to_dict()
    is_default = record.config["method"]["label"] == "default"
    return {name: value for name, value in settings.items() if is_default and value != usual[name]}


def planned_losses(record, path):
    config, sinks = record.config, 4 if path.parent.name.endswith("sinks") else 0
    name, length = config["experiment"], config["n_tokens"]
    model, window = centroid(config)
    window.tokens, window.first = range(length), config["first"]
    if name == HELD_OUT:
        methods = [*measured_first(), *windows_beside(record, path)]
    elif name is None:
        methods = MethodChoice(names=("exact", "default"), overrides=fields_set(record)).methods(length)
    else:
        methods = experiment_methods(name, Scale(length, leaf=default_leaf(name, length), sinks=sinks))
    return [loss_row(model, window, method, experiment=name, seed=record.seed) for method in methods]


def planned_retrievals(record):
    config = record.config
    model, haystack = centroid(config)
    question = Question(config["task"], config["n_tokens"], config["depth"])
    length = config["n_tokens"]
    methods = [
        # --leaf, or the default as it is
        asked_for(name, length=length, leaf=leaf)
        for leaf in (length // 8, None)
        for name in ("exact", "local", "kmeans", "random", "default")
    ]
    return [
        retrieval_row(model, haystack, method, question, samples=config["samples"], seed=record.seed)
        for method in methods
    ]


def planned_needles(record):
    config = record.config
    length, (model, haystack) = config["n_tokens"], centroid(config)
    needles = Needles(length, tuple(config["depths"]))
    return [
        needles_row(model, haystack, method, needles, sample=config["sample"], seed=record.seed)
        for method in (
            asked_for(name, length=length, leaf=None, overrides=fields_set(record))
            for name in ("exact", "default")
        )
    ]


def planned_images(record):
    config = record.config
    n_tokens = record.figures.get("n_tokens") or record.figures["n_keys"]
    model = VisionModel(nn.Identity(), "a ViT", Preprocessing(), n_tokens, 1, 12, {})
    study = Study(model, [], {name: config[name] for name in ABOUT_IMAGES})
    asked = {
        "methods": (config["method"],),
        "rows": (config["rows"],),
        "clusters": (config.get("clusters") or 4,),
        "protect": (config.get("protect", True),),
        "seeds": (record.seed or 0,),
    }
    if record.command == "coverage":
        return coverage_rows(VisionSubject(study), CoverageGrid(**asked, thresholds=tuple(config["thresholds"])))
    return study_rows(study, Grid(**asked))


@folders("language/*/records.jsonl")
def test_language_rows(path):
    for record in read_records(path):
        if record.config["part"] == TASK:
            planned = planned_needles(record)
        elif record.command == "retrieval":
            planned = planned_retrievals(record)
        else:
            planned = planned_losses(record, path)
        assert record.key in keys(record.command, planned), record.config["method"]["label"]


@folders("parallel/*/records.jsonl")
def test_rows_of_ranks(path):
    for record in read_records(path):
        config = dict(record.config)
        if record.command == "speed":
            config.pop("study")
            planned = [parallel_row(ParallelSetting(**config), record.seed)]
        else:
            model, window = centroid(config)
            window.tokens, window.first = range(config["n_tokens"]), config["first"]
            group = SimpleNamespace(size=config["ranks"]) if "ranks" in config else None
            methods = ON_RANKS.methods(config["n_tokens"])
            planned = [loss_row(model, window, method, seed=record.seed, group=group) for method in methods]
        assert record.key in keys(record.command, planned), record.config


@folders("vision/*/records.jsonl")
def test_vision_rows(path):
    for record in read_records(path):
        assert record.key in keys(record.command, planned_images(record)), record.config["method"]


@folders("**/speed/**/records.jsonl")
def test_speed_rows(path):
    for record in read_records(path):
        config = dict(record.config)
        study = config.pop("study")
        if study == "decode":
            planned = decode_rows([DecodeSetting(**config)], record.seed)
        elif study in ("parts", "steps"):
            planned = layer_rows(study, [(LayerSetting(**config), None)], measure_parts, record.seed)
        elif study == "heads":
            setting = HeadsSetting(**{**config, "methods": tuple(config["methods"])})
            of = SavedHeads(Path(config["heads"]), config["digest"], tuple(map(tuple, record.figures["shape"])))
            planned = [heads_row(of, setting, record.seed)]
        else:
            planned = length_rows([Setting(**{**config, "methods": tuple(config["methods"])})], record.seed, study)
        assert record.key in keys("speed", planned), config


def test_every_committed_file_is_planned():
    tested = ("language/*/records.jsonl", "vision/*/records.jsonl", "**/speed/**/records.jsonl")
    tested += ("parallel/*/records.jsonl",)
    found = {path for pattern in tested for path in EXPERIMENTS.glob(pattern)}
    assert set(EXPERIMENTS.rglob("records*.jsonl")) == found
