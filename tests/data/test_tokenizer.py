"""Tokenizers: trained or found, exact, and readable by transformers."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

from shardyard.config.load import load_recipe
from shardyard.config.schema.data import Data
from shardyard.data import tokenizer as module
from shardyard.data.tokenizer import (
    END_OF_TEXT,
    TextEncoder,
    TokenizerFiles,
    find_tokenizer,
    train_bpe,
)
from shardyard.errors import DataError, RecipeError, RequestError

TEXTS = ["the cat sat on the mat\n" * 5, "def cat():\n    return 'the mat'\n" * 5]


@pytest.fixture(scope="module")
def trained() -> TokenizerFiles:
    return train_bpe(iter(TEXTS), vocab_size=300)


def write(files: TokenizerFiles, folder: Path) -> Path:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def test_transformers_opens_a_trained_tokenizer_and_agrees(
    trained: TokenizerFiles, tmp_path: Path
) -> None:
    theirs = AutoTokenizer.from_pretrained(write(trained, tmp_path / "t"))
    ours = TextEncoder(trained, name="trained")
    text = "the cat, déjà vu \U0001f600\r\n\tend"
    assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text)
    assert theirs.decode(ours.encode(text)) == text
    assert theirs.eos_token == END_OF_TEXT
    assert theirs.eos_token_id == ours.end_of_text_id
    assert len(theirs) == ours.vocab_size <= 300


@pytest.mark.heavy
def test_training_gives_the_same_bytes_with_one_thread_and_with_many(
    trained: TokenizerFiles,
) -> None:
    script = (
        "import sys; from shardyard.data.tokenizer import train_bpe;"
        f"files = train_bpe(iter({TEXTS!r}), vocab_size=300);"
        "sys.stdout.buffer.write(files['tokenizer.json'])"
    )
    alone = {**os.environ, "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run([sys.executable, "-c", script], env=alone, stdout=-1, check=True)
    assert done.stdout == trained["tokenizer.json"]


def plain_training(texts: list[str]) -> bytes:
    """What the tokenizers library makes of texts without a limit to the length of words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(iter(texts), trainer)
    return tokenizer.to_str(pretty=True).encode()


def test_the_limit_to_the_length_of_words_changes_no_tokenizer_of_text() -> None:
    texts = [Path(module).read_text() for module in (json.decoder.__file__, subprocess.__file__)]
    texts += ["é" * 200 + " " * 500 + "\n" + "-" * 500 + "\n", "Ünicode \U0001f600 日本語 " * 40]
    assert train_bpe(iter(texts), vocab_size=600)["tokenizer.json"] == plain_training(texts)


def test_a_word_of_any_length_is_trained_on_in_time_that_grows_with_it() -> None:
    """100 kB took 2.4 s, and 4 times as long for twice the length; 3 MB never ended."""
    draw = random.Random(0)
    seconds = {}
    for size in (40_000, 320_000):
        word = "".join(draw.choices("ACGT", k=size))
        began = time.process_time()
        train_bpe(iter([word]), vocab_size=300)
        seconds[size] = time.process_time() - began
    assert seconds[320_000] < 24 * seconds[40_000]  # 8 times the length; it was 64
    assert seconds[320_000] < 5


@pytest.mark.parametrize("letters", ["ACGT", " ", "=", "é"])
def test_a_long_word_is_encoded_and_decoded_whole(letters: str) -> None:
    text = "".join(random.Random(0).choices(letters, k=20_000))
    files = train_bpe(iter([text]), vocab_size=300)
    encoder = TextEncoder(files, name="long")
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    assert tokenizer.decode(encoder.encode(text)) == text
    assert len(encoder.encode(text)) < len(text)


@pytest.mark.parametrize("separator", [" ", "\n", "\n\n    ", "\r\n", ""])
def test_a_huge_text_is_encoded_in_parts_to_the_same_tokens(
    trained: TokenizerFiles, monkeypatch: pytest.MonkeyPatch, separator: str
) -> None:
    monkeypatch.setattr(module, "_PART_CHARACTERS", 100)
    text = separator.join(["the", "mat", "def cat():", "é", "on"] * 200)
    parts = list(module._parts(text))
    assert "".join(parts) == text
    assert len(parts) > 5
    assert max(len(part) for part in parts) <= 200
    tokenizer = Tokenizer.from_str(trained["tokenizer.json"].decode())
    whole = tokenizer.encode(text).ids
    ids = TextEncoder(trained, name="parts").encode(text)
    if separator:
        assert ids == whole
    assert tokenizer.decode(ids) == text


def word_piece() -> TokenizerFiles:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(
        TEXTS, trainers.WordPieceTrainer(special_tokens=["[UNK]", "[CLS]", "[SEP]"])
    )
    return {"tokenizer.json": tokenizer.to_str().encode()}


@pytest.mark.parametrize("is_bytes", [True, False])
def test_ids_without_offsets_are_those_with_them(trained: TokenizerFiles, is_bytes: bool) -> None:
    files = trained if is_bytes else word_piece()
    usual = Tokenizer.from_str(files["tokenizer.json"].decode())
    usual.encode_special_tokens = True
    ours = TextEncoder(files, name="t")
    for text in (*TEXTS, "", " ", "déjà  vu\r\n\U0001f600 [SEP] <|endoftext|>", "\u0301a" * 9):
        assert ours.encode(text) == usual.encode(text, add_special_tokens=False).ids


def test_text_cannot_forge_the_end_of_a_document(trained: TokenizerFiles) -> None:
    encoder = TextEncoder(trained, name="trained")
    assert encoder.end_of_text_id not in encoder.encode(f"a{END_OF_TEXT}b")


