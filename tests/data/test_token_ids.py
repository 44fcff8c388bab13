"""Files of ids that others wrote are learnt as the ids that they hold.

The files in ``token_ids/`` are of the other projects' own writers (``token_ids/README.md``); their
content is what ``documents`` gives.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from transformers import AutoTokenizer

from shardyard.config.resolved import DatasetMetadata
from shardyard.config.schema.recipe import Recipe
from shardyard.data.byte_ranges import SourceFile, Span
from shardyard.data.formats import format_of
from shardyard.data.prepare import prepare
from shardyard.data.readers import token_ids as readers
from shardyard.data.readers.columns import TextOf
from shardyard.data.shards import TokenShards
from shardyard.data.sources import read_sections
from shardyard.data.token_ids import ids_of
from shardyard.data.work_units import encoder_in
from shardyard.errors import RequestError, ShardyardError, SourceError
from tests.data.token_ids.documents import END, documents

FILES = Path(__file__).parent / "token_ids"

Write = Callable[[Path, Sequence[Sequence[int]]], str]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer of 300 tokens, whose id 0 ends a text."""
    folder = tmp_path_factory.mktemp("tokenizer")
    words = "tokenizers learn pairs of letters that stand next to each other again and again"
    (folder / "a.txt").write_text(f"{words}, {words.upper()}. " * 50)
    data = {"source": str(folder / "a.txt"), "dir": str(folder / "out"), "vocab_size": 300}
    recipe = Recipe.model_validate({"data": {**data, "eval_fraction": 0.0, "workers": 1}})
    made = Path(prepare(recipe, model_dir=None, progress=lambda *_: None).dir)
    assert (encoder_in(made).end_of_text_id, encoder_in(made).vocab_size) == (END, 300)
    return str(made)


def run(source: str, folder: Path, tokenizer: str, **settings: Any) -> DatasetMetadata:
    data = {
        "source": source,
        "dir": f"{folder}-out",
        "tokenizer": tokenizer,
        "format": "token_ids",
        "eval_fraction": 0.0,
        "workers": 1,
        **settings,
    }
    recipe = Recipe.model_validate({"data": data})
    return prepare(recipe, model_dir=None, progress=lambda *_: None)


def learnt(metadata: DatasetMetadata, split: str = "train") -> list[list[int]]:
    """Each document of the prepared data, with the id that ends it."""
    shards = TokenShards(Path(metadata.dir), split)
    starts = [*shards.document_starts.tolist(), shards.num_tokens]
    return [shards.read(start, stop).tolist() for start, stop in pairwise(starts)]


def ended(texts: Sequence[Sequence[int]]) -> list[list[int]]:
    return [[*text, END] for text in texts if text]


def flat(texts: Sequence[Sequence[int]], dtype: str) -> npt.NDArray[Any]:
    return np.array([number for text in ended(texts) for number in text], dtype=dtype)


def nanogpt(folder: Path, texts: Sequence[Sequence[int]]) -> str:
    """As nanoGPT's data/openwebtext/prepare.py: ids, each text with its end."""
    flat(texts, "<u2").tofile(folder / "train.bin")
    (folder / "meta.pkl").write_bytes(b"never read")
    return str(folder)


def llm_c(folder: Path, texts: Sequence[Sequence[int]]) -> str:
    """As llm.c's dev/data/data_common.py: 256 numbers of header, and an end before each text."""
    header = np.zeros(256, dtype="<i4")
    ids = np.array([END, *flat(texts, "<u2")[:-1]], dtype="<u2")
    header[:3] = 20240520, 1, len(ids)
    (folder / "a.bin").write_bytes(header.tobytes() + ids.tobytes())
    return str(folder / "a.bin")


def llm_c_llama3(folder: Path, texts: Sequence[Sequence[int]]) -> str:
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240801, 7, 0
    (folder / "a.bin").write_bytes(header.tobytes() + flat(texts, "<u4").tobytes())
    return str(folder / "a.bin")


