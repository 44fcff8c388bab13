"""The token that begins a document: what the model's own data began with, or none."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

from shardyard.config.fingerprint import digest
from shardyard.config.resolved import DatasetMetadata
from shardyard.config.schema.recipe import Recipe
from shardyard.data.prepare import prepare
from shardyard.data.shards import TokenShards, read_metadata
from shardyard.errors import RequestError
from shardyard.tasks.causal_lm import prompt_ids

TEXTS = ["the cat", "a hat é\nthe", "the", "hat cat " * 50, "", "a"]
_PIECES = ("▁", "t", "h", "e", "c", "a", "▁t", "he", "▁the", "▁c", "at", "▁cat")
_MERGES = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "c"), ("a", "t"), ("▁c", "at")]


def as_llama_2(folder: Path, **config: Any) -> Path:
    """The parts of Llama 2's tokenizer.json, with few words."""
    marks = ["<unk>", "<s>", "</s>"]
    words = [*marks, *(f"<0x{byte:02X}>" for byte in range(256)), *_PIECES]
    model = models.BPE(
        {word: number for number, word in enumerate(words)},
        _MERGES,
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(marks)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return save(tokenizer, folder, tokenizer_class="LlamaTokenizer", **config)


def as_llama_3(folder: Path) -> Path:
    """A template behind the processor of bytes, as in Llama 3's tokenizer.json."""
    tokenizer = bytes_tokenizer()
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)]
            ),
        ]
    )
    return save(tokenizer, folder)


def as_gpt_2(folder: Path, *, leading: str = "") -> Path:
    """It declares a bos_token, and puts none before a text."""
    tokenizer = bytes_tokenizer()
    if leading:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{leading} $A", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    return save(tokenizer, folder)


def bytes_tokenizer() -> Tokenizer:
    words = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, **config: Any) -> Path:
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    content = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    return folder


def prepared(folder: Path, **settings: Any) -> DatasetMetadata:
    (folder / "x.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    data = {"source": str(folder / "x.jsonl"), "dir": str(folder), "workers": 1, "vocab_size": 300}
    recipe = Recipe.model_validate({"data": {**data, "eval_fraction": 0.0, **settings}})
    return prepare(recipe, model_dir=None, progress=lambda *_: None)


def documents_of(facts: DatasetMetadata) -> list[list[int]]:
    shards = TokenShards(Path(facts.dir), "train")
    tokens = shards.read(0, shards.num_tokens)
    return [part.tolist() for part in np.split(tokens, shards.document_starts[1:])]


@pytest.mark.parametrize("make", [as_llama_2, as_llama_3, as_gpt_2])
def test_each_document_is_what_transformers_makes_of_it_and_the_end_token(
    tmp_path: Path, make: Any
) -> None:
    folder = make(tmp_path / "tokenizer")
    facts = prepared(tmp_path, tokenizer=str(folder))
    theirs = AutoTokenizer.from_pretrained(folder)
    wanted = [[*theirs(text)["input_ids"], theirs.eos_token_id] for text in TEXTS if text]
    assert documents_of(facts) == wanted
    assert facts.bos_token == (None if make is as_gpt_2 else "<s>")


@pytest.mark.parametrize("flag", [True, False])
def test_the_tokenizer_file_decides_and_not_a_flag_beside_it_as_in_transformers(
    tmp_path: Path, flag: bool
) -> None:
    folder = as_llama_2(tmp_path / "tokenizer", add_bos_token=flag)
    facts = prepared(tmp_path, tokenizer=str(folder))
    assert AutoTokenizer.from_pretrained(folder)("the")["input_ids"][0] == 1
    assert {document[0] for document in documents_of(facts)} == {1}


def test_a_document_that_goes_on_in_another_section_has_one_beginning(tmp_path: Path) -> None:
    folder = as_llama_3(tmp_path / "tokenizer")
    (tmp_path / "book.txt").write_text("words of a book\n" * 20_000)  # five sections
    facts = prepared(tmp_path, tokenizer=str(folder), source=str(tmp_path / "book.txt"))
    (document,) = documents_of(facts)
    assert (document.count(0), document[0], document.count(1), document[-1]) == (1, 0, 1, 1)


@pytest.mark.parametrize("make", [as_llama_2, as_llama_3])
def test_false_leaves_it_out_and_gives_the_data_of_before(tmp_path: Path, make: Any) -> None:
    folder = make(tmp_path / "tokenizer")
    with_it = prepared(tmp_path, tokenizer=str(folder))
    without = prepared(tmp_path, tokenizer=str(folder), bos=False)
    assert without.bos_token is None
    assert documents_of(without) == [document[1:] for document in documents_of(with_it)]
    assert with_it.fingerprint != without.fingerprint
    request = json.loads((Path(without.dir) / "manifest.json").read_text())["request"]
    assert "bos_token" not in request  # so the folder's name is that of earlier versions
    assert Path(without.dir).name == f"x-{digest(request)}"


def test_true_takes_the_declared_token(tmp_path: Path) -> None:
    facts = prepared(tmp_path, tokenizer=str(as_gpt_2(tmp_path / "tokenizer")), bos=True)
    assert facts.bos_token == "<s>"
    assert {document[0] for document in documents_of(facts)} == {0}


def test_a_tokenizer_trained_here_begins_with_none(tmp_path: Path) -> None:
    assert prepared(tmp_path).bos_token is None
    with pytest.raises(RequestError, match=r"data\.bos=true, but a tokenizer that is trained here"):
        prepared(tmp_path, bos=True)


def test_true_without_such_a_token_is_refused(tmp_path: Path) -> None:
    folder = as_gpt_2(tmp_path / "tokenizer")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>", "bos_token": "<none>"}')
    with pytest.raises(RequestError, match=r"names no bos_token of its vocabulary\. Set data\.bos"):
        prepared(tmp_path, tokenizer=str(folder), bos=True)


def test_two_tokens_before_a_text_are_refused(tmp_path: Path) -> None:
    folder = as_gpt_2(tmp_path / "tokenizer", leading="<s> </s>")
    with pytest.raises(RequestError, match=r"data\.bos=auto: .* puts 2 tokens .*\(<s> </s>\)"):
        prepared(tmp_path, tokenizer=str(folder))


def test_a_data_set_of_before_has_none(tmp_path: Path) -> None:
    facts = prepared(tmp_path, tokenizer=str(as_gpt_2(tmp_path / "tokenizer")))
    manifest = Path(facts.dir) / "manifest.json"
    content = json.loads(manifest.read_text())
    del content["bos_token"]
    manifest.write_text(json.dumps(content))
    assert read_metadata(Path(facts.dir)) == facts


def test_a_prompt_begins_as_documents_do_and_has_no_end(tmp_path: Path) -> None:
    folder = as_llama_2(tmp_path / "llama")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    bare = tokenizer.encode("the cat", add_special_tokens=False).ids
    assert prompt_ids(tokenizer, "the cat", "<s>") == [1, *bare]
    assert prompt_ids(tokenizer, "the cat", None) == bare
