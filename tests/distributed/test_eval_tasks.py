"""Tasks of data.eval_tasks: the scores of `shardyard evaluate` of the same step on every layout,
and a run's target and best checkpoint by them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardyard.checkpoint.export import export
from shardyard.checkpoint.select import choose_checkpoint
from shardyard.config.schema.recipe import Recipe
from shardyard.data.eval_tasks.prepare import prepare_eval_tasks
from shardyard.data.eval_tasks.task_file import find_tasks
from shardyard.evaluation.run import _parse, evaluate_folder
from shardyard.rundir.attempt_files import read_resolved
from shardyard.rundir.jsonl import read_evaluations
from shardyard.rundir.layout import RunDir
from shardyard.train.loop import FINISHED
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run, prepare_corpus, train_here

FOLDER = Path(__file__).parents[1] / "evaluation" / "tasks"
TASKS = {name: str(FOLDER / f"{name}.yaml") for name in ("choices", "endings", "pages")}
SEQ_LEN = 64


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return with_tasks(prepare_corpus(tmp_path_factory.mktemp("corpus")))


def with_tasks(corpus: Corpus) -> Corpus:
    """The corpus with the questions of the tasks next to it."""
    recipe = Recipe.model_validate({"data": {"eval_tasks": TASKS}})
    facts = replace(corpus.facts, eval_tasks=prepare_eval_tasks(recipe, corpus.facts))
    return replace(corpus, facts=facts)


def run(folder: Path, corpus: Corpus, sections: dict[str, Any]) -> RunDir:
    base: dict[str, Any] = {
        "run": {"steps": 2}, "optim": {"micro_batch": 3}, "model": {"dropout": 0.1}, **sections,
    }  # fmt: skip
    data = {
        "source": corpus.source, "dir": corpus.prepared, "seq_len": SEQ_LEN, "vocab_size": 512,
        "tokenizer": "train", "eval_tasks": TASKS,
    }  # fmt: skip
    run_dir = make_run(folder, corpus, {**base, "data": data})
    processes = sections.get("cluster", {}).get("devices", 1)
    assert run_on_ranks(train_here, processes, run_dir) == [FINISHED] * processes
    return run_dir


def evaluated(run_dir: RunDir, folder: Path) -> dict[str, dict[str, float]]:
    """Scores of `shardyard evaluate` of the newest checkpoint."""
    checkpoint = choose_checkpoint(run_dir, "latest").path
    export(checkpoint, read_resolved(run_dir.resolved(0)), folder)
    asked = _parse([f"--folder={folder}", f"--context={SEQ_LEN}"])
    asked.tasks = find_tasks([*TASKS.values()])
    found = evaluate_folder(folder, asked)["results"]
    return {
        each["name"]: {metric["metric"]: metric["value"] for metric in each["metrics"]}
        for each in found
    }


@pytest.mark.parametrize(
    "sections",
    [
        {"cluster": {"devices": 2}, "parallel": {"zero": 3}},
        {"cluster": {"devices": 2}, "parallel": {"tp": 2}},
        *(
            pytest.param(each, marks=pytest.mark.system)
            for each in (
                {},
                {"cluster": {"devices": 2}, "parallel": {"dp_replicate": 2}},
                {"cluster": {"devices": 2}, "parallel": {"zero": 1}},
                {"cluster": {"devices": 2}, "parallel": {"pp": 2}},
                {"cluster": {"devices": 2}, "parallel": {"cp": 2}},
            )
        ),
    ],
    ids=str,
)
def test_scores_are_those_of_evaluate(
    tmp_path: Path, corpus: Corpus, sections: dict[str, Any]
) -> None:
    run_dir = run(tmp_path / "run", corpus, sections)
    (line,) = read_evaluations(run_dir.metrics)
    expected = evaluated(run_dir, tmp_path / "hf")
    found = line["eval_sources"]
    assert found.keys() == expected.keys() == TASKS.keys()
    for name, scores in expected.items():
        accuracies = {metric: value for metric, value in scores.items() if "acc" in metric}
        assert found[name].keys() == scores.keys()
        assert {metric: found[name][metric] for metric in accuracies} == accuracies
        assert found[name] == pytest.approx(scores, rel=1e-5)


def test_a_run_ends_at_a_target_of_a_task_which_its_best_checkpoint_follows(
    tmp_path: Path, corpus: Corpus
) -> None:
    each: dict[str, Any] = {"task": {"eval_every_steps": 1}, "checkpoint": {"keep_best": True}}
    whole = run(tmp_path / "whole", corpus, {**each, "run": {"steps": 6}})
    values = [
        line["eval_sources"]["endings"]["perplexity"] for line in read_evaluations(whole.metrics)
    ]
    wanted = min(values[1:-1])
    target = {"steps": 6, "target": {"endings/perplexity": wanted}}
    ended = run(tmp_path / "ended", corpus, {**each, "run": target})
    last = read_evaluations(ended.metrics)[-1]["step"]
    assert last == next(step for step, value in enumerate(values, 1) if value <= wanted) < 6
    assert choose_checkpoint(ended, "best").step == last
