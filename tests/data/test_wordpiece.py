"""WordPiece: the same bytes at every training, opened by transformers, and built from vocab.txt."""

import json
import os
import random
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import BertTokenizer, BertTokenizerFast

from shardyard.config.load import load_recipe
from shardyard.config.rules.check import check
from shardyard.config.schema.data import TokenizerKindName
from shardyard.config.tokenizer_kinds import TOKENIZER_KINDS
from shardyard.data.prepare import prepare
from shardyard.data.tokenizer import (
    TextEncoder,
    TokenizerFiles,
    choose_bos,
    find_tokenizer,
    train_tokenizer,
)
from shardyard.errors import RecipeError, RequestError

TEXTS = [
    "The cat sat on the mat. " * 5 + "Été à Paris, naïve café!\n",
    "def cat():\n    return 'the mat'\n" * 5 + "東京は日本の首都です。",
]
_TRAINING = (
    "import sys; from shardyard.data.tokenizer import train_tokenizer;"
    f"texts = {TEXTS!r};"
    "files = train_tokenizer(lambda: iter(texts), kind='wordpiece', vocab_size=300);"
    "sys.stdout.buffer.write(files['tokenizer.json'])"
)


def trained(kind: TokenizerKindName = "wordpiece", **settings: Any) -> TokenizerFiles:
    return train_tokenizer(lambda: iter(TEXTS), kind=kind, **{"vocab_size": 300, **settings})


def write(files: TokenizerFiles, folder: Path) -> Path:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("kind", ["wordpiece", "wordpiece-cased"])
def test_transformers_opens_a_trained_one_as_bert_and_agrees(
    kind: TokenizerKindName, tmp_path: Path
) -> None:
    files = trained(kind)
    ours = TextEncoder(files, name="trained")
    theirs = BertTokenizerFast.from_pretrained(write(files, tmp_path / "t"))
    assert isinstance(theirs, BertTokenizer)
    for text in (*TEXTS, "The CAT [sat] on\tété 日本 zzz\x00\ufffd", "a" * 120):
        assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text)
    assert theirs.convert_ids_to_tokens(range(5)) == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert len(theirs) == ours.vocab_size <= 300
    assert theirs.sep_token_id == ours.end_of_text_id
    pair = theirs("the cat", "the mat")
    assert pair["token_type_ids"] == [0, 0, 0, 0, 1, 1, 1]
    assert (theirs.tokenize("The")[0][0] == "T") == (kind == "wordpiece-cased")


@pytest.mark.heavy
def test_training_gives_the_same_bytes_in_every_process() -> None:
    """The library's own trainer gives another vocabulary in each."""
    expected = trained()["tokenizer.json"]
    for threads in ("1", "4"):
        env = {**os.environ, "RAYON_NUM_THREADS": threads}
        done = subprocess.run([sys.executable, "-c", _TRAINING], env=env, stdout=-1, check=True)
        assert done.stdout == expected


@pytest.mark.heavy
def test_a_word_of_any_length_is_trained_on_in_time_that_grows_with_it() -> None:
    draw = random.Random(0)
    seconds = {}
    for size in (20_000, 160_000):
        word = "".join(draw.choices("ACGT", k=size))
        began = time.process_time()
        train_tokenizer(partial(iter, [word]), kind="wordpiece", vocab_size=300)
        seconds[size] = time.process_time() - began
    assert seconds[160_000] < 24 * seconds[20_000] + 0.5  # 8 times the length; it was 64


def test_single_characters_leave_room_for_words_in_the_vocabulary() -> None:
    letters = [chr(0x4E00 + number) for number in range(2000)] + [
        chr(0x3B1 + number) for number in range(20)
    ]
    text = " ".join(letters) + " αβγ" * 10
    files = train_tokenizer(lambda: iter([text]), kind="wordpiece", vocab_size=400)
    vocabulary = TextEncoder(files, name="letters")
    assert vocabulary.vocab_size <= 400
    single = [entry for entry in vocabulary._vocabulary if len(entry.removeprefix("##")) == 1]
    assert 100 <= len(single) <= 200


def test_a_vocabulary_alone_is_opened_as_transformers_opens_it(tmp_path: Path) -> None:
    vocabulary = TextEncoder(trained(), name="trained")._vocabulary
    listed = sorted(vocabulary, key=vocabulary.__getitem__)
    (tmp_path / "vocab.txt").write_text("\n".join(listed) + "\n")
    for config in ({}, {"do_lower_case": False}, {"strip_accents": False}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        files = find_tokenizer(str(tmp_path / "vocab.txt"), None)
        assert files is not None and files == find_tokenizer("auto", tmp_path)
        ours = TextEncoder(files, name="vocab.txt")
        theirs = BertTokenizer.from_pretrained(tmp_path)
        for text in TEXTS:
            assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text)
    assert ours.leading_tokens() == ["[CLS]"]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("[PAD]\n[UNK]\n[CLS]\n[SEP]\nthe\n", r"lacks \[MASK\].*has to be BERT's"),
        ("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\nthe\n", "entry 'the' twice"),
        (b"\xff\xfe", "utf-8"),
    ],
)
def test_a_vocabulary_of_another_kind_is_refused(
    content: str | bytes, why: str, tmp_path: Path
) -> None:
    raw = content.encode() if isinstance(content, str) else content
    (tmp_path / "vocab.txt").write_bytes(raw)
    with pytest.raises(RequestError, match=why):
        find_tokenizer(str(tmp_path), None)


def test_a_document_begins_with_what_the_kind_puts_before_a_text() -> None:
    for kind, row in TOKENIZER_KINDS.items():
        files = trained(kind)
        leading = TextEncoder(files, name=kind).leading_tokens()
        assert leading == ([] if row.begin is None else [row.begin])
        assert choose_bos("auto", None, kind, name="x") == row.begin
    assert choose_bos(True, None, "wordpiece", name="x") == "[CLS]"
    assert choose_bos(False, None, "wordpiece", name="x") is None


def test_prepared_data_has_the_tokenizer_that_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXTS[0])
    (tmp_path / "b.txt").write_text(TEXTS[1])
    recipe = load_recipe(
        overrides=[
            "model.preset=bert-tiny",
            f"data.source=[{tmp_path}/a.txt,{tmp_path}/b.txt]",
            f"data.dir={tmp_path}/prepared",
            "data.tokenizer_kind=wordpiece",
            "data.vocab_size=300",
            "data.workers=1",
        ]
    )
    facts = prepare(recipe, model_dir=None, progress=lambda *_: None)
    assert facts.bos_token == "[CLS]"
    assert BertTokenizer.from_pretrained(facts.dir).mask_token_id == 4


def test_a_kind_beside_a_tokenizer_that_exists_is_refused(tmp_path: Path) -> None:
    write(trained(), tmp_path / "model")
    (tmp_path / "a.txt").write_text(TEXTS[0])
    settings = [
        "model.preset=bert-tiny",
        f"data.source={tmp_path}/a.txt",
        "data.tokenizer_kind=wordpiece",
    ]
    with pytest.raises(RequestError, match=r"data\.tokenizer_kind=wordpiece .*tokenizer=train"):
        prepare(
            load_recipe(overrides=settings),
            model_dir=tmp_path / "model",
            progress=lambda *_: None,
        )
    named = load_recipe(overrides=[*settings, f"data.tokenizer={tmp_path}/model"])
    with pytest.raises(RecipeError, match=r"data\.tokenizer_kind=wordpiece .*is one that exists"):
        check(named)
