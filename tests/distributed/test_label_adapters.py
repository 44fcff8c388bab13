"""Adapters with a head over labels: steps are PEFT's in every layout, and exports open in PEFT."""

from pathlib import Path
from typing import Any

import pytest
import torch

from shardyard.config.adapter_files import read_adapter_folder
from shardyard.config.rules.custom_module import require_shape
from shardyard.parallel.gradients import local_part
from shardyard.planner.memory import memory
from shardyard.planner.workload import workload_of
from shardyard.rundir.attempt_files import read_resolved
from shardyard.rundir.jsonl import read_evaluations, read_steps
from shardyard.rundir.layout import RunDir
from tests.distributed.label_adapters import (
    CASES,
    SGD,
    adapter_run,
    base_folder,
    first_loss,
    loss_of_saved_adapter,
    next_to_peft,
    train_and_open,
)
from tests.distributed.label_runs import (
    LAYOUTS,
    open_run,
    prepare_rows,
    saved_weights,
    train_until_killed,
)
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, resolve_layout, train_here

SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("tokens", "numbers")]
SYSTEM = pytest.mark.system


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Corpus, Path]]:
    """Prepared rows and a base of each case."""
    found = {}
    for name, (kind, preset, _) in CASES.items():
        folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
        corpus = prepare_rows(folder / "data", kind, preset)
        found[name] = (corpus, base_folder(folder / "base", corpus, kind, preset))
    return found


@pytest.mark.parametrize("name", ["pairs", "last token", *SLOW])
def test_steps_are_those_of_peft(
    cases: dict[str, tuple[Corpus, Path]], tmp_path: Path, name: str
) -> None:
    pytest.importorskip("peft", reason="the dev extra has it")
    run_dir = adapter_run(tmp_path / "run", cases[name][0], name, cases[name][1], optim=SGD)
    found = run_on_ranks(next_to_peft, 1, run_dir)[0]
    losses = [line["loss"] for line in read_steps(run_dir.metrics)]
    assert losses == pytest.approx(found.losses, rel=1e-5)
    assert found.trained[0] == found.trained[1]
    assert max(found.apart.values()) < 1e-5, found.apart


QUICK = {"pairs": ["tp"]}


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
    cases: dict[str, tuple[Corpus, Path]], tmp_path: Path, name: str, layouts: list[str]
) -> None:
    """With dropout in the base, the head and the adapters."""
    corpus, base = cases[name]
    model = {"dropout": 0.1, "lora": {**CASES[name][2], "dropout": 0.1}}
    one = adapter_run(tmp_path / "one", corpus, name, base, model=model, optim=SGD)
    run_on_ranks(train_here, 1, one)
    losses = [line["loss"] for line in read_steps(one.metrics)]
    for layout in layouts:
        processes, parallel = LAYOUTS[layout]
        other = adapter_run(
            tmp_path / layout, corpus, name, base, processes, model=model, optim=SGD,
            parallel=parallel,
        )  # fmt: skip
        run_on_ranks(train_here, processes, other)
        found = [line["loss"] for line in read_steps(other.metrics)]
        assert found == pytest.approx(losses, rel=1e-5), layout


def test_an_interrupted_run_ends_with_the_same_bits(
    cases: dict[str, tuple[Corpus, Path]], tmp_path: Path
) -> None:
    """Ranks die after a checkpoint, without a word, and a second attempt continues from it."""
    corpus, base = cases["pairs"]
    sections: dict[str, Any] = {
        "checkpoint": {"every": 2},
        "parallel": {"dp_shard": 2, "zero": 3},
        "model": {"dropout": 0.1},
    }
    whole, cut = (
        adapter_run(tmp_path / name, corpus, "pairs", base, 2, **sections)
        for name in ("whole", "cut")
    )
    run_on_ranks(train_here, 2, whole)
    with pytest.raises(Exception, match="rank"):
        run_on_ranks(train_until_killed, 2, cut)
    assert cut.checkpoint_steps() == [2]
    run_on_ranks(train_here, 2, cut)
    weights = [saved_weights(run_dir) for run_dir in (whole, cut)]
    heads = {"model.classifier.weight", "model.classifier.bias", "model.bert.pooler.dense.weight"}
    assert heads < weights[0].keys() == weights[1].keys()
    assert "model.bert.embeddings.LayerNorm.weight" not in weights[0], "the base is left out"
    assert all(torch.equal(each, weights[1][name]) for name, each in weights[0].items())


