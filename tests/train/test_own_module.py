"""A recipe with a module of the user's own beside the loop that its owner would write."""

import os
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from shardyard.checkpoint.export import export
from shardyard.checkpoint.verify import read_manifest
from shardyard.errors import RequestError
from shardyard.rundir.attempt_files import read_resolved
from shardyard.rundir.jsonl import read_evaluations, read_steps
from shardyard.rundir.layout import RunDir
from shardyard.tasks.language import vocabulary
from shardyard.train.hooks import Hooks
from shardyard.train.loop import DRAINED, FINISHED, Loop
from shardyard.train.run import train
from shardyard.train.setup import set_up
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run, prepare_corpus
from tests.distributed.whole import whole

pytestmark = pytest.mark.heavy

EXAMPLE = Path(__file__).parents[2] / "examples" / "own-module"
LR, BATCH, STEPS = 0.3, 6, 4
SHARDED: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {"dp_shard": 2, "zero": 1}),
    (2, {"dp_shard": 2, "zero": 3}),
    (2, {"dp_replicate": 2, "dp_shard": 1}),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return prepare_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(autouse=True)
def _where_the_module_is(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(EXAMPLE)
    monkeypatch.setattr(sys, "path", [str(EXAMPLE), *sys.path])
    yield
    sys.modules.pop("convolutions", None)


def sections(processes: int, *, module: str = "steady:build", **parallel: Any) -> dict[str, Any]:
    return {
        "run": {"steps": STEPS},
        "model": {"preset": None, "module": module, "blocks": ["blocks"]},
        "optim": {
            "name": "sgd", "lr": LR, "momentum": 0.9, "grad_clip": 0.5, "schedule": "constant",
            "warmup_steps": 0, "global_batch": BATCH, "micro_batch": 2,
        },
        "memory": {"recompute": "full"},
        "parallel": parallel,
        "checkpoint": {"every": 100},
        "cluster": {"devices": processes},
    }  # fmt: skip


@pytest.fixture
def steady(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example's module without dropout, as ``steady``."""
    text = (EXAMPLE / "convolutions.py").read_text().replace("dropout=0.1", "dropout=0.0")
    (tmp_path / "steady.py").write_text(text)
    monkeypatch.chdir(tmp_path)


Numbers = list[tuple[float, float]]


def _plain(
    samples: Any, vocab_size: int, frozen: tuple[str, ...]
) -> tuple[Numbers, dict[str, Tensor]]:
    """The loop that the module's owner would write."""
    sys.path.insert(0, os.getcwd())  # noqa: PTH109
    torch.manual_seed(0)
    model, loss_sum = import_module("steady").build(vocab_size=vocab_size, seq_len=32)
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith(frozen))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    found = []
    for step in range(STEPS):
        batch = samples.micro_batch(range(step * BATCH, (step + 1) * BATCH), BATCH)
        total, count = loss_sum(model, batch.fields)
        (total / count).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        found.append((float(total.detach() / count), float(norm)))
    return found, {name: each.detach() for name, each in model.named_parameters()}


def _beside(run_dirs: list[RunDir]) -> list[tuple[Numbers, float]]:
    """Of each run: the plain loop's numbers, and how far apart the weights are, of their norm."""
    answers = []
    for run_dir in run_dirs:
        hooks = Hooks(generation=0, drain_requested=lambda: False, events=None)
        training = set_up(run_dir, 0, hooks, local_rank=0)
        frozen = training.resolved.recipe.model.frozen
        numbers, weights = _plain(training.train_source, vocabulary(training.resolved), frozen)
        loop = Loop(training)
        for _ in range(STEPS):
            loop.step()
        apart = []
        for name, wanted in weights.items():
            found = whole(training.tensors[f"model.{name}"])
            apart.append(float((found - wanted).norm() / wanted.norm()))
        training.close()
        answers.append((numbers, max(apart)))
    return answers


@pytest.mark.usefixtures("steady")
@pytest.mark.parametrize(
    ("processes", "frozen"), [(1, ()), (2, ()), (2, ("table", "blocks.0", "blocks.1.norm"))]
)
def test_four_steps_are_those_of_a_plain_loop(
    corpus: Corpus, tmp_path: Path, processes: int, frozen: tuple[str, ...]
) -> None:
    runs = []
    for number, (asked, parallel) in enumerate(SHARDED):
        if asked == processes:
            given = sections(processes, **parallel)
            given["model"]["frozen"] = frozen
            runs.append(make_run(tmp_path / str(number), corpus, given))
    answers = run_on_ranks(_beside, processes, runs)[-1]
    for run_dir, (numbers, apart) in zip(runs, answers, strict=True):
        lines = read_steps(run_dir.metrics)
        for line, pair in zip(lines, numbers, strict=True):
            assert (line["loss"], line["grad_norm"]) == pytest.approx(pair, rel=1e-5)
            assert line["mfu"] is None
        assert apart < 1e-5


@pytest.mark.usefixtures("steady")
@pytest.mark.parametrize("processes", [1, 2])
def test_a_parameter_without_a_dimension_trains_where_each_process_holds_it_whole(
    corpus: Corpus, tmp_path: Path, processes: int
) -> None:
    """As CLIP's logit_scale; compared with the plain loop, and saved and resumed."""
    with (tmp_path / "steady.py").open("a") as file:
        file.write(
            "\n\nimport torch\n\n_build = build\n\n\ndef build(**given):\n"
            "    model, loss_sum = _build(**given)\n"
            "    model.logit_scale = torch.nn.Parameter(torch.tensor(2.0))\n"
            "    forward = model.forward\n"
            "    model.forward = lambda *a, **k: forward(*a, **k) * model.logit_scale\n"
            "    return model, loss_sum\n"
        )
    given = sections(processes, dp_replicate=processes, dp_shard=1)
    run_dir = make_run(tmp_path / "run", corpus, given)
    for numbers, apart in run_on_ranks(_beside, processes, [run_dir])[-1]:
        lines = read_steps(run_dir.metrics)
        assert [(line["loss"], line["grad_norm"]) for line in lines] == [
            pytest.approx(pair, rel=1e-5) for pair in numbers
        ]
        assert apart < 1e-5
    whole_run = make_run(tmp_path / "whole", corpus, given)
    parts = make_run(tmp_path / "parts", corpus, given)
    make_run(parts.path, corpus, given, attempt=1)
    assert run_on_ranks(_in_two_parts, processes, whole_run, parts)[0] == [
        FINISHED, DRAINED, FINISHED,
    ]  # fmt: skip
    ends = [read_steps(each.metrics)[-1]["loss"] for each in (whole_run, parts)]
    assert ends[0] == ends[1]


def _train(run_dir: RunDir, attempt: int, drain_at: int) -> str:
    calls = 0

    def drain_requested() -> bool:
        nonlocal calls
        calls += 1
        return calls == drain_at

    hooks = Hooks(generation=0, drain_requested=drain_requested, events=None)
    return train(run_dir, attempt, hooks)


def _in_two_parts(whole: RunDir, parts: RunDir) -> list[str]:
    return [_train(whole, 0, 0), _train(parts, 0, 2), _train(parts, 1, 0)]


def test_a_module_with_dropout_resumes_bit_for_bit_and_is_exported(
    corpus: Corpus, tmp_path: Path
) -> None:
    asked = sections(2, module="convolutions:build", dp_shard=2)
    whole = make_run(tmp_path / "whole", corpus, asked)
    parts = make_run(tmp_path / "parts", corpus, asked)
    make_run(parts.path, corpus, asked, attempt=1)
    assert run_on_ranks(_in_two_parts, 2, whole, parts)[0] == [FINISHED, DRAINED, FINISHED]
    digests = [read_manifest(run.checkpoint(STEPS)).files for run in (whole, parts)]
    assert digests[0] == digests[1]
    assert list(read_evaluations(whole.metrics)[-1]["eval"]) == [
        "loss",
        "perplexity",
        "bits_per_byte",
    ]

    resolved = read_resolved(whole.resolved(0))
    export(whole.checkpoint(STEPS), resolved, tmp_path / "out")
    size = vocabulary(resolved)
    model, _ = import_module("convolutions").build(vocab_size=size, seq_len=32)
    first = {name: each.clone() for name, each in model.state_dict().items()}
    model.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    assert not torch.equal(model.state_dict()["head.weight"], first["head.weight"])
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert not (tmp_path / "out" / "config.json").exists()


def _refused(run_dirs: dict[str, RunDir]) -> dict[str, str]:
    found = {}
    for name, run_dir in run_dirs.items():
        try:
            set_up(run_dir, 0, Hooks(generation=0, drain_requested=bool, events=None), local_rank=0)
        except RequestError as error:
            found[name] = str(error)
    return found


def test_what_a_function_returns_is_held_to_what_it_must(corpus: Corpus, tmp_path: Path) -> None:
    lines = [
        "import random, torch",
        "from torch import nn",
        "def alone(**_): return nn.Linear(2, 2)",
        "def no_loss(**_): return nn.Linear(2, 2), 3",
        "def other(**_): return nn.Linear(2, 2), print",
        "def scalar(**_):",
        "    model = nn.Linear(2, 2); model.scale = nn.Parameter(torch.tensor(2.5))",
        "    return model.bfloat16(), print",
    ]
    (tmp_path / "wrong.py").write_text("\n".join(lines))
    os.chdir(tmp_path)
    places = {name: f"wrong:{name}" for name in ("alone", "no_loss", "other", "scalar", "gone")}
    places["nowhere"] = "wrong.deeper:build"
    runs = {
        name: make_run(tmp_path / name, corpus, sections(1, module=place))
        for name, place in places.items()
    }
    told = run_on_ranks(_refused, 1, runs)[0]
    expected = {
        "alone": "returned a Linear. It must return two things: an nn.Module, and a function",
        "no_loss": "returned (Linear, int). It must return two things",
        "other": "model.blocks='blocks' names no module",
        "scalar": "with its value: nn.Parameter(torch.tensor([2.5])) computes the same. Or let ",
        "gone": "wrong.py has no gone. Define it",
        "nowhere": "module wrong.deeper is not found here",
    }
    assert told.keys() == expected.keys()
    assert {name: text for name, text in expected.items() if text not in told[name]} == {}, told
