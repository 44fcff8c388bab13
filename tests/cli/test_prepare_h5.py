"""`shardyard prepare --also h5`."""

from pathlib import Path

import pytest

from shardyard.cli import main
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


def test_a_task_without_pairs_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", *recipe_in(tmp_path, "masked_lm"), "--also", "h5"]) == 2
    err = capfd.readouterr().err
    assert "no segments and no next_sentence_labels. Set task.name=bert_pretraining" in err
    assert main(["prepare", "x", "--also", "h5", "--dry-run"]) == 2
    assert "--also goes with neither --on nor --dry-run" in capfd.readouterr().err
