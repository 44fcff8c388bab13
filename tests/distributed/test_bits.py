"""A rank whose bits are not those of the others is found and named; equal ones are not."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardyard.checkpoint.bitwise_compare import compare_bits
from shardyard.elastic.faults import read_faults
from shardyard.rundir.contracts import FAULTS_VARIABLE
from shardyard.rundir.jsonl import EventWriter, read_lines
from shardyard.rundir.layout import RunDir
from shardyard.train.determinism_check import RankBits, find_outliers
from shardyard.train.hooks import Hooks
from shardyard.train.run import train
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run, prepare_corpus


def odd(*bits: tuple[str, ...]) -> dict[int, str]:
    return find_outliers([RankBits(rank, "n", each) for rank, each in enumerate(bits)], "it")


def test_equal_bits_are_no_news() -> None:
    assert odd(("a", "a"), ("a", "a")) == odd(("a", "a")) == odd(("a",)) == {}


def test_the_odd_one_is_who_disagrees_with_most() -> None:
    assert odd(("a", "a"), ("b", "b"), ("a", "a")) == {
        1: "it has other bits than that of the other ranks"
    }


def test_of_two_the_odd_one_disagrees_with_itself() -> None:
    assert list(odd(("a", "b"), ("a", "a"))) == [0]


def test_two_ranks_that_each_agree_with_themselves_are_both_named() -> None:
    found = odd(("a", "a"), ("b", "b"))
    assert list(found) == [0, 1] and "any of them may be wrong" in found[0]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return prepare_corpus(tmp_path_factory.mktemp("corpus"))


def _train(run_dir: RunDir, faults: str, wrong_rank: int) -> str:
    rank = dist.get_rank()
    if rank == wrong_rank:
        _compute_wrongly()
    hooks = Hooks(
        generation=0,
        drain_requested=lambda: False,
        events=EventWriter(run_dir.events, attempt=0, generation=0) if rank == 0 else None,
        faults=read_faults({FAULTS_VARIABLE: faults}, rank=rank),
    )
    return train(run_dir, 0, hooks)


def _compute_wrongly() -> None:
    """Turn over one bit of what this process looks up where it learns nothing from it."""
    right = torch.nn.Embedding.forward

    def wrong(self: torch.nn.Embedding, ids: Tensor) -> Tensor:
        found = right(self, ids)
        if not torch.is_grad_enabled():
            found = found.clone()
            found.view(torch.int32).view(-1)[0] ^= 1 << 20
        return found

    setattr(torch.nn.Embedding, "forward", wrong)  # noqa: B010


@pytest.mark.system
@pytest.mark.parametrize(
    ("strategy", "faults", "wrong_rank", "found", "words"),
    [
        ("NO_SHARD", "", -1, [], ""),
        ("NO_SHARD", "bit@3:1", -1, [(4, 1), (6, 1)], "its copy of the weights has other bits"),
        ("FULL_SHARD", "", 2, [(2, 2), (4, 2), (6, 2)], "its loss of the same micro-batch has"),
    ],
    ids=["sound", "weight", "computation"],
)
def test_a_flipped_bit_is_found_and_its_rank_named(
    corpus: Corpus,
    tmp_path: Path,
    strategy: str,
    faults: str,
    wrong_rank: int,
    found: list[tuple[int, int]],
    words: str,
) -> None:
    sections: dict[str, dict[str, Any]] = {
        "run": {"steps": 6},
        "model": {"preset": "llama-tiny", "dropout": 0.1},
        "task": {"eval_every_steps": None},
        "parallel": {"strategy": strategy},
        "cluster": {"devices": 3},
        "elastic": {"check_bits_every": 2},
    }
    run_dir = make_run(tmp_path / "run", corpus, sections)
    assert set(run_on_ranks(_train, 3, run_dir, faults, wrong_rank)) == {"finished"}
    told = [e for e in read_lines(run_dir.events) if e["kind"] == "device_problem"]
    assert [(each["step"], each["rank"]) for each in told] == found
    assert all(each["node"] and each["cause"].startswith(words) for each in told)


@pytest.mark.system
def test_checks_change_no_bit_of_a_run_whose_sums_have_no_order(
    corpus: Corpus, tmp_path: Path
) -> None:
    """Both look at every bit; the check computes between steps, and draws and scales nothing."""
    sections: dict[str, dict[str, Any]] = {
        "run": {"steps": 4},
        "model": {"preset": "llama-tiny", "dropout": 0.1},
        "precision": {"reduce": "exact"},
        "parallel": {"strategy": "NO_SHARD"},
        "cluster": {"devices": 2},
    }
    runs = {}
    for name, every, faults in (("left", None, ""), ("checked", 1, ""), ("broken", 1, "bit@2:1")):
        elastic = {"check_bits_every": every}
        runs[name] = make_run(tmp_path / name, corpus, {**sections, "elastic": elastic})
        run_on_ranks(_train, 2, runs[name], faults, -1)
    problems = {
        name: [each["step"] for each in read_lines(run.events) if each["kind"] == "device_problem"]
        for name, run in runs.items()
    }
    assert problems["left"] == problems["checked"] == [] and 3 in problems["broken"]
    assert compare_bits(runs["left"], runs["checked"]).outcome == "equal"
    assert compare_bits(runs["left"], runs["broken"]).outcome == "different"
