"""Mixtures: exact shares, one stream whoever reads it, data sets that serve others and leak not."""

import json
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardyard.config.data_choices import SLOTS
from shardyard.config.resolved import DatasetMetadata, Resolved
from shardyard.config.schema.recipe import Recipe
from shardyard.data.loader import IGNORED, Loader
from shardyard.data.mixture import ConcatenatedSets, MixedStream, MixturePart, assign_sources
from shardyard.data.samples import Sample, Stream
from shardyard.data.shards import LEARNT, MIXTURE, TokenShards, mixture_at, verify
from shardyard.data.text_datasets import prepare_text
from shardyard.data.tokenizer import TextEncoder
from shardyard.errors import DataError, RequestError
from shardyard.tasks.base import TaskData
from shardyard.tasks.causal_lm import CausalLM

SHARES = [617, 333, 50]


class Numbered:
    """Samples that say which they are, and in which epoch."""

    def __init__(self, number: int, length: int) -> None:
        self.number = number
        self.num_samples = length

    def sample(self, index: int, epoch: int) -> Sample:
        assert 0 <= index < self.num_samples
        return Sample({"tokens": np.array([self.number, index, epoch])}, 3)

    def padding(self) -> Sample:
        return Sample({"tokens": np.full(3, -1)}, 0)


LENGTHS = [4001, 57, 1000]


def stream(seed: int = 0) -> MixedStream:
    sets = [Numbered(number, length) for number, length in enumerate(LENGTHS)]
    return MixedStream([MixturePart(*each) for each in zip(sets, SHARES, strict=True)], seed=seed)


def read(source: MixedStream, start: int, stop: int) -> list[list[int]]:
    rows: list[list[int]] = source.micro_batch(range(start, stop), stop - start)["tokens"].tolist()
    return rows


def test_shares_are_exact_in_every_cycle() -> None:
    source = stream()
    for cycle in range(5):
        rows = read(source, cycle * SLOTS, (cycle + 1) * SLOTS)
        assert Counter(number for number, _, _ in rows) == dict(enumerate(SHARES))


def test_cycles_are_dealt_in_orders_of_their_own() -> None:
    orders = [
        tuple(assign_sources(np.arange(SLOTS) + SLOTS * c, SHARES, seed=0)[0]) for c in range(3)
    ]
    assert len({*orders, tuple(assign_sources(np.arange(SLOTS), SHARES, seed=1)[0])}) == 4


def test_each_source_is_read_whole_before_any_sample_comes_again() -> None:
    rows = read(stream(), 0, 7 * SLOTS)
    for number, length in enumerate(LENGTHS):
        of_source = [(epoch, index) for which, index, epoch in rows if which == number]
        passes = Counter(epoch for epoch, _ in of_source)
        whole = 7 * SHARES[number] // length
        assert [passes[epoch] for epoch in range(whole)] == [length] * whole
        assert len(set(of_source)) == len(of_source)


def test_the_order_of_a_source_changes_with_each_pass_and_with_the_seed() -> None:
    def of_second(seed: int, epoch: int) -> list[int]:
        rows = read(stream(seed), 0, SLOTS)
        return [index for which, index, of in rows if (which, of) == (1, epoch)]

    orders = [of_second(0, 0), of_second(0, 1), of_second(1, 0)]
    assert all(sorted(order) == list(range(LENGTHS[1])) for order in orders)
    assert len({tuple(order) for order in orders}) == 3


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_stream_is_the_same_after_a_kill_and_on_any_number_of_ranks(ranks: int) -> None:
    """It is read to a position on some ranks, and on by others; steps begin within cycles."""
    expected = read(stream(), 0, 1200)
    got: dict[int, list[int]] = {}
    for world, start, end in ((ranks, 0, 480), (5 - ranks, 480, 1200)):
        for rank in range(world):
            loader = Loader(
                stream(), start=start, end=end, step_samples=48, micro_batch=12,
                rank=rank, world_size=world, prefetch_steps=2,
            )  # fmt: skip
            with loader:
                for batch in (batch for step in loader for batch in step):
                    samples = zip(batch.samples_B.tolist(), batch["tokens"].tolist(), strict=True)
                    got |= {position: row for position, row in samples if position >= 0}
    assert [got[position] for position in range(1200)] == expected


def test_samples_are_numbered_through_all_sources() -> None:
    positions = np.arange(500, 900)
    numbers = stream().sample_indices(positions)
    rows = read(stream(), 500, 900)
    firsts = np.cumsum([0, *LENGTHS])
    assert numbers.tolist() == [firsts[which] + index for which, index, _ in rows]


def test_sets_in_a_row_are_each_sample_once() -> None:
    joined = Stream(ConcatenatedSets([Numbered(0, 3), Numbered(1, 2)]), seed=None)
    rows = joined.micro_batch(range(5), 6)["tokens"].tolist()
    assert rows == [[0, 0, 0], [0, 1, 0], [0, 2, 0], [1, 0, 0], [1, 1, 0], [-1, -1, -1]]


