"""Real weights, photographs and processes: DeiT-tiny on images, and a cache saved by another process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from tiny_models import COARSE, ROUTED, forward, prompts, tiny

import prescore
from prescore import KMeans, Selected
from prescore.bench.vision.models import load_vision_model, open_folder
from prescore.integrations.transformers import PrescoredCache

DEIT = os.environ.get("DEIT_TINY")
"""A file with the weights of `deit_tiny_patch16_224`."""
CLASSES = [698, 996]
"""Of ImageNet, which DeiT-tiny sees in the photographs: a palace and a fungus."""
IDS, _ = prompts(length=40, cut=0)
CONTINUE = """
import sys
from tiny_models import tiny
from test_end_to_end import CONFIGS, continued
from prescore.integrations.transformers import PrescoredCache
print(continued(tiny("Llama"), PrescoredCache.load(sys.argv[1]), CONFIGS[sys.argv[2]]))
"""
CONFIGS = {"selected": COARSE, "routed": ROUTED}


@pytest.mark.slow
@pytest.mark.skipif(DEIT is None, reason="DEIT_TINY names no file with the weights of DeiT-tiny")
def test_deit_on_photographs(tmp_path):
    pytest.importorskip("timm")
    from sklearn.datasets import load_sample_images

    for name, photograph in zip("ab", load_sample_images().images, strict=True):
        (tmp_path / "images" / name).mkdir(parents=True)
        Image.fromarray(photograph).save(tmp_path / "images" / name / "photograph.jpg")
    vision = load_vision_model(DEIT)
    ((images, _),) = open_folder(tmp_path / "images").batches(vision.preprocessing, 2)
    with torch.no_grad():
        exact = vision.logits(images)
        with (
            pytest.warns(UserWarning, match="top_k keeps every key"),
            prescore.apply(vision.model, Selected(top_k=1.0)),
        ):
            torch.testing.assert_close(vision.logits(images), exact, rtol=1e-3, atol=1e-4)
        centroids = Selected(KMeans(n_clusters=32, rule="farthest", normalize=False), top_k=32)
        with prescore.apply(vision.model, centroids):
            near = vision.logits(images)
    assert 0 < float((near - exact).norm() / exact.norm()) < 0.5
    assert exact.argmax(-1).tolist() == near.argmax(-1).tolist() == CLASSES


def continued(model, cache, config):
    """The tokens after those of the cache."""
    with prescore.apply(model, config):
        return model.generate(IDS, past_key_values=cache, max_new_tokens=6, do_sample=False)[:, 40:].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_a_saved_cache_continues_in_another_process(name, tmp_path):
    model, cache = tiny("Llama"), PrescoredCache()
    with prescore.apply(model, CONFIGS[name]):
        forward(model, IDS[:, :-1], past_key_values=cache)
    cache.save(tmp_path / "cache")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(Path(__file__).parent), *sys.path))}
    command = [sys.executable, "-c", CONTINUE, str(tmp_path / "cache"), name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == f"{continued(model, cache, CONFIGS[name])}\n", done.stderr
