"""Wrong requests: one message that says what, why and what to do; nothing is started or written."""

import shutil
from pathlib import Path

import pytest

from shardyard.cli import main
from tests.e2e.shardyard import Answer, Place

REFUSED = [
    ("train", 2, ["Missing argument 'RECIPE...'", "shardyard train --help"]),
    ("trian tiny.yaml", 2, ["unknown verb 'trian'", "`shardyard train tiny.yaml`?"]),
    ("train q.txt", 2, ["recipe q.txt does not exist.", "Give a YAML file."]),
    ("train tony.yaml", 2, ["recipe tony.yaml does not exist.", "Did you mean tiny.yaml?"]),
    ("train text", 2, ["recipe text is a folder.", "Give a YAML file."]),
    ("train tiny.yaml --steps=5", 2, ["unknown option --steps", "Settings have no dashes"]),
    ("train tiny.yaml optim.lr 1e-3", 2, ["one word without spaces: optim.lr=VALUE"]),
    ("train tiny.yaml optim.lr=", 2, ["optim.lr=null is not a number above 0, or auto"]),
    ("train tiny.yaml optim.lrr=1", 2, ["unknown setting", "Did you mean optim.lr?"]),
    ("train tiny.yaml data.source=./gone", 2, ["gone' does not exist", "Correct the path"]),
    ("train tiny.yaml data.source=./none", 2, ["names no file.", "Give a folder, file or glob"]),
    ("train tiny.yaml data.source=./blank", 2, ["is an empty corpus", "Give files with text."]),
    ("train tiny.yaml model.preset=null model.path=gone", 2, ["gone does not exist"]),
    ("train tiny.yaml parallel.dp_shard=3", 2, ["dp_shard=3 does not divide the 2", "Use 1 or 2"]),
    ("train tiny.yaml precision.compute=fp8", 2, ["1 problem", "Use bf16 or fp32"]),
    ("train tiny.yaml memory.offload=params parallel.zero=1", 2, ["Set parallel.zero=3"]),
    ("prepare tiny.yaml cluster.device=xla", 2, ["can be planned, not trained yet. Use a mach"]),
    ("train tiny.yaml cluster.nodes=2", 2, ["cluster.nodes=2", "Use cluster.nodes=1 here"]),
    ("train tiny.yaml optim.micro_batch=8", 2, ["micro_batch=8 is more than the 6", "at most 6"]),
    ("train tiny.yaml cluster.devices=64", 2, ["fewer samples than the 64", "at most 6 ranks"]),
    ("train tiny.yaml run.steps=2 run.epochs=1", 2, ["are all lengths of the run", "Keep one"]),
    ("resume nothing", 2, ["RUN 'nothing' is neither a run folder nor", "--runs-dir"]),
    ("report nothing", 2, ["RUN 'nothing' is neither a run folder nor"]),
    ("export nothing --to x", 2, ["RUN 'nothing' is neither a run folder nor"]),
    ("plan tiny.yaml cluster.instance=p5.48xl", 2, ["is not in the catalogue", "p5.48xlarge"]),
]  # fmt: skip


@pytest.mark.heavy
@pytest.mark.parametrize(("words", "code", "told"), REFUSED, ids=[row[0] for row in REFUSED])
def test_a_wrong_request_is_refused_before_anything_is_started(
    place: Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    code: int,
    told: list[str],
) -> None:
    shutil.copy(place.folder / "tiny.yaml", tmp_path)
    shutil.copytree(place.folder / "text", tmp_path / "text")
    (tmp_path / "none").mkdir()
    (tmp_path / "blank").mkdir()
    (tmp_path / "blank" / "a.txt").touch()
    before = {entry.name for entry in tmp_path.iterdir()}

    monkeypatch.chdir(tmp_path)
    found = main(words.split())
    answer = Answer(found, *capsys.readouterr())
    assert (answer.code, answer.out) == (code, "")
    assert answer.err.startswith("error: ") and "Traceback" not in answer.err
    for part in told:
        assert part in answer.err
    assert {entry.name for entry in tmp_path.iterdir()} == before


def test_more_processes_than_samples_are_refused_once_the_text_is_counted(
    place: Place, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("a few words\n")
    answer = place.run(
        "train", "tiny.yaml", f"data.source={tmp_path}", "data.eval_fraction=0",
        "task.eval_every_steps=null", "cluster.devices=4", f"data.dir={tmp_path}/prepared",
    )  # fmt: skip
    assert answer.code == 2
    assert "make 1 samples of 32 tokens, fewer than the 4 data-parallel ranks" in answer.err
    assert "Use more data, a smaller data.seq_len, or fewer devices." in answer.err


def test_a_file_in_the_way_is_named(place: Place, prepared: Answer, tmp_path: Path) -> None:
    assert prepared.code == 0
    (tmp_path / "file").touch()
    runs = place.run("train", "tiny.yaml", f"run.dir={tmp_path}/file")
    assert runs.code == 1
    assert f"{tmp_path}/file is a file, not a folder." in runs.err
    assert "choose another with run.dir" in runs.err

    shards = place.run("train", "tiny.yaml", f"data.dir={tmp_path}/file")
    assert shards.code == 1
    assert "choose another with data.dir" in shards.err


def test_a_damaged_shard_is_named_with_the_remedy(
    place: Place, prepared: Answer, tmp_path: Path
) -> None:
    folder, data = tmp_path / "prepared", Path(prepared.json["dir"])
    shutil.copytree(data, folder / data.name)
    shard = folder / data.name / "train-00000.bin"
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size - 2)
    answer = place.run("train", "tiny.yaml", f"data.dir={folder}", "run.id=damaged-shard")
    assert (answer.code, answer.out) == (1, "")
    assert f"{shard} is damaged" in answer.err
    assert f"Delete the folder {shard.parent} and prepare again" in answer.err
    assert not place.run_dir("damaged-shard").path.exists()


def test_a_recipe_elsewhere_reads_its_data_from_the_current_folder(
    place: Place, prepared: Answer, tmp_path: Path
) -> None:
    recipe = tmp_path / "tiny.yaml"
    shutil.copy(place.folder / "tiny.yaml", recipe)
    answer = place.run("prepare", str(recipe), "--json", HOME="")
    assert answer.json == prepared.json

    lost = place.run("prepare", "tiny.yaml", cwd=tmp_path)
    assert lost.code == 2 and f"{tmp_path}/text" in lost.err