# --- prepared -----------------------------------------------------------------------------------


def texts(count: int, words: str, *, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(words.split(), k=20)) for _ in range(count)]


@pytest.fixture
def sources(tmp_path: Path) -> tuple[Path, Path]:
    """Two corpora that have 100 documents in common; one calls its text otherwise."""
    common = texts(100, "one two three four", seed=0)
    prose = [*common, *texts(300, "alpha beta gamma delta", seed=1)]
    code = [*texts(200, "def return lambda yield", seed=2), *common]
    paths = tmp_path / "prose.jsonl", tmp_path / "code.jsonl"
    for path, key, documents in zip(paths, ("text", "content"), (prose, code), strict=True):
        path.write_text("".join(json.dumps({key: text}) + "\n" for text in documents))
    return paths


def mixed(
    sources: tuple[Path, Path], *, weights: tuple[float, float] = (3.0, 1.0), **data: Any
) -> DatasetMetadata:
    prose, code = sources
    shares = [
        {"name": "prose", "source": str(prose), "weight": weights[0]},
        {"name": "code", "source": str(code), "weight": weights[1], "text_key": "content"},
    ]
    usual = {"dir": str(prose.parent / "out"), "vocab_size": 400, "workers": 1}
    recipe = Recipe.model_validate({"data": {"mixture": shares, **usual, **data}})
    return prepare_text(recipe, model_dir=None, progress=lambda *_: None)


def documents_of(facts: DatasetMetadata, split: str) -> set[str]:
    folder = Path(facts.dir)
    encoder = TextEncoder({"tokenizer.json": (folder / "tokenizer.json").read_bytes()}, name="t")
    shards = TokenShards(folder, split)
    borders = [*shards.document_starts.tolist(), shards.num_tokens]
    spans = [shards.read(*each).tolist()[:-1] for each in pairwise(borders)]
    return {encoder._tokenizer.decode(ids) for ids in spans}


def test_a_mixture_is_a_data_set_for_each_source_with_one_tokenizer(
    sources: tuple[Path, Path],
) -> None:
    facts = mixed(sources)
    prose, code = facts.parts
    assert [(part.name, part.slots) for part in facts.parts] == [("prose", 750), ("code", 250)]
    assert facts.train_documents + facts.eval_documents == 700
    assert facts.train_tokens == prose.data.train_tokens + code.data.train_tokens
    assert facts.num_samples("train", 16) == sum(
        part.data.num_samples("train", 16) for part in facts.parts
    )
    files = {(Path(part.dir) / "tokenizer.json").read_bytes() for part in (facts, prose.data)}
    assert len(files) == 1 and prose.data.vocab_size == code.data.vocab_size == facts.vocab_size
    assert [*mixture_at(Path(facts.dir))] == [*facts.parts]
    for part in facts.parts:
        verify(Path(part.data.dir))
    assert 0 < facts.unigram_entropy < np.log(facts.vocab_size)


def test_no_document_is_trained_on_that_another_source_holds_out(
    sources: tuple[Path, Path],
) -> None:
    facts = mixed(sources, eval_fraction=0.3)
    held_out = set().union(*(documents_of(part.data, "eval") for part in facts.parts))
    trained = set().union(*(documents_of(part.data, "train") for part in facts.parts))
    assert held_out and trained and not held_out & trained


def test_a_small_source_holds_nothing_out_rather_than_what_another_trains_on(
    sources: tuple[Path, Path],
) -> None:
    """Alone, the document of the lowest hash would be held out, whatever others do with it."""
    facts = mixed(sources, eval_fraction=1e-9)
    assert [part.data.eval_documents for part in facts.parts] == [0, 0]


def test_a_source_that_is_held_out_whole_is_refused(sources: tuple[Path, Path]) -> None:
    with pytest.raises(RequestError, match=r"'prose' .* has no document left to train on"):
        mixed(sources, eval_fraction=1 - 1e-12)


def written(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*.bin")}


@pytest.mark.heavy
def test_other_weights_take_the_data_sets_that_are_there(
    sources: tuple[Path, Path], tmp_path: Path
) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    trained = Path(mixed(sources).dir)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tokenizer / name).write_bytes((trained / name).read_bytes())
    first = mixed(sources, tokenizer=str(tokenizer))
    before = written(Path(first.dir).parent)
    second = mixed(sources, weights=(1.0, 1.0), tokenizer=str(tokenizer))
    assert [part.data for part in second.parts] == [part.data for part in first.parts]
    assert written(Path(first.dir).parent) == before
    assert second.fingerprint != first.fingerprint
    assert second.dir != first.dir and mixed(sources, tokenizer=str(tokenizer)) == first


