"""Small real runs on images: real files, real preparation, a real run folder."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from shardyard.config.model.source import network_or_none
from shardyard.config.resolve import resolve
from shardyard.config.schema.recipe import Recipe
from shardyard.data.images.prepare import prepare_images
from shardyard.data.own.prepare import prepare_own
from shardyard.rundir.layout import RunDir
from tests.distributed.runs import MACHINE, write_run

SIZE = 16
CLASSES = ("cat", "dog", "hen", "owl")

TINY: dict[str, dict[str, Any]] = {
    "resnet": {
        "layer_type": "basic", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2],
    },
    "efficientnet": {
        "image_size": SIZE, "width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320,
        "strides": [1, 2, 1, 2, 1, 1, 1],
    },
    "vit": {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 32, "image_size": SIZE, "patch_size": 8,
    },
}  # fmt: skip


def write_pictures(folder: Path, *, each: int = 12) -> Path:
    """A folder a class, of stripes whose direction and width tell it, with noise."""
    draw = np.random.default_rng(0)
    rows, columns = np.mgrid[:SIZE, :SIZE]
    for number, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for picture in range(each):
            stripes = (rows if number % 2 else columns) // (2 + number) % 2 * 128
            noise = draw.integers(0, 100, (SIZE, SIZE, 3))
            pixels = (stripes[:, :, None] + noise).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{picture:03d}.png")
    return folder


def write_network(folder: Path, kind: str, **changed: Any) -> Path:
    """The config.json of a small network, without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"model_type": kind, **TINY[kind], **changed}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def make_image_run(
    folder: Path, pictures: Path, network: Path, sections: dict[str, Any], *, attempt: int = 0
) -> RunDir:
    """Write a run folder, ready to train, for the given sections of a recipe."""
    base: dict[str, dict[str, Any]] = {
        "run": {"steps": 5},
        "task": {"name": "image_classification"},
        "model": {"path": str(network), "weights": "random"},
        "data": {
            "source": str(pictures),
            "dir": str(pictures.parent / "prepared"),
            "eval_fraction": 0.2,
            "images": {"size": SIZE},
        },
        "optim": {
            "name": "sgd", "lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3,
            "global_batch": 10, "micro_batch": 4, "warmup_steps": 0,
        },
        "precision": {"compute": "fp32"},
        "cluster": {"device": "cpu", "devices": 1},
    }  # fmt: skip
    merged = {name: {**base.get(name, {}), **sections.get(name, {})} for name in {*base, *sections}}
    recipe = Recipe.model_validate(merged)
    prepared = prepare_images if recipe.data.module is None else prepare_own
    facts = prepared(recipe, model_dir=None, progress=lambda *_: None)
    model_dir = Path(str(recipe.model.path))
    resolved = resolve(
        recipe, shape=None, network=network_or_none(recipe, model_dir), machine=MACHINE,
        data=facts, model_dir=model_dir,
    )  # fmt: skip
    run_dir = RunDir(folder)
    write_run(run_dir, resolved, attempt=attempt)
    return run_dir
