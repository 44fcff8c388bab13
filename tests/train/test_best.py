"""Which evaluation of a run is its best: by loss, or by the first metric that it aims at."""

import math
from dataclasses import asdict

import pytest
import torch

from shardyard.config.tasks import TASKS, target_metric
from shardyard.train.state import Progress

METRICS = TASKS["image_classification"].targets


def _best(scores: list[float], by: str) -> int | None:
    progress = Progress()
    for step, score in enumerate(scores):
        progress.step = step
        progress.is_best(score, by=by, metric=METRICS[by])
    return progress.best_step


@pytest.mark.parametrize(
    ("by", "best"),
    [("loss", 1), ("top1", 3)],
)
def test_lower_is_better_of_a_loss_and_higher_of_a_share(by: str, best: int) -> None:
    assert _best([0.5, 0.2, 0.4, 0.9, 0.9], by) == best  # of two as good, the first


def test_a_run_is_judged_by_the_first_metric_of_its_target() -> None:
    assert target_metric(None) == "loss"
    assert target_metric({"top1": 0.9, "loss": 1.0}) == "top1"


def test_what_is_no_number_is_never_best() -> None:
    assert _best([float("nan"), 0.3], "top1") == 1
    assert _best([float("nan")], "loss") is None


def test_a_score_equal_to_the_target_reaches_it_and_one_that_is_no_number_never_does() -> None:
    loss, top1 = METRICS["loss"], METRICS["top1"]
    share = (torch.tensor(38.0, dtype=torch.float64) / 50).item()  # as an evaluation divides
    assert loss.is_reached(2.5, 2.5) and top1.is_reached(share, 0.76)
    assert not loss.is_reached(math.nextafter(2.5, 3), 2.5)
    assert not top1.is_reached(math.nextafter(0.76, 0), 0.76)
    assert not loss.is_reached(math.nan, 2.5) and not top1.is_reached(math.nan, 0.76)


def test_another_metric_begins_anew() -> None:
    progress = Progress(best_score=0.1, best_step=3, step=7)
    assert progress.is_best(0.05, by="top1", metric=METRICS["top1"])
    assert (progress.best_step, progress.best_by) == (7, "top1")


def test_a_checkpoint_from_before_has_its_best_loss() -> None:
    values = asdict(Progress(step=9, best_step=4))
    del values["best_score"], values["best_by"]
    progress = Progress.of_checkpoint({**values, "best_loss": 0.7})
    assert progress == Progress(step=9, best_step=4, best_score=0.7, best_by="loss")
