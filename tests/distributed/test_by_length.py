"""A model that is told where documents begin learns what it learns with a mask, on every layout.

torch has the operator for CUDA alone: a CPU is given one, and is said to be able to
(tests/models/varlen_on_cpu.py).
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardyard.config import formulas
from shardyard.rundir.jsonl import EventWriter, read_evaluations, read_lines, read_steps
from shardyard.rundir.layout import RunDir
from shardyard.tasks import token_losses
from shardyard.train.hooks import Hooks
from shardyard.train.run import train
from tests.distributed import runs
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run, prepare_corpus
from tests.families.random_models import small_shape, theirs

TOLERANCE = 2e-6
BY_LENGTH = "flash by length"

Sections = dict[str, dict[str, Any]]
LAYOUTS: list[tuple[int, Sections]] = [
    (1, {}),
    (1, {"memory": {"recompute": "selective"}, "data": {"pack": "whole"}}),
    (2, {"parallel": {"pp": 2}, "optim": {"micro_batch": 2}}),
    (2, {"parallel": {"tp": 2}, "memory": {"recompute": "full"}}),
    (2, {"parallel": {"dp_shard": 2, "zero": 3}, "model": {"dropout": 0.1}}),
]


@pytest.fixture(scope="module")
def short_documents(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "DOCUMENT_CHARACTERS", 90)  # some of 30 tokens
        return prepare_corpus(tmp_path_factory.mktemp("corpus"))


def _told_lengths(run_dir: RunDir) -> None:
    from tests.models import varlen_on_cpu

    assert varlen_on_cpu.__doc__, "gives a CPU the operator"
    vars(formulas)["_varlen_unsupported_reason"] = lambda *_: None
    _with_a_mask(run_dir)


def _told_of_one_document(run_dir: RunDir) -> None:
    def one(positions_BL: torch.Tensor, places: int | None = None) -> torch.Tensor:  # noqa: ARG001
        return torch.zeros(len(positions_BL), 1, dtype=torch.int32)

    vars(token_losses)["document_starts"] = one
    _told_lengths(run_dir)


def _with_a_mask(run_dir: RunDir) -> None:
    events = EventWriter(run_dir.events, attempt=0, generation=0) if dist.get_rank() == 0 else None
    train(run_dir, 0, Hooks(generation=0, drain_requested=lambda: False, events=events))


def _losses(run_dir: RunDir) -> list[float]:
    of_steps = [line["loss"] for line in read_steps(run_dir.metrics)]
    return [*of_steps, *(line["eval"]["loss"] for line in read_evaluations(run_dir.metrics))]


def _ready(run_dir: RunDir) -> dict[str, Any]:
    [ready] = [event for event in read_lines(run_dir.events) if event["kind"] == "model_ready"]
    return ready


@pytest.mark.heavy
@pytest.mark.parametrize(("processes", "own"), LAYOUTS)
def test_losses_are_those_with_a_mask(
    short_documents: Corpus, tmp_path: Path, processes: int, own: Sections
) -> None:
    base: Sections = {
        "run": {"steps": 4},
        "model": {"preset": "llama-tiny", "dropout": 0.0, "attention": "flash"},
        "data": {"seq_len": 128, "attend_across_documents": False},
        "optim": {"global_batch": 4},
        "cluster": {"devices": processes},
    }
    sections = {name: {**base.get(name, {}), **own.get(name, {})} for name in base | own}
    masked = make_run(tmp_path / "masked", short_documents, sections)
    told = make_run(tmp_path / "told", short_documents, sections)
    run_on_ranks(_with_a_mask, processes, masked)
    run_on_ranks(_told_lengths, processes, told)
    assert (_ready(masked)["attention"], _ready(told)["attention"]) == ("flash", BY_LENGTH)
    assert _losses(told) == pytest.approx(_losses(masked), abs=TOLERANCE)


@pytest.mark.heavy
def test_a_document_that_is_not_told_of_changes_losses(
    short_documents: Corpus, tmp_path: Path
) -> None:
    sections: Sections = {
        "run": {"steps": 2},
        "model": {"attention": "flash"},
        "data": {"seq_len": 128, "attend_across_documents": False},
    }
    right, wrong = (make_run(tmp_path / name, short_documents, sections) for name in "ab")
    run_on_ranks(_told_lengths, 1, right)
    run_on_ranks(_told_of_one_document, 1, wrong)
    assert abs(_losses(right)[0] - _losses(wrong)[0]) > 100 * TOLERANCE


@pytest.mark.heavy
def test_a_window_needs_no_mask_either(short_documents: Corpus, tmp_path: Path) -> None:
    shape = replace(small_shape("mistral"), sliding_window=5, vocab_size=520)
    theirs(shape).save_pretrained(tmp_path / "source")
    sections: Sections = {
        "run": {"steps": 3},
        "model": {"preset": None, "path": str(tmp_path / "source"), "weights": "load",
                  "attention": "flash"},
    }  # fmt: skip
    masked = make_run(tmp_path / "masked", short_documents, sections)
    told = make_run(tmp_path / "told", short_documents, sections)
    run_on_ranks(_with_a_mask, 1, masked)
    run_on_ranks(_told_lengths, 1, told)
    assert _ready(told)["attention"] == BY_LENGTH
    assert _losses(told) == pytest.approx(_losses(masked), abs=TOLERANCE)
