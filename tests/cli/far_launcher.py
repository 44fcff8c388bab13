"""A launcher in memory whose nodes' folder is out of reach: side jobs work on it, exec reads it."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from shardyard.errors import ShardyardError
from shardyard.launchers.base import (
    Capabilities,
    JobState,
    JobStatus,
    LaunchRequest,
    LogLine,
    Removal,
    Rendered,
)
from shardyard.launchers.kubernetes.exec import CommandError, LostConnectionError
from shardyard.launchers.ledger import Ledger, Submission
from shardyard.node.side_job import SideWork
from shardyard.rundir.layout import RunDir
from tests.cli.fake_launcher import CAPABILITIES, FakeLauncher
from tests.cli.launched_runs import status


@dataclass
class FarLauncher(FakeLauncher):
    """Side jobs are done when they are submitted, by ``works``; an idle one lives until removed."""

    capabilities: ClassVar[Capabilities] = replace(CAPABILITIES, shares_folder=False)
    works: dict[str, Callable[[SideWork], dict[str, Any]]] = field(default_factory=dict)
    programs: dict[str, Callable[[list[str]], bytes]] = field(default_factory=dict)
    """Module -> its output, in place of ``python -m``."""
    commands: list[list[str]] = field(default_factory=list)
    lives: bool = False
    breaks: list[int] = field(default_factory=list)
    """Bytes of one command's output after the other, after which the connection is lost."""
    training: JobStatus = field(default_factory=lambda: status(JobState.SUCCEEDED, exit_code=0))

    def submit(self, rendered: Rendered, ledger: Ledger) -> Submission:
        job = super().submit(rendered, ledger)
        request = self.submitted[-1]
        if request.side is None:
            return job
        job = replace(job, details={**job.details, **request.side_details, "mark": request.nonce})
        if request.side.kind in self.works:
            self.lines = [LogLine(source="node 0", text=self._answer(request))]
        else:
            self.lives = True
        return job

    def _answer(self, request: LaunchRequest) -> str:
        assert request.side is not None
        work = SideWork(
            run=RunDir(Path(request.run_dir)),
            recipe=request.recipe,
            arguments=request.side.arguments,
        )
        try:
            content: dict[str, Any] = {"result": self.works[request.side.kind](work)}
        except ShardyardError as error:
            content = {"error": str(error), "exit_code": error.exit_code}
        return self.marked("answer", {"side": request.side.label, **content})

    def status(self, job: Submission) -> JobStatus:
        if "side" not in job.details:
            return self.training
        if job.details["side"].startswith("fetch-") and "fetch" not in self.works:
            return status(JobState.RUNNING if self.lives else JobState.GONE)
        return status(JobState.SUCCEEDED, exit_code=0)

    def exec(self, job: Submission, command: Sequence[str]) -> Iterator[bytes]:
        assert job.details["side"].startswith("fetch-")
        if not self.lives:
            raise LostConnectionError("no running pod any more")
        words = list(command)
        self.commands.append(words)
        if words[:3] == ["python", "-P", "-m"] and words[3] in self.programs:
            yield self.programs[words[3]](words[4:])
            return
        if words[0] == "python":
            words[0] = sys.executable
        done = subprocess.run(words, capture_output=True, check=False)
        after = self.breaks.pop(0) if self.breaks and words[0] == "tail" else None
        if after is not None:
            yield done.stdout[:after]
            raise LostConnectionError("the connection broke")
        yield done.stdout
        if done.returncode:
            raise CommandError(done.stderr.decode().strip(), done.returncode)

    def remove(self, job: Submission, ledger: Ledger) -> Removal:
        self.lives = False
        return super().remove(job, ledger)
