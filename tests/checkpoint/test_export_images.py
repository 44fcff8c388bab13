"""An exported network has the tensors that transformers itself would have written."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForImageClassification

from shardyard.checkpoint.buffers import buffers_of
from shardyard.checkpoint.export_formats import write_network
from shardyard.checkpoint.save import Saver
from shardyard.config.resolved import DatasetMetadata, Resolved
from shardyard.config.schema.recipe import Recipe
from shardyard.families.images.network import ImageNetwork
from shardyard.families.images.registry import KINDS
from shardyard.models.images import build_network, load_network
from tests.distributed.image_runs import TINY

pytestmark = pytest.mark.heavy


@pytest.mark.parametrize("kind", KINDS)
def test_names_and_values_are_those_of_the_folder_that_training_began_with(
    kind: str, tmp_path: Path, alone: dist.ProcessGroup
) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **TINY[kind], num_labels=4)
    source = tmp_path / "source"
    AutoModelForImageClassification.from_config(config).save_pretrained(source)
    content = json.loads((source / "config.json").read_text())
    network = KINDS[kind].of_config(content, "config.json").with_classes(4)

    model = build_network(network)
    load_network(model, network, source, seed=0, rows=range(4))
    held = {f"model.{name}": each.detach() for name, each in model.named_parameters()}
    saver = Saver(tmp_path / "checkpoints", group=alone, rank=0, world_size=1, keep_last=1)
    saver.save(1, {**held, **buffers_of(model)}, {})
    saver.wait()
    saver.close()

    exported = tmp_path / "exported"
    exported.mkdir()
    (checkpoint,) = (tmp_path / "checkpoints").glob("step-*")
    write_network(checkpoint, resolved_of(network, tmp_path), exported, dtype=torch.float32)
    expected, found = (load_file(each / "model.safetensors") for each in (source, exported))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def resolved_of(network: ImageNetwork, folder: Path) -> Resolved:
    """What a run of the network would be, as far as its export asks."""
    recipe = Recipe.model_validate(
        {
            "task": {"name": "image_classification"},
            "data": {
                "images": {
                    "size": 16, "eval_crop": 0.875, "interpolation": "bilinear",
                    "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5],
                }
            },
        }
    )  # fmt: skip
    data = DatasetMetadata(
        dir=str(folder), fingerprint="0", vocab_size=0, train_tokens=1, eval_tokens=1,
        train_documents=1, eval_documents=1, unigram_entropy=0.0,
    )  # fmt: skip
    return Resolved(recipe=recipe, reasons={}, shape=None, network=network, data=data, steps=1)
