"""Storage that fails: a full disk, a read-only one, damaged files, a port in use."""

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shardyard.rundir.jsonl import read_steps
from tests.e2e.shardyard import Answer, Place, events
from tests.mounts import mounted, needs_root


@needs_root
def test_a_disk_that_fills_loses_no_checkpoint(
    place: Place, prepared: Answer, base: Answer, tmp_path: Path
) -> None:
    assert (prepared.code, base.code) == (0, 0)
    # A checkpoint takes 1.8 MiB: 156,480 parameters x 3 x 4 bytes. Two fit beside the rest.
    with mounted(tmp_path / "small", "size=5m") as disk:
        words = f"run.dir={disk}", "run.id=full", "checkpoint.keep_last=9", "cluster.devices=1"
        failed = place.run("train", "tiny.yaml", *words)
        assert failed.code == 1
        *_, last, page = failed.err.splitlines()
        assert page == "docs: troubleshooting#disk-full-or-checkpoint-damaged"
        assert last.startswith("error: ") and "cannot be saved" in last
        assert "No space left on device" in last and "Free some room" in last
        saved = disk / "full" / "checkpoints"
        newest = (saved / "latest").read_text().strip()
        assert newest in {f"step-{step:08d}" for step in (8, 12, 16)}  # 12 was the best so far
        assert not list(saved.glob("*.tmp"))
        report = place.run("report", "full", "--runs-dir", str(disk))
        assert report.code == 0 and report.err.startswith("Failed: ")
        assert "cannot be saved" in report.err

        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        resumed = place.run("resume", "full", "--runs-dir", str(disk), "--json")
        assert resumed.code == 0, resumed.err
        assert resumed.json["state"] == "finished"
        lines = read_steps(disk / "full" / "metrics.jsonl")
        losses = [line["loss"] for line in lines]
        undisturbed = [line["loss"] for line in read_steps(place.run_dir("base").metrics)]
        assert losses == pytest.approx(undisturbed, abs=1e-4)  # that run had two processes


@needs_root
def test_a_read_only_place_is_named(
    place: Place, prepared: Answer, base: Answer, tmp_path: Path
) -> None:
    assert (prepared.code, base.code) == (0, 0)
    with mounted(tmp_path / "sealed", "ro") as sealed:
        train = place.run("train", "tiny.yaml", f"run.dir={sealed}/runs")
        assert (train.code, train.out) == (1, "")
        assert f"{sealed} cannot be written. Every run gets a folder there." in train.err
        assert "choose another with run.dir" in train.err

        export = place.run("export", "base", "--to", str(sealed / "x"))
        assert (export.code, export.out) == (1, "")
        assert "Read-only file system" in export.err and "give another --to" in export.err


def test_a_damaged_checkpoint_is_passed_over_loudly(
    place: Place, base: Answer, tmp_path: Path
) -> None:
    assert base.code == 0
    shutil.copytree(place.run_dir("base").path, tmp_path / "runs" / "copy")
    checkpoints = tmp_path / "runs" / "copy" / "checkpoints"
    _flip_a_byte(checkpoints / "step-00000024" / "rank-00000.safetensors")
    resumed = place.run("resume", str(checkpoints.parent), "run.steps=25", cwd=tmp_path)
    assert resumed.code == 0, resumed.err
    assert (
        "continuing from step 16; the checkpoint of step 24 is damaged and was passed over "
        "(rank-00000.safetensors: SHA-256 is" in resumed.err
    )
    again = [line["loss"] for line in read_steps(checkpoints.parent / "metrics.jsonl")]
    assert again[:24] == [line["loss"] for line in read_steps(place.run_dir("base").metrics)]


def test_a_shard_of_garbage_ends_the_run_with_its_name_and_not_with_that_of_a_missing_report(
    place: Place, prepared: Answer, tmp_path: Path
) -> None:
    folder, data = tmp_path / "prepared", Path(prepared.json["dir"])
    shutil.copytree(data, folder / data.name)
    shard = folder / data.name / "train-00000.bin"
    shard.write_bytes(b"\xff" * shard.stat().st_size)  # its size is right: seen when it is read
    place.run_dir("garbage").report_html.mkdir(parents=True)  # where the report cannot be written
    answer = place.run(
        "train", "tiny.yaml", f"data.dir={folder}", "run.id=garbage", "cluster.devices=1"
    )
    assert (answer.code, answer.out) == (1, "")
    *_, before, last = answer.err.splitlines()
    assert before.startswith("warning: no report was written: ")
    assert last.startswith(f"error: {shard.parent}: the train split holds token id 65535")
    assert last.endswith("or delete the folder and prepare again.")
    assert place.state("garbage") == "failed"
    lost = events(place.run_dir("garbage"), "worker_lost")
    assert len(lost) == 1, "a restart would end the same way"
    shutil.rmtree(place.run_dir("garbage").path)


def test_a_port_in_use_is_named(place: Place, base: Answer, tmp_path: Path) -> None:
    assert base.code == 0
    shutil.copytree(place.run_dir("base").path, tmp_path / "copy")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        agent = subprocess.run(
            [sys.executable, "-m", "shardyard.elastic", str(tmp_path / "copy"),
             "--attempt", "0", "--rendezvous", f"127.0.0.1:{port}"],
            env=place.environment(), capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    answer = json.loads(agent.stdout.splitlines()[-1])
    assert (agent.returncode, answer["exit_code"]) == (2, 2)
    assert f"port {port} on 127.0.0.1 is in use." in answer["message"]
    assert "--rendezvous HOST:PORT" in answer["message"]


def _flip_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
