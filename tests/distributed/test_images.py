"""Networks for images in every layout: losses, gradient norms and running statistics of one run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageClassification

from shardyard.checkpoint.export import export
from shardyard.checkpoint.load import load_tensors, read_shapes
from shardyard.rundir.attempt_files import read_resolved
from shardyard.rundir.confusion import read_confusion
from shardyard.rundir.jsonl import read_evaluations, read_steps
from shardyard.rundir.layout import RunDir
from shardyard.tasks.images import ImageClassification
from shardyard.train.hooks import Hooks
from shardyard.train.loop import DRAINED, FINISHED
from shardyard.train.run import train
from tests.distributed.image_runs import (
    CLASSES,
    SIZE,
    TINY,
    make_image_run,
    write_network,
    write_pictures,
)
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import train_here

STEPS = 5
DROPS = {"dropout": 0.2, "drop_path": 0.3}

Layouts = dict[str, tuple[int, dict[str, Any], dict[str, Any]]]
QUICK: Layouts = {
    "2 zero 3, recompute": (2, {"zero": 3, "dp_shard": 2}, {"recompute": "full"}),
}
MORE: Layouts = {
    "1, recompute": (1, {}, {"recompute": "full"}),
    "1, selective": (1, {}, {"recompute": "selective"}),
    "2 copies": (2, {"dp_replicate": 2, "dp_shard": 1}, {}),
    "2 zero 1": (2, {"zero": 1, "dp_shard": 2}, {}),
    "2 zero 2, recompute": (2, {"zero": 2, "dp_shard": 2}, {"recompute": 2}),
    "3 zero 3": (3, {"zero": 3, "dp_shard": 3}, {}),
    "3 zero 2, recompute": (3, {"zero": 2, "dp_shard": 3}, {"recompute": "full"}),
    "4 zero 1": (4, {"zero": 1, "dp_shard": 4}, {}),
    "4 hybrid, recompute": (
        4, {"zero": 3, "dp_shard": 2, "dp_replicate": 2}, {"recompute": "full"}
    ),
}  # fmt: skip
FEW = ("2 zero 2, recompute", "3 zero 3")
"""Of ``MORE``, those that every push tries; the rest takes minutes."""
SOME = ("1, selective", "4 hybrid, recompute")
"""Beside them of one kind of network."""
KINDS = ("resnet", "efficientnet", "vit")
SYSTEM_KINDS = [
    pytest.param("resnet", marks=pytest.mark.system),
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:]),
]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("images") / "pictures")


def _sections(
    processes: int, parallel: dict[str, Any], memory: dict[str, Any], **model: Any
) -> dict[str, dict[str, Any]]:
    return {
        "run": {"steps": STEPS},
        "model": {**DROPS, **model},
        "parallel": parallel,
        "memory": memory,
        "cluster": {"devices": processes},
    }


def _steps(run_dir: RunDir) -> list[list[float]]:
    return [[line["loss"], line["grad_norm"]] for line in read_steps(run_dir.metrics)]


def _saved(run_dir: RunDir, step: int = STEPS) -> dict[str, Tensor]:
    path = run_dir.checkpoint(step)
    tensors: dict[str, Tensor] = {
        name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in read_shapes(path).items()
    }
    load_tensors(path, tensors, allow_extra=False)
    return tensors


def hold_to_one_process(kind: str, pictures: Path, folder: Path, layouts: Layouts) -> None:
    network = write_network(folder / "network", kind)
    # a step is 10 images: micro-batches of 4, 4 and 2, and a rank that has none
    alone = make_image_run(folder / "alone", pictures, network, _sections(1, {}, {}))
    run_on_ranks(train_here, 1, alone)
    expected, saved = _steps(alone), _saved(alone)
    judged = read_evaluations(alone.metrics)[-1]["eval"]
    assert len(expected) == STEPS and {"loss", "top1", "top5"} <= judged.keys()
    statistics = [name for name in saved if "running_" in name]
    assert bool(statistics) == (kind != "vit")
    for name, (processes, parallel, memory) in layouts.items():
        sections = _sections(processes, parallel, memory)
        run_dir = make_image_run(folder / name, pictures, network, sections)
        run_on_ranks(train_here, processes, run_dir)
        for found, wanted in zip(_steps(run_dir), expected, strict=True):
            assert found == pytest.approx(wanted, rel=1e-5), name
        others = _saved(run_dir)
        for each in statistics:
            torch.testing.assert_close(others[each], saved[each], rtol=1e-5, atol=1e-6, msg=each)
        counts = {int(t) for n, t in others.items() if n.endswith("num_batches_tracked")}
        assert counts <= {STEPS}, "recompute counts nothing twice"
        scored = read_evaluations(run_dir.metrics)[-1]["eval"]
        assert scored == pytest.approx(judged, rel=1e-5), name


def test_a_resnet_is_the_same_on_two_processes(pictures: Path, tmp_path: Path) -> None:
    hold_to_one_process("resnet", pictures, tmp_path, QUICK)


@pytest.mark.parametrize("kind", SYSTEM_KINDS)
def test_a_network_is_the_same_in_a_few_layouts(kind: str, pictures: Path, tmp_path: Path) -> None:
    few = (*FEW, *SOME) if kind == "resnet" else FEW
    hold_to_one_process(kind, pictures, tmp_path, {name: MORE[name] for name in few})


def _graphs(run_dir: RunDir) -> tuple[int, int]:
    """Train; how many graphs that took, and functions that were given up for having too many."""
    from torch._dynamo.utils import counters

    train_here(run_dir)
    given_up = sum(n for why, n in counters["graph_break"].items() if "recompile_limit" in why)
    return counters["stats"]["unique_graphs"], given_up


@pytest.mark.system
@pytest.mark.parametrize("kind", ["resnet", pytest.param("efficientnet", marks=pytest.mark.slow)])
def test_compiled_blocks_of_several_sizes_learn_the_same(
    kind: str, pictures: Path, tmp_path: Path
) -> None:
    network = write_network(tmp_path / "network", kind)
    plain, compiled = (
        make_image_run(tmp_path / name, pictures, network, _sections(1, {}, {}, compile=on))
        for name, on in (("plain", False), ("compiled", True))
    )
    run_on_ranks(train_here, 1, plain)
    [(graphs, given_up)] = run_on_ranks(_graphs, 1, compiled, timeout_s=900)
    assert graphs > 8 and not given_up
    for found, wanted in zip(_steps(compiled), _steps(plain), strict=True):
        assert found == pytest.approx(wanted, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_network_is_the_same_in_every_layout(kind: str, pictures: Path, tmp_path: Path) -> None:
    hold_to_one_process(kind, pictures, tmp_path, MORE)


def _drains_at(run_dir: RunDir, attempt: int, step: int) -> str:
    calls = 0

    def drain_requested() -> bool:
        nonlocal calls
        calls += 1
        return calls >= step

    return train(
        run_dir, attempt, Hooks(generation=0, drain_requested=drain_requested, events=None)
    )


@pytest.mark.system
@pytest.mark.slow
def test_a_drained_run_with_averages_goes_on_bit_for_bit(pictures: Path, tmp_path: Path) -> None:
    network = write_network(tmp_path / "network", "efficientnet")
    sections = _sections(2, {"zero": 3, "dp_shard": 2}, {})
    sections["optim"] = {"ema_decay": 0.5}
    whole = make_image_run(tmp_path / "whole", pictures, network, sections)
    parts = make_image_run(tmp_path / "parts", pictures, network, sections)
    run_on_ranks(train_here, 2, whole)
    assert run_on_ranks(_drains_at, 2, parts, 0, 2) == [DRAINED] * 2
    make_image_run(parts.path, pictures, network, sections, attempt=1)
    assert run_on_ranks(train_here, 2, parts, 1) == [FINISHED] * 2
    assert _steps(parts) == _steps(whole)
    assert read_evaluations(parts.metrics) == read_evaluations(whole.metrics)
    saved, expected = _saved(parts), _saved(whole)
    assert saved.keys() == expected.keys() and any("average.buffer" in name for name in saved)
    for name, tensor in expected.items():
        assert torch.equal(saved[name], tensor), name


@pytest.mark.system
def test_a_run_goes_on_with_three_processes(pictures: Path, tmp_path: Path) -> None:
    network = write_network(tmp_path / "network", "resnet")
    alone = make_image_run(tmp_path / "alone", pictures, network, _sections(1, {}, {}))
    run_on_ranks(train_here, 1, alone)
    two = _sections(2, {"zero": 3, "dp_shard": 2}, {})
    parts = make_image_run(tmp_path / "parts", pictures, network, two)
    assert run_on_ranks(_drains_at, 2, parts, 0, 2) == [DRAINED] * 2
    three = _sections(3, {"zero": 2, "dp_shard": 3}, {"recompute": "full"})
    make_image_run(parts.path, pictures, network, three, attempt=1)
    run_on_ranks(train_here, 3, parts, 1)
    for found, wanted in zip(_steps(parts), _steps(alone), strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("kind", SYSTEM_KINDS)
def test_an_export_opens_in_transformers_and_here(
    kind: str, pictures: Path, tmp_path: Path
) -> None:
    network = write_network(tmp_path / "network", kind)
    sections = _sections(1, {}, {})
    sections["optim"] = {"ema_decay": 0.5}
    run_dir = make_image_run(tmp_path / "run", pictures, network, sections)
    run_on_ranks(train_here, 1, run_dir)
    to = tmp_path / "exported"
    resolved = read_resolved(run_dir.resolved(0))
    export(run_dir.checkpoint(STEPS), resolved, to)

    model = AutoModelForImageClassification.from_pretrained(to).eval()
    assert model.config.id2label == dict(enumerate(CLASSES))
    config = json.loads((to / "config.json").read_text())
    asked = json.loads((network / "config.json").read_text())
    assert {key: config[key] for key in asked} == asked
    read = ImageClassification.open_data(resolved).eval
    assert read is not None
    batch = read.micro_batch(range(read.num_samples), read.num_samples)
    images = resolved.recipe.data.images
    mean, std = (torch.tensor(each).view(-1, 1, 1) for each in (images.mean, images.std))
    pixels = (batch["image"].permute(0, 3, 1, 2) / 255.0 - mean) / std
    with torch.no_grad():
        logits = model(pixel_values=pixels).logits
    loss = torch.nn.functional.cross_entropy(logits, batch["label"])
    judged = read_evaluations(run_dir.metrics)[-1]["eval"]
    assert float(loss) == pytest.approx(judged["loss"], rel=1e-5)
    shown = sorted({number * read.num_samples // 8 for number in range(8)})
    confusion, guessed = read_confusion(run_dir), logits.argmax(dim=1).tolist()
    assert confusion is not None and confusion.names == list(CLASSES)
    for row, of_class in enumerate(confusion.matrix):
        for column, count in enumerate(of_class):
            pairs = zip(batch["label"].tolist(), guessed, strict=True)
            assert count == sum(pair == (row, column) for pair in pairs)
    shares, guesses = logits[shown].softmax(dim=1).max(dim=1)
    predictions = json.loads(run_dir.predictions.read_text())
    assert [p["predicted"] for p in predictions] == [CLASSES[guess] for guess in guesses]
    assert [p["label"] for p in predictions] == [CLASSES[n] for n in batch["label"][shown]]
    assert [p["probability"] for p in predictions] == pytest.approx(shares.tolist(), abs=1e-4)
    preprocessor = json.loads((to / "preprocessor_config.json").read_text())
    assert preprocessor["crop_size"] == {"height": SIZE, "width": SIZE}
    assert preprocessor["image_mean"] == list(images.mean)

    # a run on it begins with its weights: as good before the first step as the other was after
    # its last
    sections = {"run": {"steps": 1}, "optim": {"lr": 1e-9}, "model": {"weights": "load"}}
    goes_on = make_image_run(tmp_path / "on", pictures, to, sections)
    run_on_ranks(train_here, 1, goes_on)
    found = _saved(goes_on, 1)
    for name, tensor in model.named_parameters():
        torch.testing.assert_close(found[f"model.{name}"], tensor.detach(), rtol=0, atol=1e-6)


@pytest.mark.system
def test_a_folder_of_other_classes_gets_a_new_head(pictures: Path, tmp_path: Path) -> None:
    folder = tmp_path / "network"
    theirs = AutoModelForImageClassification.from_config(
        AutoConfig.for_model("resnet", num_labels=7, **TINY["resnet"])
    )
    theirs.save_pretrained(folder)
    sections = {"run": {"steps": 1}, "optim": {"lr": 1e-9}, "model": {"weights": "load"}}
    run_dir = make_image_run(tmp_path / "run", pictures, folder, sections)
    run_on_ranks(train_here, 1, run_dir)
    found = _saved(run_dir, 1)
    assert found["model.classifier.1.weight"].shape == (4, 16)
    name = "resnet.embedder.embedder.convolution.weight"
    expected = theirs.get_parameter(name).detach()
    torch.testing.assert_close(found[f"model.{name}"], expected, rtol=0, atol=1e-6)


OVER_STEP: Layouts = {
    "2, recompute": (2, {"zero": 2, "dp_shard": 2}, {"recompute": "full"}),
    "3, the last has two": (3, {"zero": 3, "dp_shard": 3}, {}),
    "4, one has none": (4, {"dp_replicate": 4, "dp_shard": 1}, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["resnet", "efficientnet"])
def test_norms_over_a_step_are_those_of_one_micro_batch(
    kind: str, pictures: Path, tmp_path: Path
) -> None:
    network = write_network(tmp_path / "network", kind)
    sections = _sections(1, {}, {})
    sections["optim"] = {"micro_batch": 10}
    alone = make_image_run(tmp_path / "alone", pictures, network, sections)
    run_on_ranks(train_here, 1, alone)  # by torch's own batch normalisation
    expected, saved = _steps(alone), _saved(alone)
    for name, (processes, parallel, memory) in {"1": (1, {}, {}), **OVER_STEP}.items():
        sections = _sections(processes, parallel, memory, batch_norm="step")
        sections["optim"] = {"micro_batch": {1: 10, 2: 5}.get(processes, 4)}
        run_dir = make_image_run(tmp_path / name, pictures, network, sections)
        run_on_ranks(train_here, processes, run_dir)
        for found, wanted in zip(_steps(run_dir), expected, strict=True):
            assert found == pytest.approx(wanted, rel=1e-5), name
        for key, tensor in _saved(run_dir).items():
            if "running_" in key:
                torch.testing.assert_close(tensor, saved[key], rtol=1e-5, atol=1e-6, msg=key)
