"""Pairs of texts: form, draws, and what b is to a."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from shardyard.config.load import load_recipe
from shardyard.config.resolved import DatasetMetadata
from shardyard.data import sentence_pairs as module
from shardyard.data.loader import IGNORED
from shardyard.data.prepare import prepare
from shardyard.data.samples import Sample, Stream
from shardyard.data.sentence_pairs import FOLLOWS, RANDOM, PairMarks, SentencePairs, pair_marks
from shardyard.data.shards import TokenShards
from shardyard.errors import DataError, RequestError

SEQ_LEN = 32
DOCUMENTS = 60


def prepared(
    folder: Path, texts: list[str], task: str = "masked_lm", **settings: object
) -> DatasetMetadata:
    """A set of which each text is a document."""
    folder.mkdir(exist_ok=True)
    for number, text in enumerate(texts):
        (folder / f"{number:03d}.txt").write_text(text)
    of_data = {
        "source": folder,
        "dir": folder.parent / "prepared",
        "format": "sentences",
        "tokenizer_kind": "wordpiece",
        "vocab_size": 600,
        "eval_fraction": 0.0,
        "workers": 1,
        **settings,
    }
    overrides = [f"data.{name}={value}" for name, value in of_data.items()]
    overrides += ["model.preset=bert-tiny", f"task.name={task}"]
    recipe = load_recipe(overrides=overrides)
    return prepare(recipe, model_dir=None, progress=lambda *_: None)


def document(number: int) -> str:
    """Sentences whose words tell where they stand."""
    return " ".join(
        f"Document d{number} has in place p{place} the {'long ' * (place % 4)}sentence."
        for place in range(30)
    )


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> DatasetMetadata:
    folder = tmp_path_factory.mktemp("pairs") / "text"
    return prepared(folder, [document(number) for number in range(DOCUMENTS)])


def pairs_of(facts: DatasetMetadata, *, seed: int = 1, seq_len: int = SEQ_LEN) -> SentencePairs:
    folder = Path(facts.dir)
    return SentencePairs(
        TokenShards(folder, "train"), pair_marks(folder), seq_len=seq_len, seed=seed
    )


def texts_of(sample: Sample, marks: PairMarks) -> tuple[list[int], list[int]]:
    """a and b; the sample has the form that it should have."""
    tokens = sample.fields["tokens"].tolist()
    segments = sample.fields["segments"].tolist()
    assert tokens[0] == marks.cls_id and tokens[sample.length - 1] == marks.sep_id
    middle = tokens.index(marks.sep_id)
    a, b = tokens[1:middle], tokens[middle + 1 : sample.length - 1]
    padding = len(tokens) - sample.length
    assert a and b and not {marks.cls_id, marks.sep_id} & {*a, *b}
    assert segments == [0] * (len(a) + 2) + [1] * (len(b) + 1) + [0] * padding
    assert tokens[sample.length :] == [0] * padding
    assert (sample.fields["targets"] == IGNORED).all()
    return a, b


def test_every_sample_is_a_pair_and_its_label_is_true(facts: DatasetMetadata) -> None:
    pairs, marks = pairs_of(facts), pair_marks(Path(facts.dir))
    shards = TokenShards(Path(facts.dir), "train")
    text = shards.read(0, shards.num_tokens).tolist()
    joined = " ".join(map(str, text))
    labels = []
    for index in range(pairs.num_samples):
        sample = pairs.sample(index, 0)
        a, b = texts_of(sample, marks)
        label = int(sample.fields["next_sentence_labels"])
        assert f" {' '.join(map(str, a))} " in joined and f" {' '.join(map(str, b))} " in joined
        labels.append(label)
    assert set(labels) == {FOLLOWS, RANDOM}
    assert facts.num_samples("train", SEQ_LEN) == pairs.num_samples


def test_b_follows_in_the_same_document_or_is_from_another(facts: DatasetMetadata) -> None:
    pairs, marks = pairs_of(facts), pair_marks(Path(facts.dir))
    tokenizer = Tokenizer.from_file(f"{facts.dir}/tokenizer.json")
    told = 0
    for index in range(pairs.num_samples):
        sample = pairs.sample(index, 0)
        words = [
            set(tokenizer.decode(part).split()) & {f"d{number}" for number in range(DOCUMENTS)}
            for part in texts_of(sample, marks)
        ]
        if all(len(found) == 1 for found in words):
            told += 1
            is_same = words[0] == words[1]
            assert is_same == (int(sample.fields["next_sentence_labels"]) == FOLLOWS)
    assert told > pairs.num_samples / 3


def test_what_follows_begins_where_a_ends_if_nothing_was_cut(facts: DatasetMetadata) -> None:
    pairs, marks = pairs_of(facts, seq_len=64), pair_marks(Path(facts.dir))
    shards = TokenShards(Path(facts.dir), "train")
    joined = " ".join(map(str, shards.read(0, shards.num_tokens).tolist()))
    whole = 0
    for index in range(pairs.num_samples):
        sample = pairs.sample(index, 0)
        a, b = texts_of(sample, marks)
        if sample.fields["next_sentence_labels"] == FOLLOWS and sample.length < 64:
            whole += 1
            assert f" {' '.join(map(str, [*a, *b]))} " in joined
    assert whole > 5


def test_half_is_random_and_a_tenth_is_short(facts: DatasetMetadata) -> None:
    pairs = pairs_of(facts)
    samples = [pairs.sample(index, epoch) for epoch in range(4) for index in range(500)]
    labels = [int(sample.fields["next_sentence_labels"]) for sample in samples]
    assert 0.46 < np.mean(labels) < 0.62  # single sentences have a random b, too
    lengths = np.array([sample.length for sample in samples])
    assert 0.03 < (lengths < SEQ_LEN - 8).mean() < 0.2
    assert (lengths == SEQ_LEN).mean() > 0.5


def test_a_sample_is_a_function_of_seed_epoch_and_number(facts: DatasetMetadata) -> None:
    def shown(sample: Sample) -> list[list[int]]:
        return [np.atleast_1d(field).tolist() for field in sample.fields.values()]

    first, again = pairs_of(facts), pairs_of(facts)
    for index in reversed(range(20)):
        assert shown(first.sample(index, 3)) == shown(again.sample(index, 3))
    numbers = range(50)
    for other in ((first, 4), (pairs_of(facts, seed=2), 3)):
        same = [shown(first.sample(n, 3)) == shown(other[0].sample(n, other[1])) for n in numbers]
        assert sum(same) < 5


def test_an_epoch_reads_nearly_the_whole_text(facts: DatasetMetadata) -> None:
    pairs, marks = pairs_of(facts), pair_marks(Path(facts.dir))
    read = [set(texts_of(pairs.sample(i, 0), marks)[0]) for i in range(pairs.num_samples)]
    tokenizer = Tokenizer.from_file(f"{facts.dir}/tokenizer.json")
    words = set(tokenizer.decode(sorted(set().union(*read))).split())
    assert len(words & {f"d{number}" for number in range(DOCUMENTS)}) > 0.8 * DOCUMENTS


def test_a_stream_lays_pairs_side_by_side_whatever_the_micro_batch(facts: DatasetMetadata) -> None:
    stream = Stream(pairs_of(facts), seed=7)
    batch = stream.micro_batch(range(4), 6)
    assert batch["tokens"].shape == batch["segments"].shape == (6, SEQ_LEN)
    assert batch["next_sentence_labels"].shape == (6,)
    assert batch["next_sentence_labels"][4:].tolist() == [IGNORED, IGNORED]
    for row in range(4):
        alone = stream.micro_batch(range(row, row + 1), 1)
        for name in batch.fields:
            assert (alone[name][0] == batch[name][row]).all()


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [((3, 4), (3, 4)), ((30, 3), (7, 3)), ((3, 30), (3, 7)), ((30, 30), (5, 5)), ((6, 5), (5, 5))],
)
def test_the_longer_text_is_cut_first(lengths: tuple[int, int], expected: tuple[int, int]) -> None:
    a, b = (np.arange(length) for length in lengths)
    cut = module._truncate_pair(a, b, 10, module._RandomStream(5))
    assert tuple(map(len, cut)) == expected
    for part in cut:
        assert (np.diff(part) == 1).all()


def test_cutting_is_that_of_the_plain_loop() -> None:
    """``truncate_seq_pair`` of create_pretraining_data.py takes tokens one by one."""
    for room in (9, 10):
        for size_a in range(1, 25):
            for size_b in range(1, 25):
                left = [size_a, size_b]
                while sum(left) > room:
                    left[0 if left[0] > left[1] else 1] -= 1
                cut = module._truncate_pair(
                    np.arange(size_a), np.arange(size_b), room, module._RandomStream(size_a)
                )
                assert list(map(len, cut)) == left


def test_sentences_longer_than_a_sample_and_empty_documents_are_read(tmp_path: Path) -> None:
    texts = ["word " * 300, " ", "other " * 300 + ".", " \n ", "A last one. And its end."]
    facts = prepared(tmp_path / "text", texts)
    pairs, marks = pairs_of(facts), pair_marks(Path(facts.dir))
    for epoch in range(3):
        for index in range(pairs.num_samples):
            texts_of(pairs.sample(index, epoch), marks)


def test_a_split_of_one_document_is_refused(tmp_path: Path) -> None:
    facts = prepared(tmp_path / "text", [document(0)])
    with pytest.raises(RequestError, match=r"has 1 document.*need two"):
        pairs_of(facts)


def test_data_without_sentences_are_refused(tmp_path: Path) -> None:
    facts = prepared(tmp_path / "text", [document(0), document(1)], format="by_suffix")
    with pytest.raises(DataError, match=r"no column 'sentence'.*data\.format"):
        pairs_of(facts)


def test_a_tokenizer_without_the_marks_is_refused(tmp_path: Path) -> None:
    facts = prepared(tmp_path / "text", [document(0), document(1)], tokenizer_kind="bpe")
    with pytest.raises(RequestError, match=r"\[CLS\].*tokenizer_kind=wordpiece"):
        pair_marks(Path(facts.dir))


def test_text_without_sentences_is_rejected_unless_asked_for(tmp_path: Path) -> None:
    texts = [f"this is the text {n}. it has two sentences and no capitals" for n in range(30)]
    task = "bert_pretraining"
    message = r"follows the first in 0\.0% of the pairs, less than data\.min_true_pairs=0\.3; "
    with pytest.raises(RequestError, match=message):
        prepared(tmp_path / "small", texts, task, seq_len=SEQ_LEN)
    asked = prepared(tmp_path / "small", texts, task, seq_len=SEQ_LEN, min_true_pairs=0)
    assert asked.true_pairs == 0
    capitals = [" ".join(f"This is sentence {n} of {m}." for n in range(9)) for m in range(30)]
    facts = prepared(tmp_path / "large", capitals, task, seq_len=SEQ_LEN)
    assert facts.true_pairs == pytest.approx(0.5, abs=0.1)