@pytest.mark.heavy
def test_the_tokenizer_is_trained_on_sources_by_their_weight(
    sources: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardyard.data.prepare._TOKENIZER_SAMPLE_BYTES", 40_000)
    for weights, first, last in (
        ((99.0, 1.0), "alpha", "lambda"),
        ((1.0, 99.0), "lambda", "alpha"),
    ):
        content = (Path(mixed(sources, weights=weights).dir) / "tokenizer.json").read_text()
        ids = json.loads(content)["model"]["vocab"]
        assert ids[f"Ġ{first}"] < ids.get(f"Ġ{last}", 2**20)


@pytest.mark.heavy
def test_a_set_that_is_gone_is_prepared_again_and_a_damaged_mixture_is_named(
    sources: tuple[Path, Path],
) -> None:
    facts = mixed(sources)
    lost = Path(facts.parts[1].data.dir)
    (lost / "manifest.json").unlink()
    with pytest.raises(DataError, match="holds no prepared data set"):
        mixture_at(Path(facts.dir))
    assert mixed(sources) == facts
    (Path(facts.dir) / MIXTURE).write_text("{")
    with pytest.raises(DataError, match=r"mixture\.json is damaged"):
        mixture_at(Path(facts.dir))


# --- dialogues, and whole documents -------------------------------------------------------------


def mixed_with_dialogues(folder: Path, **data: Any) -> tuple[Recipe, DatasetMetadata]:
    rows = [{"prompt": f"What is {n} + {n}?", "completion": f"It is {2 * n}."} for n in range(60)]
    plain = [{"text": text} for text in texts(60, "alpha beta gamma delta", seed=1)]
    for name, lines in (("chat", rows), ("plain", plain)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    shares = [
        {"name": "chat", "source": str(folder / "chat.jsonl"), "weight": 3, "format": "chat"},
        {"name": "plain", "source": str(folder / "plain.jsonl"), "weight": 1},
    ]
    usual = {
        "dir": str(folder / "out"), "vocab_size": 400, "workers": 1, "eval_fraction": 0.2,
        "chat_template": "alpaca", "seq_len": 96,
    }  # fmt: skip
    recipe = Recipe.model_validate({"data": {"mixture": shares, **usual, **data}})
    return recipe, prepare_text(recipe, model_dir=None, progress=lambda *_: None)


def opened(recipe: Recipe, facts: DatasetMetadata) -> TaskData:
    resolved = Resolved(recipe=recipe, reasons={}, shape=None, data=facts, steps=1)
    return CausalLM.open_data(resolved)


@pytest.mark.heavy
@pytest.mark.parametrize("pack", ["stream", "whole"])
def test_dialogues_beside_text_are_dealt_exactly_and_learnt_by_their_answers(
    tmp_path: Path, pack: str
) -> None:
    recipe, facts = mixed_with_dialogues(tmp_path, pack=pack)
    chat, plain = (part.data for part in facts.parts)
    assert facts.train_learnt == (chat.train_learnt or 0) + plain.train_tokens
    assert chat.train_learnt and chat.train_learnt < chat.train_tokens
    assert facts.num_samples("train", 96) == sum(
        part.num_samples("train", 96) for part in (chat, plain)
    )
    assert (chat.train_samples is None) == (pack == "stream")
    data = opened(recipe, facts)
    sets = data.train.sample_indices(np.arange(2 * SLOTS)) >= chat.num_samples("train", 96)
    assert [int(sets[:SLOTS].sum()), int(sets[SLOTS:].sum())] == [250, 250]
    batch = data.train.micro_batch(range(40), 42)
    targets = batch["targets"] != IGNORED
    shares = targets.sum(1) / (batch["tokens"] != 0).sum(1)
    of_text = torch.from_numpy(np.append(sets[:40], [False] * 2))
    assert LEARNT not in batch.fields
    assert shares[of_text].min() > 0.9 > 0.6 > shares[:40][~of_text[:40]].max() > 0
    assert not targets[40:].any(), "padding"
    assert data.eval is not None and set(data.eval_parts) == {"chat", "plain"}
    assert (data.eval.micro_batch(range(2), 2)["targets"] != IGNORED).any()


@pytest.mark.heavy
@pytest.mark.parametrize("ranks", [1, 2])
def test_dialogues_beside_text_are_the_same_stream_on_any_ranks_and_after_a_stop(
    tmp_path: Path, ranks: int
) -> None:
    recipe, facts = mixed_with_dialogues(tmp_path, pack="whole")
    whole = opened(recipe, facts).train.micro_batch(range(48), 48)
    got: dict[int, list[int]] = {}
    for world, start, end in ((ranks, 0, 24), (3 - ranks, 24, 48)):
        for rank in range(world):
            loader = Loader(
                opened(recipe, facts).train, start=start, end=end, step_samples=12,
                micro_batch=4, rank=rank, world_size=world, prefetch_steps=1,
            )  # fmt: skip
            with loader:
                for batch in (batch for step in loader for batch in step):
                    samples = zip(batch.samples_B.tolist(), batch["targets"].tolist(), strict=True)
                    got |= {position: row for position, row in samples if position >= 0}
    assert [got[position] for position in range(48)] == whole["targets"].tolist()
