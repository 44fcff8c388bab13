"""Datasets of the user's own as sources of a mixture, compared with files and a plain loop."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardyard.config.data_choices import SLOTS
from shardyard.config.resolved import DatasetMetadata, Resolved
from shardyard.config.schema.recipe import Recipe
from shardyard.data.loader import IGNORED
from shardyard.data.mixture import assign_sources
from shardyard.data.own.dataset import SETTING, seed_generators
from shardyard.data.text_datasets import prepare_text
from shardyard.errors import RequestError
from shardyard.tasks.base import TaskData
from shardyard.tasks.causal_lm import CausalLM
from tests.data.own import own_datasets

OWN = "tests.data.own.own_datasets"
SEQ_LEN = 32


def recipe_of(folder: Path, *shares: dict[str, Any], **data: Any) -> Recipe:
    usual = {"dir": str(folder / "out"), "workers": 1, "vocab_size": 400, "seq_len": SEQ_LEN}
    content = {"mixture": list(shares), "module_workers": 2, **usual, **data}
    return Recipe.model_validate({"model": {"preset": "llama-tiny"}, "data": content})


def prepared(recipe: Recipe) -> DatasetMetadata:
    return prepare_text(recipe, model_dir=None, progress=lambda *_: None)


def opened(recipe: Recipe, facts: DatasetMetadata) -> TaskData:
    resolved = Resolved(recipe=recipe, reasons={}, shape=None, data=facts, steps=1)
    return CausalLM.open_data(resolved)


@pytest.fixture
def words(tmp_path: Path) -> dict[str, Any]:
    """A source of text in a file."""
    file = tmp_path / "words.jsonl"
    rows = [{"text": f"{n} and {n * n} and {n**3}"} for n in range(200)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"name": "words", "source": str(file), "weight": 3.0}


def test_rows_are_mixed_as_a_file_of_them(tmp_path: Path, words: dict[str, Any]) -> None:
    file = tmp_path / "texts.jsonl"
    rows = own_datasets.texts("train", "!")
    assert rows is not None
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code = {"name": "code", "weight": 1.0}
    settings = {"module": f"{OWN}:texts", "module_settings": {"ending": "!"}}
    batches = []
    for share in ({**code, **settings}, {**code, "source": str(file)}):
        recipe = recipe_of(tmp_path, words, share)
        facts = prepared(recipe)
        assert prepared(recipe) == facts, "it is found again"
        batches.append(opened(recipe, facts).train.micro_batch(range(60), 60)["tokens"].tolist())
    assert batches[0] == batches[1]
    assert not list((tmp_path / "out").glob(".rows-*")), "files of rows are removed"


@pytest.fixture
def tokenizer(tmp_path: Path, words: dict[str, Any]) -> str:
    """Folder of a tokenizer that was trained before."""
    return prepared(recipe_of(tmp_path, words)).dir


def plain_rows(places: range) -> Iterator[tuple[int, list[int], list[int]]]:
    """Read the second source of a mixture in a plain loop: place, tokens and targets."""
    sets, own = assign_sources(np.array(places), [750, 250], seed=0)
    dataset = own_datasets.noisy("train")
    order: dict[int, list[int]] = {}
    for place, number, position in zip(places, sets, own.tolist(), strict=True):
        if number != 1:
            continue
        epoch, at = divmod(position, len(dataset))
        if epoch not in order:
            order[epoch] = epoch_order(len(dataset), epoch)
        index = order[epoch][at]
        seed_generators(0, SETTING, "train", epoch, index)
        item = dataset[index]
        yield place, item["input_ids"].tolist()[:-1], item["labels"].tolist()[1:]


def epoch_order(length: int, epoch: int) -> list[int]:
    """Order of the second source in a pass."""
    from shardyard.data.mixture import _seed_of
    from shardyard.data.order import sample_index

    first = epoch * length
    return [sample_index(first + at, length, seed=_seed_of(0, 1)) for at in range(length)]


@pytest.mark.heavy
def test_token_ids_are_read_in_the_order_of_a_plain_loop(
    tmp_path: Path, words: dict[str, Any], tokenizer: str
) -> None:
    own = {"name": "own", "module": f"{OWN}:noisy", "weight": 1.0}
    recipe = recipe_of(tmp_path, words, own, tokenizer=tokenizer)
    facts = prepared(recipe)
    assert facts.parts[1].data.train_samples == 40 and prepared(recipe) == facts
    places = range(SLOTS - 200, SLOTS + 50)  # five passes and more
    batch = opened(recipe, facts).train.micro_batch(places, len(places))
    found = 0
    for place, tokens, targets in plain_rows(places):
        row, size = places.index(place), len(tokens)
        assert batch["tokens"][row, :size].tolist() == tokens
        assert batch["targets"][row, :size].tolist() == targets
        assert (batch["targets"][row, size:] == IGNORED).all()
        found += 1
    assert found == int((assign_sources(np.array(places), [750, 250], seed=0)[0] == 1).sum()) > 40
    later = opened(recipe, facts)  # as a resume, in smaller steps
    rows = [
        later.train.micro_batch(range(at, at + 10), 10)["tokens"]
        for at in range(places[0], places[-1] + 1, 10)
    ]
    assert np.concatenate(rows).tolist() == batch["tokens"].tolist()
    assert set(later.eval_parts) == {"words", "own"}
    assert later.eval_parts["own"].num_samples == 7


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("noisy", {}, "returns token ids, and the other sources of data.mixture need the tokeniz"),
        ("empty", {}, "returned"),
    ],
)
def test_a_source_that_cannot_be_mixed_names_the_fix(
    tmp_path: Path, words: dict[str, Any], name: str, data: dict[str, Any], said: str
) -> None:
    own = {"name": "own", "module": f"{OWN}:{name}", "weight": 1.0}
    with pytest.raises(RequestError, match=said):
        prepared(recipe_of(tmp_path, words, own, **data))
