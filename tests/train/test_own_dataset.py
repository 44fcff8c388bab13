"""A dataset of the user's own next to a plain loop over it, in each layout, and after a resume."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    LlamaForCausalLM,
)

from shardyard.checkpoint.export import export
from shardyard.config.rules.custom_module import require_shape
from shardyard.config.schema.recipe import Recipe
from shardyard.data.order import sample_indices
from shardyard.data.own.dataset import seed_generators
from shardyard.data.own.prepare import prepare_own
from shardyard.data.own.samples import open_items
from shardyard.data.samples import identity_prepare
from shardyard.errors import RequestError
from shardyard.models.build import hf_config
from shardyard.rundir.attempt_files import read_resolved
from shardyard.rundir.jsonl import read_evaluations, read_steps
from shardyard.rundir.layout import RunDir
from shardyard.train.hooks import Hooks
from shardyard.train.loop import DRAINED, FINISHED, Loop
from shardyard.train.run import train
from shardyard.train.setup import set_up
from tests.data.own import own_datasets
from tests.distributed.image_runs import make_image_run, write_network
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run, train_here
from tests.distributed.whole import whole

pytestmark = pytest.mark.heavy

OWN = "tests.data.own.own_datasets"
BATCH, STEPS, LR, SEED = 5, 10, 0.1, 0
"""10 steps of 5 are more than an epoch of 40 items, whose noise is another in the second."""
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {"dp_replicate": 2, "dp_shard": 1}),
    (2, {"dp_shard": 2, "zero": 3}),
    (2, {"tp": 2}),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("items")
    recipe = Recipe.model_validate(
        {"model": {"preset": "llama-tiny"}, "data": _data(folder), "run": {"seed": SEED}}
    )
    facts = prepare_own(recipe, model_dir=None, progress=lambda *_: None)
    return Corpus("", str(folder), facts)


def _data(folder: Path | str) -> dict[str, Any]:
    return {
        "module": f"{OWN}:noisy", "dir": str(folder), "seq_len": 32, "tokenizer": "auto",
        "vocab_size": own_datasets.VOCAB, "source": "python-stdlib", "module_workers": 1,
    }  # fmt: skip


def sections(corpus: Corpus, processes: int = 1, **layout: Any) -> dict[str, Any]:
    return {
        "run": {"steps": STEPS, "seed": SEED},
        "data": _data(corpus.prepared),
        "optim": {
            "name": "sgd", "lr": LR, "momentum": 0.9, "schedule": "constant", "warmup_steps": 0,
            "global_batch": BATCH, "micro_batch": 2, "weight_decay": 0.0,
        },
        "parallel": layout,
        "checkpoint": {"every": 100},
        "cluster": {"devices": processes},
    }  # fmt: skip


def _loss(model: nn.Module, items: list[dict[str, Tensor]]) -> Tensor:
    """The mean over all tokens with a label, each item by itself, as transformers shifts labels."""
    total, count = torch.zeros(()), 0
    for item in items:
        logits_TV = model(input_ids=item["input_ids"][None]).logits[0, :-1]
        labels_T = item["labels"][1:]
        total = total + F.cross_entropy(logits_TV, labels_T, ignore_index=-100, reduction="sum")
        count += int((labels_T != -100).sum())
    return total / count


def _plain(training: Any) -> tuple[list[tuple[float, float]], dict[str, Tensor], float]:
    """The loop of the dataset's owner; only the order and the seeds of items are Shardyard's."""
    model = LlamaForCausalLM._from_config(hf_config(require_shape(training.resolved.shape)))
    names = dict(model.named_parameters())
    model.load_state_dict(
        {name: whole(training.tensors[f"model.{name}"]).clone() for name in names}, strict=False
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    dataset, held_out = own_datasets.noisy("train"), own_datasets.noisy("eval")
    state, found = torch.get_rng_state(), []
    for step in range(STEPS):
        places = np.arange(step * BATCH, (step + 1) * BATCH)
        items = []
        for place, index in zip(places, sample_indices(places, 40, seed=SEED), strict=True):
            seed_generators(SEED, "data.module", "train", int(place) // 40, int(index))
            items.append(dataset[int(index)])
        loss = _loss(model, items)
        torch.autograd.backward(loss)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append((float(loss.detach()), float(norm)))
    items = []
    for index in range(len(held_out)):
        seed_generators(SEED, "data.module", "eval", 0, index)
        items.append(held_out[index])
    with torch.no_grad():
        evaluated = float(_loss(model, items))
    torch.set_rng_state(state)
    return found, {name: each.detach() for name, each in model.named_parameters()}, evaluated


def _next_to_plain(run_dirs: list[RunDir]) -> list[Any]:
    answers = []
    for run_dir in run_dirs:
        hooks = Hooks(generation=0, drain_requested=lambda: False, events=None)
        training = set_up(run_dir, 0, hooks, local_rank=0)
        numbers, weights, evaluated = _plain(training)
        Loop(training).run()
        apart = []
        for name, wanted in weights.items():
            held = whole(training.tensors[f"model.{name}"])
            apart.append(float((held - wanted).norm() / wanted.norm()))
        training.close()
        answers.append((numbers, max(apart), evaluated))
    return answers


@pytest.mark.parametrize("processes", [1, 2])
def test_steps_and_validation_are_those_of_a_plain_loop(
    corpus: Corpus, tmp_path: Path, processes: int
) -> None:
    layouts = [layout for ranks, layout in LAYOUTS if ranks == processes]
    runs = [
        make_run(tmp_path / str(number), corpus, sections(corpus, processes, **layout))
        for number, layout in enumerate(layouts)
    ]
    answers = run_on_ranks(_next_to_plain, processes, runs)[0]
    for run_dir, layout, (numbers, apart, evaluated) in zip(runs, layouts, answers, strict=True):
        lines = read_steps(run_dir.metrics)
        assert [(line["loss"], line["grad_norm"]) for line in lines] == [
            pytest.approx(pair, rel=1e-5) for pair in numbers
        ], layout
        assert apart < 1e-5, layout
        found = read_evaluations(run_dir.metrics)[-1]["eval"]["loss"]
        assert found == pytest.approx(evaluated, rel=1e-5), layout


def _train(run_dir: RunDir, attempt: int, drain_at: int) -> str:
    calls = 0

    def drain_requested() -> bool:
        nonlocal calls
        calls += 1
        return calls == drain_at

    return train(
        run_dir, attempt, Hooks(generation=0, drain_requested=drain_requested, events=None)
    )


def _in_two_parts(once: RunDir, parts: RunDir) -> list[str]:
    return [_train(once, 0, 0), _train(parts, 0, 6), _train(parts, 1, 0)]


def test_a_resume_reads_the_same_items_bit_for_bit(corpus: Corpus, tmp_path: Path) -> None:
    given = sections(corpus, 2, dp_shard=2, zero=3)
    once, parts = make_run(tmp_path / "once", corpus, given), tmp_path / "parts"
    make_run(parts, corpus, given)
    run_dir = make_run(parts, corpus, given, attempt=1)
    answers = run_on_ranks(_in_two_parts, 2, once, run_dir)
    assert answers[0] == [FINISHED, DRAINED, FINISHED]
    found, wanted = (read_steps(each.metrics) for each in (run_dir, once))
    keys = ("step", "loss", "grad_norm", "tokens")
    assert [[line[key] for key in keys] for line in found] == [
        [line[key] for key in keys] for line in wanted
    ]


# Images and fields of a model ---------------------------------------------------------------------

PICTURE_BATCH, PICTURE_STEPS = 6, 5


def _picture_sections(processes: int, is_float: bool, **layout: Any) -> dict[str, Any]:
    return {
        "run": {"steps": PICTURE_STEPS, "seed": SEED},
        "data": {
            "module": f"{OWN}:pictures", "module_settings": {"is_float": is_float},
            "eval_fraction": 0.05, "module_workers": 1,
        },
        "optim": {
            "name": "sgd", "lr": 0.05, "momentum": 0.9, "nesterov": False, "weight_decay": 0.0,
            "schedule": "constant", "global_batch": PICTURE_BATCH, "micro_batch": 2,
        },
        "parallel": layout,
        "cluster": {"devices": processes},
    }  # fmt: skip


def _plain_pictures(training: Any, *, is_float: bool) -> list[float]:
    recipe = training.resolved.recipe
    config = AutoConfig.from_pretrained(recipe.model.path, num_labels=2)
    model = AutoModelForImageClassification.from_config(config)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(whole(training.tensors[f"model.{name}"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    dataset, losses = own_datasets.pictures("train", is_float), []
    mean, std = (torch.tensor(getattr(recipe.data.images, key))[:, None, None] for key in
                 ("mean", "std"))  # fmt: skip
    state = torch.get_rng_state()
    for step in range(PICTURE_STEPS):
        places = np.arange(step * PICTURE_BATCH, (step + 1) * PICTURE_BATCH)
        pixels, labels = [], []
        for place, index in zip(places, sample_indices(places, 24, seed=SEED), strict=True):
            seed_generators(SEED, "data.module", "train", int(place) // 24, int(index))
            image, label = dataset[int(index)]
            if not is_float:  # as torchvision's ToTensor and Normalize
                image = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
                image = (image - mean) / std
            pixels.append(image)
            labels.append(label)
        loss = model(pixel_values=torch.stack(pixels), labels=torch.tensor(labels)).loss
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), recipe.optim.grad_clip or torch.inf)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    torch.set_rng_state(state)
    return losses


def _next_to_plain_pictures(run_dirs: list[tuple[RunDir, bool]]) -> list[list[float]]:
    answers = []
    for run_dir, is_float in run_dirs:
        hooks = Hooks(generation=0, drain_requested=lambda: False, events=None)
        training = set_up(run_dir, 0, hooks, local_rank=0)
        answers.append(_plain_pictures(training, is_float=is_float))
        Loop(training).run()
        training.close()
    return answers


@pytest.mark.parametrize(("processes", "layout"), [(1, {}), (2, {"dp_shard": 2, "zero": 3})])
def test_pictures_are_trained_on_as_in_a_plain_loop(
    processes: int, layout: dict[str, Any], tmp_path: Path
) -> None:
    network = write_network(tmp_path / "network", "vit")
    runs = []
    for is_float in (True, False):
        sections = _picture_sections(processes, is_float, **layout)
        run_dir = make_image_run(tmp_path / f"{is_float}", tmp_path / "x", network, sections)
        runs.append((run_dir, is_float))
    answers = run_on_ranks(_next_to_plain_pictures, processes, runs)[0]
    for (run_dir, is_float), losses in zip(runs, answers, strict=True):
        found = [line["loss"] for line in read_steps(run_dir.metrics)]
        assert found == pytest.approx(losses, rel=1e-5), is_float
        judged = read_evaluations(run_dir.metrics)[-1]["eval"]
        assert {"loss", "top1"} <= judged.keys()


def test_the_report_has_predicted_images_of_ones_own_dataset(tmp_path: Path) -> None:
    network = write_network(tmp_path / "network", "vit")
    for is_float in (False, True):
        sections = _picture_sections(1, is_float)
        run_dir = make_image_run(tmp_path / f"{is_float}", tmp_path / "x", network, sections)
        run_on_ranks(train_here, 1, run_dir)
        resolved, to = read_resolved(run_dir.resolved(0)), tmp_path / f"export-{is_float}"
        plan = export(run_dir.checkpoint(PICTURE_STEPS), resolved, to)
        assert any("your dataset" in each for each in plan.extra_files.warnings)
        model = AutoModelForImageClassification.from_pretrained(to)
        assert model.config.id2label == {0: "dark", 1: "light"}
        if is_float:
            assert not (to / "preprocessor_config.json").exists()
            assert not run_dir.predictions.exists(), "colours of normalized floats are not known"
            continue
        shown = json.loads(run_dir.predictions.read_text())
        labels = [own_datasets.pictures("eval")[index][1] for index in range(6)]
        assert [each["label"] for each in shown] == [("dark", "light")[each] for each in labels]
        first = Image.open(io.BytesIO(base64.b64decode(shown[0]["jpeg"])))
        seed_generators(SEED, "data.module", "eval", 0, 0)
        wanted = np.asarray(own_datasets.pictures("eval")[0][0], dtype=np.float32)
        found = np.asarray(first, dtype=np.float32)
        assert abs(found.mean() - wanted.mean()) < 8, (found.mean(), wanted.mean())
        pixels = AutoImageProcessor.from_pretrained(to)(wanted.astype(np.uint8))["pixel_values"][0]
        mean, std = (np.array(getattr(resolved.recipe.data.images, key)) for key in ("mean", "std"))
        assert np.allclose(pixels, ((wanted / 255 - mean) / std).transpose(2, 0, 1), atol=1e-5)


def test_images_of_another_size_than_the_networks_are_an_error(tmp_path: Path) -> None:
    network = write_network(tmp_path / "network", "vit")
    sections = _picture_sections(1, is_float=True)
    sections["data"]["images"] = {"size": 32}
    run_dir = make_image_run(tmp_path / "run", tmp_path / "x", network, sections)
    resolved = read_resolved(run_dir.resolved(0))
    with pytest.raises(RequestError, match=r"are 16 x 16, and data\.images\.size=32\. Set data"):
        open_items(resolved, vocab_size=None, prepare=lambda _: identity_prepare)


def linear(*, vocab_size: int, seq_len: int) -> tuple[nn.Module, Any]:  # noqa: ARG001
    """A model of a table's rows, with its loss."""

    def loss_sum(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        return (model(batch["x"])[:, 0] - batch["y"]).square().sum(), len(batch["y"])

    return nn.Linear(3, 1), loss_sum


def test_a_model_of_ones_own_gets_the_fields_of_ones_own_dataset(tmp_path: Path) -> None:
    data = {**_data(tmp_path), "module": f"{OWN}:table", "seq_len": 1}
    model = {"preset": None, "module": "tests.train.test_own_dataset:linear"}
    sections: dict[str, Any] = {
        "run": {"steps": 30, "seed": SEED}, "model": model, "data": data,
        "optim": {
            "name": "sgd", "lr": 0.1, "momentum": 0.0, "schedule": "constant", "warmup_steps": 0,
            "global_batch": 8, "micro_batch": 3, "weight_decay": 0.0, "grad_clip": 100.0,
        },
    }  # fmt: skip
    recipe = Recipe.model_validate({"model": model, "data": data, "run": {"seed": SEED}})
    facts = prepare_own(recipe, model_dir=None, progress=lambda *_: None)
    assert facts.item_kind == "fields"
    run_dir = make_run(tmp_path / "run", Corpus("", str(tmp_path), facts), sections)
    run_on_ranks(train_here, 1, run_dir)
    torch.manual_seed(SEED)
    plain, loss_sum = linear(vocab_size=0, seq_len=0)
    optimizer, rows, losses = torch.optim.SGD(plain.parameters(), lr=0.1), own_datasets.table, []
    for step in range(30):
        chosen = sample_indices(np.arange(step * 8, step * 8 + 8), 32, seed=SEED)
        items = [rows("train")[int(index)] for index in chosen]
        batch = {
            key: torch.tensor(np.array([item[key] for item in items]), dtype=torch.float32)
            for key in ("x", "y")
        }
        total, count = loss_sum(plain, batch)
        torch.autograd.backward(total / count)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total.detach() / count))
    found = [line["loss"] for line in read_steps(run_dir.metrics)]
    assert found == pytest.approx(losses, rel=1e-5) and losses[-1] < 1e-2
