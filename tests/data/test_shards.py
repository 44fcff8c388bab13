"""Token shards: reading across their borders, and refusing what is damaged."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from shardyard.config.schema.recipe import Recipe
from shardyard.data.prepare import prepare
from shardyard.data.shards import TokenShards, read_metadata, token_dtype, verify
from shardyard.errors import DataError


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 3 MB of text, so three pieces, each with shards of both splits."""
    folder = tmp_path_factory.mktemp("data")
    lines = [{"text": f"document {number} " * (number % 90)} for number in range(4400)]
    (folder / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe = Recipe.model_validate(
        {
            "data": {
                "source": str(folder / "lines.jsonl"),
                "dir": str(folder / "prepared"),
                "vocab_size": 300,
                "eval_fraction": 0.2,
                "workers": 1,
            }
        }
    )
    return Path(prepare(recipe, model_dir=None, progress=lambda *_: None).dir)


@pytest.fixture
def copy(prepared: Path, tmp_path: Path) -> Path:
    return shutil.copytree(prepared, tmp_path / "copy")


@pytest.mark.parametrize("split", ["train", "eval"])
def test_any_range_is_read_as_from_one_array(prepared: Path, split: str) -> None:
    paths = sorted(prepared.glob(f"{split}-*.bin"))
    assert len(paths) >= 3
    whole = np.concatenate([np.fromfile(path, dtype="<u2") for path in paths]).astype(np.int64)
    shards = TokenShards(prepared, split)
    assert shards.num_tokens == len(whole)
    border = paths[0].stat().st_size // 2
    ranges = [(0, 0), (0, 1), (border - 3, border + 3), (border, border + 1), (border, border)]
    for start, stop in [*ranges, (len(whole), len(whole)), (5, len(whole) - 5), (0, len(whole))]:
        tokens = shards.read(start, stop)
        assert tokens.dtype == np.int64
        assert np.array_equal(tokens, whole[start:stop])


def test_documents_start_after_each_end_of_text(prepared: Path) -> None:
    end_of_text = json.loads((prepared / "manifest.json").read_text())["end_of_text_id"]
    shards = TokenShards(prepared, "train")
    tokens = shards.read(0, shards.num_tokens)
    expected = np.concatenate([[0], np.flatnonzero(tokens == end_of_text)[:-1] + 1])
    assert np.array_equal(shards.document_starts, expected)
    assert tokens[-1] == end_of_text
    low, high = int(expected[30]), int(expected[4])
    low, high = min(low, high), max(low, high)
    assert shards.document_starts_in(low, high + 1).tolist() == (expected[4:31] - low).tolist()
    assert shards.document_starts_in(low + 1, high).tolist() == (expected[5:30] - low - 1).tolist()


def test_ids_take_two_bytes_while_they_fit() -> None:
    assert token_dtype(65536) == np.dtype("<u2")
    assert token_dtype(65537) == np.dtype("<u4")


def test_a_sound_data_set_passes(prepared: Path) -> None:
    verify(prepared)
    assert read_metadata(prepared).train_tokens == TokenShards(prepared, "train").num_tokens


def test_a_truncated_shard_is_named_when_it_is_opened(copy: Path) -> None:
    path = copy / "train-00001.bin"
    path.write_bytes(path.read_bytes()[:-2])
    message = r"train-00001\.bin is damaged: it has [\d,]+ bytes, the manifest says .*Delete the"
    for open_it in (read_metadata, verify, lambda folder: TokenShards(folder, "train")):
        with pytest.raises(DataError, match=message):
            open_it(copy)
    TokenShards(copy, "eval")  # the other split is sound


def test_a_missing_shard_is_named(copy: Path) -> None:
    (copy / "eval-00000.idx.npy").unlink()
    with pytest.raises(DataError, match=r"eval-00000\.idx\.npy is damaged: it cannot be found"):
        TokenShards(copy, "eval")


def test_a_changed_byte_is_found_by_verify(copy: Path) -> None:
    path = copy / "eval-00000.bin"
    content = bytearray(path.read_bytes())
    content[10] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"eval-00000\.bin is damaged: its SHA-256 .*prepare again"):
        verify(copy)


def test_document_starts_that_are_no_array_are_named(copy: Path) -> None:
    path = copy / "eval-00000.idx.npy"
    path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(DataError, match=r"eval-00000\.idx\.npy is damaged: it is not an array"):
        _ = TokenShards(copy, "eval").document_starts


def test_a_folder_that_is_not_finished_says_how_to_finish_it(copy: Path) -> None:
    (copy / "manifest.json").unlink()
    with pytest.raises(DataError, match=r"manifest\.json, which is written last.*continues where"):
        TokenShards(copy, "train")


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 99}'])
def test_a_manifest_of_another_kind_is_refused(copy: Path, content: str) -> None:
    (copy / "manifest.json").write_text(content)
    with pytest.raises(DataError, match=r"manifest\.json is damaged: .*Delete the folder"):
        read_metadata(copy)
