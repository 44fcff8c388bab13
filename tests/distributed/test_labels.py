"""Heads over labels: steps are those of transformers' own models in a plain loop, in every layout;
evaluations are those of their outputs, and an export opens with equal logits."""

from pathlib import Path
from typing import Any

import pytest

from shardyard.rundir.jsonl import read_evaluations, read_steps
from tests.distributed.label_runs import labelled_run, next_to_a_plain_loop, prepare_rows
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, train_here

CASES = {
    "pairs": ("pairs", "bert-tiny"),
    "numbers": ("numbers", "bert-tiny"),
    "last token": ("single", "llama-tiny"),
    "tokens": ("tokens", "bert-tiny"),
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Corpus]:
    """Rows of each case, prepared."""
    return {
        name: prepare_rows(tmp_path_factory.mktemp(name.replace(" ", "-")) / "data", *case)
        for name, case in CASES.items()
    }


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_transformers_own_model(
    prepared: dict[str, Corpus], tmp_path: Path, name: str
) -> None:
    run_dir = labelled_run(tmp_path / "run", prepared[name], *CASES[name])
    expected, _, apart = run_on_ranks(next_to_a_plain_loop, 1, run_dir)[0]
    losses = [line["loss"] for line in read_steps(run_dir.metrics)]
    assert losses == pytest.approx(expected, rel=1e-5)
    # no softmax sees a bias of keys: its gradient is rounding alone
    seen = {name: far for name, far in apart.items() if not name.endswith("key.bias")}
    assert max(seen.values()) < 1e-4, seen


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp": (2, {"dp_replicate": 2}),
    "zero-1": (2, {"dp_shard": 2, "zero": 1}),
    "zero-2": (2, {"dp_shard": 2, "zero": 2}),
    "zero-3": (2, {"dp_shard": 2, "zero": 3}),
    "tp": (2, {"tp": 2}),
    "cp": (2, {"cp": 2}),
    "pp": (2, {"pp": 2}),
    "tp and cp": (4, {"tp": 2, "cp": 2}),
    "tp and dp": (4, {"tp": 2, "dp_shard": 2}),
}
QUICK = {"pairs": ["zero-3", "tp"], "last token": ["tp"], "tokens": ["tp"]}


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        *QUICK.items(),
        *(
            pytest.param(name, [each for each in LAYOUTS if each not in QUICK.get(name, [])],
                         marks=pytest.mark.slow)
            for name in CASES
        ),
    ],
)  # fmt: skip
def test_every_layout_takes_the_steps_of_one_process(
    prepared: dict[str, Corpus], tmp_path: Path, name: str, layouts: list[str]
) -> None:
    """With dropout, and micro-batches that do not divide evenly over the ranks."""
    model = {"model": {"preset": CASES[name][1], "dropout": 0.1}}
    one = labelled_run(tmp_path / "one", prepared[name], *CASES[name], **model)
    run_on_ranks(train_here, 1, one)
    losses = [line["loss"] for line in read_steps(one.metrics)]
    evaluated = [line["eval"] for line in read_evaluations(one.metrics)]
    for layout in layouts:
        processes, parallel = LAYOUTS[layout]
        other = labelled_run(
            tmp_path / layout, prepared[name], *CASES[name], processes, **model, parallel=parallel
        )
        run_on_ranks(train_here, processes, other)
        found = [line["loss"] for line in read_steps(other.metrics)]
        assert found == pytest.approx(losses, rel=1e-5), layout
        again = [line["eval"] for line in read_evaluations(other.metrics)]
        assert len(again) == len(evaluated) == 1
        # a correlation is of differences, which cancel
        assert again[0] == pytest.approx(evaluated[0], rel=1e-5, abs=2e-3), layout
