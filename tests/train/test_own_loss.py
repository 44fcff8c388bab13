"""A loss and metrics of the user's own beside a plain loop of transformers, in each layout."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from shardyard.config.rules.custom_module import require_shape
from shardyard.models.build import hf_config
from shardyard.rundir.jsonl import read_evaluations, read_steps
from shardyard.rundir.layout import RunDir
from shardyard.train.hooks import Hooks
from shardyard.train.loop import DRAINED, FINISHED, Loop
from shardyard.train.run import train
from shardyard.train.setup import set_up
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run, prepare_corpus, train_here
from tests.distributed.whole import whole
from tests.train import own_functions

pytestmark = pytest.mark.heavy

OWN = "tests.train.own_functions"
BATCH, STEPS, LR = 5, 3, 0.1
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {"dp_replicate": 2, "dp_shard": 1}),
    (2, {"dp_shard": 2, "zero": 3}),
    (2, {"tp": 2}),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return prepare_corpus(tmp_path_factory.mktemp("corpus"))


def sections(
    processes: int = 1, *, loss: str | None = "smoothed", metrics: tuple[str, ...] = (), **more: Any
) -> dict[str, Any]:
    return {
        "run": {"steps": STEPS, **more.pop("run", {})},
        "task": {
            **({} if loss is None else {"loss": f"{OWN}:{loss}"}),
            "metrics": [f"{OWN}:{each}" for each in metrics],
            **more.pop("task", {}),
        },
        "optim": {
            "name": "sgd", "lr": LR, "momentum": 0.9, "schedule": "constant", "warmup_steps": 0,
            "global_batch": BATCH, "micro_batch": 2, "weight_decay": 0.0,
        },
        "parallel": more,
        "checkpoint": {"every": 100},
        "cluster": {"devices": processes},
    }  # fmt: skip


def _plain(training: Any) -> tuple[list[tuple[float, float]], dict[str, Tensor], dict[str, float]]:
    """The loop that everybody would write, and the metrics of all validation samples at its end."""
    model = LlamaForCausalLM._from_config(hf_config(require_shape(training.resolved.shape)))
    names = dict(model.named_parameters())
    model.load_state_dict(
        {name: whole(training.tensors[f"model.{name}"]).clone() for name in names}, strict=False
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    found = []
    for step in range(STEPS):
        batch = training.train_source.micro_batch(range(step * BATCH, (step + 1) * BATCH), BATCH)
        loss_sum, count = own_functions.smoothed(model(batch["tokens"]).logits, dict(batch.fields))
        torch.autograd.backward(loss_sum / count)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append((float(loss_sum.detach() / count), float(norm)))
    source = training.eval_source
    batch = source.micro_batch(range(source.num_samples), source.num_samples)
    with torch.no_grad():
        logits, fields = model(batch["tokens"]).logits, dict(batch.fields)
        loss_sum, count = own_functions.smoothed(logits, fields)
        right, predicted = own_functions.hits(logits, fields)
        scores = {
            "loss": float(loss_sum / count),
            "hits": float(right.sum() / predicted.sum()),
            "longest": float(own_functions.longest(logits, fields).mean()),
        }
    return found, {name: each.detach() for name, each in model.named_parameters()}, scores


def _beside(run_dirs: list[RunDir]) -> list[Any]:
    answers = []
    for run_dir in run_dirs:
        hooks = Hooks(generation=0, drain_requested=lambda: False, events=None)
        training = set_up(run_dir, 0, hooks, local_rank=0)
        numbers, weights, scores = _plain(training)
        Loop(training).run()
        apart = []
        for name, wanted in weights.items():
            held = whole(training.tensors[f"model.{name}"])
            apart.append(float((held - wanted).norm() / wanted.norm()))
        training.close()
        answers.append((numbers, max(apart), scores))
    return answers


@pytest.mark.parametrize("processes", [1, 2])
def test_steps_and_metrics_are_those_of_a_plain_loop(
    corpus: Corpus, tmp_path: Path, processes: int
) -> None:
    layouts = [layout for ranks, layout in LAYOUTS if ranks == processes]
    runs = [
        make_run(
            tmp_path / str(number), corpus,
            sections(processes, metrics=("hits", "longest"), **layout),
        )
        for number, layout in enumerate(layouts)
    ]  # fmt: skip
    answers = run_on_ranks(_beside, processes, runs)[0]
    for run_dir, layout, (numbers, apart, scores) in zip(runs, layouts, answers, strict=True):
        lines = read_steps(run_dir.metrics)
        assert [(line["loss"], line["grad_norm"]) for line in lines] == [
            pytest.approx(pair, rel=1e-5) for pair in numbers
        ], layout
        assert apart < 1e-5, layout
        evaluated = read_evaluations(run_dir.metrics)[-1]["eval"]
        assert evaluated == pytest.approx(scores, rel=1e-5), layout


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
    return [_train(once, 0, 0), _train(parts, 0, 2), _train(parts, 1, 0)]


def test_a_resume_takes_the_same_steps_bit_for_bit(corpus: Corpus, tmp_path: Path) -> None:
    given = sections(2, metrics=("hits",), dp_shard=2, zero=3)
    once = make_run(tmp_path / "once", corpus, given)
    parts = make_run(tmp_path / "parts", corpus, given)
    make_run(parts.path, corpus, given, attempt=1)
    outcomes = run_on_ranks(_in_two_parts, 2, once, parts)[0]
    assert outcomes == [FINISHED, DRAINED, FINISHED]
    ends = [
        (read_steps(each.metrics)[-1]["loss"], read_evaluations(each.metrics)[-1]["eval"])
        for each in (once, parts)
    ]
    assert ends[0] == ends[1]


def test_without_a_loss_of_its_own_metrics_are_beside_those_of_the_task(
    corpus: Corpus, tmp_path: Path
) -> None:
    given = sections(loss=None, metrics=("hits",))
    given["memory"] = {"loss_chunk": 16}
    plain = make_run(tmp_path / "plain", corpus, sections(loss=None))
    run_dir = make_run(tmp_path / "run", corpus, given)
    for each in (plain, run_dir):
        run_on_ranks(train_here, 1, each)
    scores = [read_evaluations(each.metrics)[-1]["eval"] for each in (plain, run_dir)]
    assert 0 < scores[1].pop("hits") < 1
    assert scores[0] == pytest.approx(scores[1], rel=1e-6)


def test_a_run_stops_at_a_target_of_a_metric_of_its_own(corpus: Corpus, tmp_path: Path) -> None:
    asked: dict[str, Any] = {
        "run": {"target": {"longest": 1e3}}, "task": {"eval_every_steps": 1},
    }  # fmt: skip
    higher = make_run(tmp_path / "higher", corpus, sections(metrics=("longest",), **asked))
    asked["task"]["lower_is_better"] = ["longest"]
    lower = make_run(tmp_path / "lower", corpus, sections(metrics=("longest",), **asked))
    for each in (higher, lower):
        run_on_ranks(train_here, 1, each)
    assert [len(read_steps(each.metrics)) for each in (higher, lower)] == [STEPS, 1]


@pytest.mark.parametrize(
    ("loss", "metrics", "words"),
    [
        ("mean", (), ["own_functions.py:", "returned float32 ()", "how many they are"]),
        (
            "wrong_shape", (),
            ["own_functions.py:", " in wrong_shape: `return F.cross_entropy(",
             "float32 (2, 32, 512)", "targets: int64 (2, 32)"],
        ),
        ("detached", (), ["does not depend on the outputs by autograd"]),
        ("smoothed", ("of_batch",), ["task.metrics.of_batch=", "the batch has 2 samples"]),
    ],
)  # fmt: skip
def test_a_mistake_names_its_line_and_what_it_got(
    corpus: Corpus, tmp_path: Path, loss: str, metrics: tuple[str, ...], words: list[str]
) -> None:
    run_dir = make_run(tmp_path / "run", corpus, sections(loss=loss, metrics=metrics))
    with pytest.raises(RuntimeError, match="RequestError") as caught:
        run_on_ranks(train_here, 1, run_dir)
    text = str(caught.value)
    assert all(word in text for word in words), text
    places = [text.find(word) for word in words]
    assert all(first < second for first, second in pairwise(places)), text
