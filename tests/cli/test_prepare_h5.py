"""`shardyard prepare --also h5`."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from shardyard.cli import main
from shardyard.config.load import load_recipe
from shardyard.config.model.source import read_shape
from shardyard.config.resolved import DatasetMetadata, Resolved
from shardyard.config.schema.recipe import Recipe
from shardyard.config.tasks import imported, task_row
from shardyard.data.prepare import prepare
from shardyard.data.samples import Stream
from shardyard.errors import RequestError
from shardyard.rundir.jsonl import read_evaluations, read_steps
from tests.data.test_pairs import document

pytest.importorskip("h5py", reason="h5py is an extra")

pytestmark = pytest.mark.heavy


def recipe_in(folder: Path, task: str) -> list[str]:
    (folder / "text").mkdir()
    for number in range(12):
        (folder / "text" / f"{number}.txt").write_text(document(number))
    return [
        "model.preset=bert-tiny",
        f"task.name={task}",
        f"data.source={folder}/text",
        f"data.dir={folder}/prepared",
        "data.format=sentences",
        "data.tokenizer=train",
        "data.tokenizer_kind=wordpiece",
        "data.vocab_size=600",
        "data.seq_len=32",
        "data.eval_fraction=0.2",
        "data.workers=1",
    ]


def test_what_training_sees_is_written_and_read_as_the_same(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = recipe_in(tmp_path, "bert_pretraining")
    assert main(["prepare", *settings, "run.epochs=2", "--also", "h5", "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    folder = Path(answer.pop("h5"))
    facts = DatasetMetadata(**answer)
    assert {path.name for path in folder.iterdir()} == {"train_00000.hdf5", "eval_00000.hdf5"}

    of_h5 = [
        f"data.source={folder}/train_*.hdf5",
        "data.format=bert_h5",
        f"data.tokenizer={facts.dir}",
        "data.tokenizer_kind=bpe",
        "data.eval_fraction=0",
    ]
    assert main(["prepare", *settings, *of_h5, "--json"]) == 0
    again = DatasetMetadata(**json.loads(capfd.readouterr().out))
    asked, read = (opened(load_recipe(overrides=words), each) for words, each in (
        (settings, facts), ([*settings, *of_h5], again),
    ))  # fmt: skip
    total = 2 * asked.num_samples
    assert again.train_samples == total
    expected = asked.micro_batch(range(total), total)
    by_number = {index: place for place, index in enumerate(places(read, total))}
    order = [by_number[index] for index in range(total)]
    found = read.micro_batch(range(total), total)
    for name, field in expected.fields.items():
        assert torch.equal(found[name][order], field), name


@pytest.mark.system
@pytest.mark.slow
def test_both_train_with_the_same_loss(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A step of a whole epoch has the same samples, whatever their order."""
    settings = [*recipe_in(tmp_path, "bert_pretraining"), "data.eval_fraction=0"]
    assert main(["prepare", *settings, "--also", "h5", "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    folder = answer.pop("h5")
    samples = DatasetMetadata(**answer).num_samples("train", 32)
    step = [
        "run.steps=1",
        f"run.dir={tmp_path}/runs",
        f"optim.global_batch={samples}",
        "optim.micro_batch=8",
        "model.dropout=0",
        "cluster.device=cpu",
    ]
    of_h5 = [
        f"data.source={folder}",
        "data.format=bert_h5",
        f"data.tokenizer={answer['dir']}",
        "data.tokenizer_kind=bpe",
    ]
    losses: list[float] = []
    for more in ([], of_h5):
        assert main(["train", *settings, *step, *more, f"run.id=run-{len(losses)}"]) == 0
        line = (tmp_path / "runs" / f"run-{len(losses)}" / "metrics.jsonl").read_text()
        losses.append(json.loads(line.splitlines()[0])["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.system
def test_a_run_on_h5_files_goes_on_where_it_was_left(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = recipe_in(tmp_path, "bert_pretraining")
    assert main(["prepare", *settings, "--also", "h5", "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    settings += [
        f"data.source={answer['h5']}/train_*.hdf5",
        "data.format=bert_h5",
        f"data.tokenizer={answer['dir']}",
        "data.tokenizer_kind=bpe",
        f"run.dir={tmp_path}/runs",
        "optim.global_batch=8",
        "optim.micro_batch=4",
        "optim.schedule=constant",
        "optim.warmup_steps=1",
        "cluster.device=cpu",
    ]
    assert main(["train", *settings, "run.steps=4", "run.id=whole"]) == 0
    assert main(["train", *settings, "run.steps=2", "run.id=parts"]) == 0
    assert main(["resume", f"{tmp_path}/runs/parts", "run.steps=4"]) == 0
    losses = {
        name: [step["loss"] for step in read_steps(tmp_path / "runs" / name / "metrics.jsonl")]
        for name in ("whole", "parts")
    }
    assert len(losses["whole"]) == 4 and losses["parts"] == losses["whole"]
    evaluations = read_evaluations(tmp_path / "runs" / "parts" / "metrics.jsonl")
    assert [each["step"] for each in evaluations] == [2, 4]
    assert evaluations[-1]["eval"]["masked_accuracy"] >= 0


@pytest.mark.parametrize(
    ("documents", "fraction", "words"),
    [
        (3, 0.01, r"the eval split has one document, .* pairs of texts from two\. Give more docu"),
        (1, 0, "the train split has one document, and task.name=bert_pretraining makes pairs"),
    ],
)
def test_a_split_of_one_document_is_refused_as_it_is_prepared(
    tmp_path: Path, documents: int, fraction: float, words: str
) -> None:
    for number in range(documents):
        (tmp_path / f"{number}.txt").write_text(document(number))
    recipe = load_recipe(
        overrides=[
            "model.preset=bert-tiny", "task.name=bert_pretraining", "data.format=sentences",
            "data.tokenizer=train", "data.tokenizer_kind=wordpiece", "data.vocab_size=600",
            f"data.eval_fraction={fraction}", f"data.source={tmp_path}/*.txt", "data.workers=1",
            f"data.dir={tmp_path}/prepared",
        ]
    )  # fmt: skip
    for _ in range(2):  # also where it is there already
        with pytest.raises(RequestError, match=words):
            prepare(recipe, model_dir=None, progress=lambda *_: None)


def opened(recipe: Recipe, facts: DatasetMetadata) -> Stream:
    shape = read_shape(recipe.model, None, facts.vocab_size)
    resolved = Resolved(recipe=recipe, reasons={}, shape=shape, data=facts, steps=1)
    stream = imported(task_row(recipe.task.name).code).open_data(resolved).train
    assert isinstance(stream, Stream)
    return stream


def places(stream: Stream, count: int) -> list[int]:
    """Which sample stands at each of the first positions."""
    found: list[int] = stream.sample_indices(np.arange(count)).tolist()
    return found


def test_a_task_without_pairs_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", *recipe_in(tmp_path, "masked_lm"), "--also", "h5"]) == 2
    err = capfd.readouterr().err
    assert "no segments and no next_sentence_labels. Set task.name=bert_pretraining" in err
    assert main(["prepare", "x", "--also", "h5", "--dry-run"]) == 2
    assert "--also goes with neither --on nor --dry-run" in capfd.readouterr().err