@pytest.mark.parametrize("name", ["pairs", pytest.param("last token", marks=SYSTEM), *SLOW])
def test_exports_open_in_peft_and_in_transformers_with_equal_logits(
    cases: dict[str, tuple[Corpus, Path]], tmp_path: Path, name: str
) -> None:
    pytest.importorskip("peft", reason="the dev extra has it")
    corpus, base = cases[name]
    run_dir = adapter_run(tmp_path / "run", corpus, name, base)
    found = run_on_ranks(train_and_open, 1, run_dir, tmp_path)[0]
    evaluated = next(iter(read_evaluations(run_dir.metrics)))["eval"]
    assert found.loss == pytest.approx(evaluated["loss"], rel=1e-5)
    torch.testing.assert_close(found.merged, found.adapter, rtol=1e-5, atol=1e-5)
    assert (found.adapter - found.base).norm() > 1e-3 * found.base.norm()
    names = corpus.facts.label_names or ["LABEL_0"]
    assert found.id2label == dict(enumerate(names))
    again = adapter_run(
        tmp_path / "again", corpus, name, base, optim={**SGD, "lr": 1e-30}, run={"steps": 1},
        model={"lora": {**CASES[name][2], "path": str(tmp_path / "adapter")}},
    )  # fmt: skip
    run_on_ranks(train_here, 1, again)
    kept = next(iter(read_evaluations(again.metrics)))["eval"]
    assert kept["loss"] == pytest.approx(evaluated["loss"], rel=1e-5), "adapters are continued"


@SYSTEM
def test_an_adapter_of_peft_is_continued(
    cases: dict[str, tuple[Corpus, Path]], tmp_path: Path
) -> None:
    pytest.importorskip("peft", reason="the dev extra has it")
    (corpus, base), folder = cases["pairs"], tmp_path / "theirs"
    run_dir = adapter_run(tmp_path / "run", corpus, "pairs", base)
    expected = run_on_ranks(loss_of_saved_adapter, 1, run_dir, folder, base)[0]
    lora = read_adapter_folder(folder).lora.model_dump(exclude_unset=True)
    assert {"pooler", "classifier", "score"} == set(lora["modules_to_save"])
    again = adapter_run(tmp_path / "again", corpus, "pairs", base, model={"lora": lora})
    assert run_on_ranks(first_loss, 1, again)[0] == pytest.approx(expected, rel=1e-5)


def _held(run_dir: RunDir) -> tuple[int, int]:
    """Return the bytes of this rank's weights and of its optimizer, without counts of steps."""
    training = open_run(run_dir)
    states = sum(
        local_part(each).nbytes
        for name, each in training.tensors.items()
        if name.startswith("optim.") and not name.startswith("optim.step.")
    )
    weights = sum(local_part(each).nbytes for each in training.task.model.parameters())
    training.close()
    return weights, states


@pytest.mark.parametrize(
    "layout", [pytest.param("tp", marks=SYSTEM), pytest.param("zero-3", marks=pytest.mark.slow)]
)
def test_the_plan_counts_what_a_run_holds(
    cases: dict[str, tuple[Corpus, Path]], tmp_path: Path, layout: str
) -> None:
    processes, parallel = LAYOUTS[layout]
    run_dir = adapter_run(
        tmp_path / "run", *_of(cases, "pairs"), processes, parallel=parallel,
        precision={"compute": "bf16"},
    )  # fmt: skip
    by_rank = run_on_ranks(_held, processes, run_dir)
    resolved = read_resolved(run_dir.resolved(0))
    split, _ = resolve_layout(
        resolved.recipe.parallel, world_size=processes, devices_per_node=processes
    )
    planned = memory(workload_of(resolved.recipe, require_shape(resolved.shape), split))
    weights, states = max(by_rank)
    assert planned.term("parameters") == pytest.approx(weights, rel=5e-3)
    assert planned.term("optimizer") == pytest.approx(states, rel=5e-3)


def _of(cases: dict[str, tuple[Corpus, Path]], name: str) -> tuple[Corpus, str, Path]:
    corpus, base = cases[name]
    return corpus, name, base