def npy(folder: Path, texts: Sequence[Sequence[int]]) -> str:
    np.save(folder / "a.npy", flat(texts, "<i4"))
    return str(folder / "*.npy")


def jsonl(folder: Path, texts: Sequence[Sequence[int]]) -> str:
    """Rows of transformers: padded, with a mask and labels that learn all."""
    rows = [
        {"input_ids": [*text, 7, 7], "attention_mask": [1] * len(text) + [0, 0], "labels": text}
        for text in texts
    ]
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return str(folder)


def arrow(folder: Path, texts: Sequence[Sequence[int]]) -> str:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"tokens": ended(texts)}), folder / "a.parquet")
    return str(folder)


WRITERS: list[Write] = [nanogpt, llm_c, llm_c_llama3, npy, jsonl, arrow]


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_the_ids_of_a_file_are_learnt_as_its_documents(
    write: Write, tokenizer: str, tmp_path: Path
) -> None:
    texts = documents()
    metadata = run(write(tmp_path, texts), tmp_path, tokenizer)
    assert learnt(metadata) == ended(texts)
    assert metadata.train_bytes is None  # of its text, which nobody knows


@pytest.mark.parametrize(
    "name",
    ["megatron", "megatron-sentences-eod", "datatrove", "mds-bytes", "mds-ndarray", "mds-dynamic"],
)
def test_files_of_other_projects_own_writers_are_learnt_as_their_documents(
    name: str, tokenizer: str, tmp_path: Path
) -> None:
    metadata = run(str(FILES / name), tmp_path, tokenizer, id_rows="documents")
    assert learnt(metadata) == ended(documents())


def cut(path: Path, span_bytes: int) -> list[list[int]]:
    """The documents of a file that is read in spans of so many bytes."""
    format = format_of(path.name, "token_ids")
    size = path.stat().st_size
    assert format is not None
    file = SourceFile(str(path), path.name, format, size, 0)
    spans = tuple(
        Span(file, start, min(start + span_bytes, size)) for start in range(0, size, span_bytes)
    )
    sections = read_sections(spans, TextOf(end_id=END))
    return [[n for n in ids_of(each.text).tolist() if n != END] for each in sections]


@pytest.mark.parametrize("span_bytes", [pytest.param(7, marks=pytest.mark.heavy), 64, 1000])
def test_a_file_cut_at_any_byte_gives_the_same_documents(
    span_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "SECTION_BYTES", 50)
    texts = documents()
    for write in (nanogpt, llm_c, npy):
        write(tmp_path, texts)
    for path in (
        *(tmp_path / name for name in ("train.bin", "a.bin", "a.npy")),
        *(FILES.glob("megatron*/*.bin")),
        *(FILES.glob("datatrove/*.ds")),
    ):
        found = [text for text in cut(path, span_bytes) if text]
        assert found == texts, path


def test_rows_that_transformers_tokenized_are_learnt_like_their_text(
    tokenizer: str, tmp_path: Path
) -> None:
    texts = [f"letters next to {number} others" + " and LETTERS" * number for number in range(9)]
    encode = AutoTokenizer.from_pretrained(tokenizer)
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": each}) for each in texts))
    rows = "\n".join(json.dumps(dict(encode(each))) for each in texts)
    (tmp_path / "rows.jsonl").write_text(rows)
    of_text = run(str(tmp_path / "text.jsonl"), tmp_path, tokenizer, format="by_suffix")
    of_rows = run(str(tmp_path / "rows.jsonl"), tmp_path, tokenizer)
    assert learnt(of_rows) == learnt(of_text)
    assert of_rows.unigram_entropy == of_text.unigram_entropy