def test_auto_takes_the_models_tokenizer_if_it_has_one(
    trained: TokenizerFiles, tmp_path: Path
) -> None:
    folder = write(trained, tmp_path / "model")
    (tmp_path / "bare").mkdir()
    assert find_tokenizer("auto", folder) == trained
    assert find_tokenizer("auto", tmp_path / "bare") is None
    assert find_tokenizer("auto", None) is None
    assert find_tokenizer("train", folder) is None
    assert find_tokenizer(str(folder), None) == trained
    assert find_tokenizer(str(folder / "tokenizer.json"), None) == trained


def test_a_bare_tokenizer_json_gets_what_transformers_needs(
    trained: TokenizerFiles, tmp_path: Path
) -> None:
    folder = write({"tokenizer.json": trained["tokenizer.json"]}, tmp_path / "bare")
    files = find_tokenizer(str(folder), None)
    assert files is not None
    copy = AutoTokenizer.from_pretrained(write(files, tmp_path / "copy"))
    assert copy.decode(copy("the cat")["input_ids"]) == "the cat"


def test_the_declared_end_token_is_used(trained: TokenizerFiles) -> None:
    config = json.dumps({"eos_token": {"content": "the"}}).encode()
    files = {"tokenizer.json": trained["tokenizer.json"], "tokenizer_config.json": config}
    encoder = TextEncoder(files, name="odd")
    assert encoder.encode("the") == [encoder.end_of_text_id]


def test_the_separator_of_bert_ends_a_document(trained: TokenizerFiles) -> None:
    content = trained["tokenizer.json"].replace(END_OF_TEXT.encode(), b"[SEP]")
    files = {"tokenizer.json": content, "tokenizer_config.json": b"{}"}
    encoder = TextEncoder(files, name="bert")
    assert encoder.vocab_size > encoder.end_of_text_id >= 0


def test_a_tokenizer_without_an_end_token_is_refused(trained: TokenizerFiles) -> None:
    content = trained["tokenizer.json"].replace(END_OF_TEXT.encode(), b"<start>")
    with pytest.raises(RequestError, match=r"odd has no end-of-text token.*eos_token.*train"):
        TextEncoder({"tokenizer.json": content}, name="odd")


@pytest.mark.parametrize("content", [b"{oops", b"[" * 100_000, b"\xff"])
@pytest.mark.parametrize("name", ["special_tokens_map.json", "tokenizer_config.json"])
def test_a_damaged_side_file_is_named(
    trained: TokenizerFiles, tmp_path: Path, name: str, content: bytes
) -> None:
    folder = write({"tokenizer.json": trained["tokenizer.json"], name: content}, tmp_path / "t")
    with pytest.raises(DataError, match=rf"{name}.* is not JSON .*Fetch or save it again"):
        files = find_tokenizer(str(folder), None)
        assert files is not None
        TextEncoder(files, name="t")


def test_a_damaged_side_file_of_the_models_tokenizer_is_named_by_its_path(
    trained: TokenizerFiles, tmp_path: Path
) -> None:
    files = {"tokenizer.json": trained["tokenizer.json"], "tokenizer_config.json": b"{oops"}
    folder = write(files, tmp_path / "model")
    with pytest.raises(DataError, match=rf"^{folder}/tokenizer_config\.json is not JSON"):
        find_tokenizer("auto", folder)


def test_a_tokenizer_that_may_not_be_read_is_named(
    trained: TokenizerFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(trained, tmp_path / "t")

    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(RequestError, match=r"t/tokenizer\.json cannot be read: Permission denied"):
        find_tokenizer(str(folder), None)


@pytest.mark.parametrize("vocab_size", [257, 2**24])
def test_the_least_and_the_largest_vocabulary_are_trained(vocab_size: int) -> None:
    assert Data(vocab_size=vocab_size).vocab_size == vocab_size
    encoder = TextEncoder(train_bpe(iter(TEXTS), vocab_size=vocab_size), name="edge")
    assert 257 <= encoder.vocab_size <= min(vocab_size, 400)


@pytest.mark.parametrize("vocab_size", [256, 2**24 + 1, 2**31, 2**63])
def test_a_vocabulary_out_of_bounds_is_refused_by_its_setting(vocab_size: int) -> None:
    with pytest.raises(RecipeError, match=r"data\.vocab_size=\d+ is not .* 257 to 16777216"):
        load_recipe([], [f"data.vocab_size={vocab_size}"])


def test_a_damaged_tokenizer_is_named() -> None:
    with pytest.raises(DataError, match=r"odd: tokenizer\.json is not a tokenizer.*Fetch or save"):
        TextEncoder({"tokenizer.json": b"{}"}, name="odd")


def test_a_tokenizer_of_the_older_form_says_how_to_convert_it(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\n")
    with pytest.raises(RequestError, match=r"only tokenizer\.model.*save_pretrained"):
        find_tokenizer("auto", tmp_path)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"holds no tokenizer\.json.*data\.tokenizer=train"):
        find_tokenizer(str(tmp_path), None)


def test_a_path_that_is_missing_is_not_looked_for_on_the_hub() -> None:
    with pytest.raises(RequestError, match=r"'\./no/such/folder' is neither"):
        find_tokenizer("./no/such/folder", None)


@pytest.mark.heavy
def test_a_hub_name_without_network_says_so(tmp_path: Path) -> None:
    script = (
        "from shardyard.data.tokenizer import find_tokenizer\n"
        "from shardyard.errors import RequestError\n"
        "try: find_tokenizer('someone/some-model', None)\n"
        "except RequestError as error: print(error)"
    )
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=offline, stdout=-1, check=True)
    assert "HF_HUB_OFFLINE forbids to ask the Hugging Face hub" in done.stdout.decode()
    assert "give its folder instead of the name" in done.stdout.decode()
