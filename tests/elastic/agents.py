"""Real agents in sessions of their own, so that a test sees what they leave behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardyard.config.resolved import DatasetMetadata, Resolved
from shardyard.config.schema.recipe import Cluster, Elastic, Recipe
from shardyard.families.presets import PRESETS
from shardyard.rundir.attempt_files import write_resolved
from shardyard.rundir.jsonl import read_lines
from shardyard.rundir.layout import RunDir

_PROGRAM = Path(__file__).parent / "bodies.py"

_FACTS = DatasetMetadata(
    dir="prepared/none",
    fingerprint="0",
    vocab_size=300,
    train_tokens=1000,
    eval_tokens=100,
    train_documents=2,
    eval_documents=1,
    unigram_entropy=5.0,
)

PATIENCE_S = 300.0
"""For whatever comes for sure, on a machine that others use too."""


@dataclass
class Agents:
    """Starts agents of one run and ends whatever is left of them."""

    run: RunDir
    scratch: Path
    _started: list[subprocess.Popen[str]] = field(default_factory=list)

    def prepare(
        self, *, attempt: int = 1, devices: int = 2, nodes: int = 1, **elastic: Any
    ) -> None:
        """Write the attempt's resolved.json."""
        secrets = elastic.pop("secrets", {})
        settings = {"max_restarts": 1, "drain_timeout_s": 20.0, "collective_timeout_s": 60.0}
        recipe = Recipe(
            cluster=Cluster(devices=devices, device="cpu", nodes=nodes),
            elastic=Elastic(**(settings | elastic)),
            secrets=secrets,
        )
        resolved = Resolved(
            recipe=recipe, reasons={}, shape=PRESETS["llama-tiny"].shape, data=_FACTS, steps=3
        )
        write_resolved(self.run.resolved(attempt), resolved)

    def start(
        self,
        body: str,
        *options: str,
        shared_memory: Path | None = None,
        on: Sequence[str] = (),
        **variables: str,
    ) -> subprocess.Popen[str]:
        """Start an agent whose workers do ``body`` of bodies.py.

        Args:
            shared_memory: A folder that the agent finds at /dev/shm; only root may do so.
            on: Begins a command that runs on another host.
        """
        program = [*on] if shared_memory is None else with_shared_memory(shared_memory)
        program += [sys.executable, str(_PROGRAM)]
        process = subprocess.Popen(
            [*program, str(self.run.path), "--attempt", "1", *options],  # the last of two counts
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={
                **os.environ,
                "TEST_BODY": body,
                "OMP_NUM_THREADS": "1",
                "TMPDIR": str(self.scratch),
                **variables,
            },
        )
        self._started.append(process)
        return process

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_lines(self.run.events) if event["kind"] == kind]

    def wait_for_training(self, ranks: int = 2) -> None:
        """Until that many ranks have begun their steps, or 60 s."""
        wait_until(lambda: len(list(self.run.path.glob("started-*"))) == ranks)

    def end_all(self) -> None:
        for process in self._started:
            for pid in session_pids(process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
            if process.stdout:
                process.stdout.close()


def with_shared_memory(folder: Path) -> list[str]:
    """Begins a command that finds a folder at /dev/shm and nothing else changed."""
    return ["unshare", "-m", "sh", "-c", 'mount --bind "$0" /dev/shm && exec "$@"', str(folder)]


def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait for an agent; its last line on stdout."""
    stdout, _ = process.communicate(timeout=PATIENCE_S)
    content: dict[str, Any] = json.loads(stdout.splitlines()[-1])
    assert content["exit_code"] == process.returncode
    return content


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def session_pids(session: int) -> list[int]:
    """Processes of a session that have not ended."""
    return [pid for pid, sid, state in _processes() if sid == session and state != "Z"]


def wait_until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def _processes() -> Iterator[tuple[int, int, str]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                yield int(entry.name), int(fields[3]), fields[0]
