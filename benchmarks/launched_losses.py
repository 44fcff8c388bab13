"""The quickstart by every launcher: the same losses, whoever starts it.

    python -m benchmarks.launched_losses
    python -m benchmarks.launched_losses --on slurm,aws-batch

`shardyard train` with two processes is held against two nodes of one process each: on this machine
(local), on a real Slurm, in pods of a JobSet, and on AWS Batch. Podman plays the kubelet and
tests/launchers/kubernetes the controllers; moto plays Batch, with a real Docker. The recipe is
unchanged but for where it runs, and for `data.source`: a folder with the same text for all, as a
container has another Python than this machine. Bar: 1e-5 relative, each step.

Slurm, pods and Batch need root and Debian's packages (tests/launchers/). The result file keeps what
earlier calls measured for other launchers.
"""

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.record import about, result_file, write_result
from shardyard.data.sources import list_files
from shardyard.hardware.machine import probe
from shardyard.rundir.jsonl import read_steps
from shardyard.rundir.layout import RunDir
from tests.launchers.batch_docker import docker_batch
from tests.launchers.kubernetes.pod_runs import rendered
from tests.launchers.kubernetes.pods import pod_of_jobset, running_podman
from tests.launchers.slurm_cluster import slurm_cluster

NAME = "launched-losses"
BAR = 1e-5
REFERENCE = "train"
ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "benchmarks" / "laptop.yaml"
TWO_NODES = ("cluster.nodes=2", "cluster.devices=1", "launch.env={OMP_NUM_THREADS: '1'}")
RUN_ID = "quickstart"
_PATIENCE_S = 7200.0


def main() -> int:
    """Run what is asked for, write the result; returns 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--on", default=",".join(PLACES), help="which, separated by commas")
    parser.add_argument("--out", type=Path, help="file of the result")
    args = parser.parse_args()
    machine = probe()
    out = args.out or result_file(NAME, machine)
    parts = json.loads(out.read_text())["launchers"] if out.is_file() else {}
    for name in args.on.split(","):
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="launched-") as scratch:
            losses = PLACES[name](Path(scratch))
        head = about(machine)
        parts[name] = {
            **{key: head[key] for key in ("date", "git", "load_average")},
            "seconds": round(time.monotonic() - started, 1),
            "losses": losses,
        }
        print(f"{name}: {len(losses)} steps, last loss {losses[-1]}", file=sys.stderr)
        result = judge(parts)
        write_result(NAME, {**result, "bar": BAR, "launchers": parts}, out)
    print(table(result))
    return 0 if result["is_met"] else 1


def judge(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Greatest relative difference of a step's loss between any two, and which two they are."""
    differences = {
        f"{one}, {other}": max(
            abs(a / b - 1)
            for a, b in zip(parts[one]["losses"], parts[other]["losses"], strict=True)
        )
        for one, other in itertools.combinations(parts, 2)
    }
    greatest = max(differences.values(), default=0.0)
    return {
        "is_met": greatest <= BAR,
        "is_complete": set(parts) == set(PLACES),
        "greatest_relative_difference": greatest,
        "differences": differences,
    }


def table(result: Mapping[str, Any]) -> str:
    """Markdown: each pair, and its greatest difference."""
    rows = [f"| {pair} | {value:.1e} |" for pair, value in result["differences"].items()]
    return "\n".join(["| | greatest relative difference |", "|---|---:|", *rows])


def _train(scratch: Path) -> list[float]:
    run_verb(["train", *_words(scratch, make_text(scratch / "text"))])
    return _losses(scratch / "runs" / RUN_ID)


def _local(scratch: Path) -> list[float]:
    _launch("local", [*_words(scratch, make_text(scratch / "text")), *TWO_NODES])
    return _losses(scratch / "runs" / RUN_ID)


def _slurm(scratch: Path) -> list[float]:
    words = _words(scratch, make_text(scratch / "text"))
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}"}
    place = ["cluster.nodes=2", "cluster.devices=1", f"launch.env={json.dumps(env)}"]
    (scratch / "slurm").mkdir()
    with slurm_cluster(scratch / "slurm") as cluster:
        _launch("slurm", [*words, *place], cluster.env)
    return _losses(scratch / "runs" / RUN_ID)


def _kubernetes(scratch: Path) -> list[float]:
    del scratch  # podman has its own folders
    with running_podman() as podman:
        podman.build()
        volume = podman.make_volume()
        make_text(volume / "text")
        config, job = rendered(RUN_ID, "data.source=/runs/text", *TWO_NODES)
        for rank in range(2):
            podman.play(config, pod_of_jobset(job, rank, start=1), domain=RUN_ID)
        for rank in range(2):
            container = f"{RUN_ID}-node-0-{rank}-node"
            code = podman.wait(container, timeout_s=_PATIENCE_S)
            assert code == 0, podman.run("logs", container)
        return _losses(volume / RUN_ID)


def _aws_batch(scratch: Path) -> list[float]:
    text = make_text(scratch / "text")
    with docker_batch(scratch) as batch:
        # here the run's own folder is a copy, made from what CloudWatch has
        words = [f"run.dir={scratch / 'runs'}", f"run.id={RUN_ID}", "data.source=/data"]
        settings = [*batch.settings(text), "cluster.nodes=2", "cluster.devices=1"]
        _launch("aws-batch", [*words, *settings], batch.server.environ)
        inside = _losses(batch.runs / RUN_ID)
        assert inside == _losses(scratch / "runs" / RUN_ID), "the copy differs"
        return inside


PLACES: dict[str, Callable[[Path], list[float]]] = {
    REFERENCE: _train,
    "local": _local,
    "slurm": _slurm,
    "kubernetes": _kubernetes,
    "aws-batch": _aws_batch,
}


def make_text(folder: Path) -> Path:
    """A copy of what `python-stdlib` is on this machine, for those who have another Python."""
    for file in list_files("python-stdlib"):
        to = folder / file.name
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file.path, to)
    return folder


def _words(scratch: Path, text: Path) -> list[str]:
    """Of a run whose nodes see this machine's folders."""
    folders = [f"run.dir={scratch / 'runs'}", f"data.dir={scratch / 'prepared'}"]
    return [*folders, f"run.id={RUN_ID}", f"data.source={text}"]


def _launch(launcher: str, words: list[str], environ: Mapping[str, str] | None = None) -> None:
    run_verb(["launch", "--on", launcher, "--yes", "--follow", *words], environ)


def run_verb(verb: list[str], environ: Mapping[str, str] | None = None) -> None:
    """A verb on the quickstart, to its end: its name, and what follows the recipe."""
    command = [sys.executable, "-m", "shardyard", verb[0], str(QUICKSTART), *verb[1:]]
    env = {**os.environ, **(environ or {}), "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=env, stdout=sys.stderr, timeout=_PATIENCE_S, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{verb[0]} {QUICKSTART.name} ended with exit code {done.returncode}")


def _losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_steps(RunDir(folder).metrics)]


if __name__ == "__main__":
    sys.exit(main())