def test_whole_documents_are_held_out(tokenizer: str, tmp_path: Path) -> None:
    texts = documents()
    metadata = run(nanogpt(tmp_path, texts), tmp_path, tokenizer, eval_fraction=0.3)
    train, held_out = learnt(metadata), learnt(metadata, "eval")
    assert 3 < len(held_out) < 20
    assert sorted(train + held_out) == sorted(ended(texts))


def test_blocks_are_one_stream_and_have_to_be_named(tokenizer: str, tmp_path: Path) -> None:
    texts = documents()
    stream = flat(texts, "<i4")[: len(flat(texts, "<i4")) // 50 * 50]
    rows = [{"input_ids": block.tolist()} for block in stream.reshape(-1, 50)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    source = str(tmp_path / "a.jsonl")
    with pytest.raises(RequestError, match=r"have 50 ids each.*\. Set data\.id_rows=blocks"):
        run(source, tmp_path, tokenizer)
    joined = [number for text in learnt(run(source, tmp_path, tokenizer, id_rows="blocks"))
              for number in text]  # fmt: skip
    assert joined[: len(stream)] == stream.tolist()
    as_rows = learnt(run(source, tmp_path, tokenizer, id_rows="documents"))
    assert len(as_rows) > len(texts)


def _wide(folder: Path) -> str:
    flat([[200 + number % 90 for number in range(700)]], "<u4").tofile(folder / "a.bin")
    return str(folder / "a.bin")


def _large(folder: Path) -> str:
    np.array([5, 300, END], dtype="<u2").tofile(folder / "a.bin")
    return str(folder / "a.bin")


def _cut(folder: Path) -> str:
    (folder / "a.bin").write_bytes(b"\1\0\2")
    return str(folder / "a.bin")


def _matrix(folder: Path) -> str:
    np.save(folder / "a.npy", np.ones((4, 8), dtype="<i4"))
    return str(folder / "a.npy")


def _float(folder: Path) -> str:
    (folder / "a.jsonl").write_text('{"input_ids": [1.5, 2.0]}\n')
    return str(folder / "a.jsonl")


def _negative(folder: Path) -> str:
    (folder / "a.jsonl").write_text('{"input_ids": [1, -2]}\n')
    return str(folder / "a.jsonl")


def _ignored(folder: Path) -> str:
    (folder / "a.jsonl").write_text('{"input_ids": [1, 2], "labels": [-100, 2]}\n')
    return str(folder / "a.jsonl")


def _text(folder: Path) -> str:
    (folder / "a.jsonl").write_text('{"text": "hello"}\n')
    return str(folder / "a.jsonl")


def _short_mask(folder: Path) -> str:
    (folder / "a.jsonl").write_text('{"tokens": [1, 2], "attention_mask": [1]}\n')
    return str(folder / "a.jsonl")


def _txt(folder: Path) -> str:
    (folder / "a.txt").write_text("hello")
    return str(folder / "a.txt")


def _index_cut(folder: Path) -> str:
    shutil.copytree(FILES / "megatron", folder / "m")
    (index,) = (folder / "m").glob("*.idx")
    index.write_bytes(index.read_bytes()[:100])
    return str(folder / "m")


def _index_of_another(folder: Path) -> str:
    shutil.copytree(FILES / "megatron", folder / "m")
    (content,) = (folder / "m").glob("*.bin")
    content.write_bytes(content.read_bytes()[:200])
    return str(folder / "m")


def _no_index(folder: Path) -> str:
    shutil.copytree(FILES / "datatrove", folder / "d")
    next((folder / "d").glob("*.index")).unlink()
    return str(folder / "d")


def _mds_cut(folder: Path) -> str:
    shutil.copytree(FILES / "mds-bytes", folder / "m")
    shard = folder / "m" / "shard.00000.mds"
    shard.write_bytes(shard.read_bytes()[:-3])
    return str(folder / "m")


def _loss_mask(folder: Path) -> str:
    shutil.copytree(FILES / "datatrove", folder / "d")
    (folder / "d" / "00000_a.ds.loss").write_bytes(b"\1")
    return str(folder / "d")


def _npy_as_bin(folder: Path) -> str:
    np.save(folder / "a.npy", np.ones(8, dtype="<u2"))
    (folder / "a.npy").rename(folder / "a.bin")
    return str(folder / "a.bin")


WRONG = [
    (_wide, r"every second number is below 16.*Set data\.id_type=uint32"),
    (_large, r"a\.bin, id 1: there is token id 300, and .* has 300 tokens"),
    (_cut, r"a\.bin has 3 bytes, which is no whole number of ids of 2 bytes"),
    (_matrix, r"a\.npy holds int32 of shape \[4, 8\].*ids\.reshape\(-1\)"),
    (_float, r"a\.jsonl:1, input_ids is no list of whole numbers"),
    (_negative, r"a\.jsonl:1: -2 is no id of a token"),
    (_ignored, r"labels of -100 mark tokens without loss.*data\.format=chat"),
    (_text, r"a row of ids has one of input_ids, tokens, token_ids, and this has the keys text"),
    (_short_mask, r"attention_mask has 1 numbers for 2 ids"),
    (_txt, r"data\.format=token_ids takes only \.bin, \.npy, \.ds, \.mds, and rows"),
    (_index_cut, r"\.idx has 100 bytes, and .* are needed"),
    (_index_of_another, r"document \d+: its index says ids .* Copy|The two do not belong together"),
    (_no_index, r"\.ds\.index is not next to it, which datatrove writes too\. Copy it there"),
    (_mds_cut, r"cannot be read as an MDS shard: its samples do not end with the file"),
    (_loss_mask, r"00000_a\.ds\.loss.*takes only \.bin"),
    (_npy_as_bin, r"is an array of NumPy\. Name it \.npy"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "words"), WRONG, ids=[make.__name__ for make, _ in WRONG])
def test_a_wrong_file_is_named_with_what_to_do(
    make: Callable[[Path], str], words: str, tokenizer: str, tmp_path: Path
) -> None:
    with pytest.raises((SourceError, RequestError), match=words):
        run(make(tmp_path), tmp_path, tokenizer)


def test_a_text_without_an_end_is_found_before_memory_is_full(
    tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "MOST_DOCUMENT_IDS", 1000)
    monkeypatch.setattr(readers, "SECTION_BYTES", 500)
    np.full(2000, 5, dtype="<u2").tofile(tmp_path / "a.bin")
    with pytest.raises(SourceError, match=r"no id 0, which ends a text, in 1,000 ids\. Set"):
        run(str(tmp_path / "a.bin"), tmp_path, tokenizer)


def test_ids_are_named_where_the_recipe_expects_text(tmp_path: Path) -> None:
    np.zeros(8, dtype="<u2").tofile(tmp_path / "a.bin")
    data = {"source": str(tmp_path), "dir": str(tmp_path / "out"), "vocab_size": 300}
    with pytest.raises(ShardyardError, match=r"\.bin: if it holds ids .*data\.format=token_ids"):
        prepare(Recipe.model_validate({"data": data}), model_dir=None, progress=lambda *_: None)


def test_rows_of_ids_are_named_where_the_recipe_expects_text(tmp_path: Path) -> None:
    source = jsonl(tmp_path, documents())
    data = {"source": source, "dir": str(tmp_path / "out"), "vocab_size": 300}
    with pytest.raises(ShardyardError, match=r"holds ids of a tokenizer: set data\.format=tok"):
        prepare(Recipe.model_validate({"data": data}), model_dir=None, progress=lambda *_: None)


def test_no_tokenizer_is_trained_on_ids(tmp_path: Path) -> None:
    source = nanogpt(tmp_path, documents())
    with pytest.raises(RequestError, match=r"cannot be trained on them\. Set data\.tokenizer"):
        run(source, tmp_path, "train", vocab_size=300)
