"""A launcher in memory: jobs that are moved by the test, objects that stand in a set."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from shardyard.config.paths import NodePaths
from shardyard.config.schema.recipe import Recipe
from shardyard.errors import ShardyardError
from shardyard.launchers.base import (
    Capabilities,
    JobState,
    JobStatus,
    LaunchRequest,
    LogLine,
    Removal,
    Rendered,
    mounted_paths,
)
from shardyard.launchers.ledger import EntryForm, Ledger, Submission
from shardyard.launchers.log_markers import NONCE_DETAIL, Kind, mark

CAPABILITIES = Capabilities(
    resizes=("fake",), requeues=False, needs_image=False, shares_folder=True, secrets=("env",)
)


@dataclass
class FakeLauncher:
    """Keeps what it was asked; ``statuses`` are answered one by one, the last one for ever."""

    name: ClassVar[str] = "fake"
    capabilities: ClassVar[Capabilities] = CAPABILITIES
    forms: ClassVar[Mapping[str, EntryForm]] = {}
    statuses: list[JobStatus] = field(
        default_factory=lambda: [JobStatus(state=JobState.RUNNING, reason="on 1 node")]
    )
    lines: list[LogLine] = field(default_factory=list)
    unanswered: list[ShardyardError] = field(default_factory=list)
    """Raised one by one before ``statuses`` are answered."""
    at_end_of_logs: Callable[[], None] = lambda: None
    at_cancel: Callable[[], None] = lambda: None
    refuses: ShardyardError | None = None
    refuses_after: int = 0
    """Objects that are created before ``refuses`` is raised."""
    created: set[str] = field(default_factory=set)
    submitted: list[LaunchRequest] = field(default_factory=list)
    scaled: list[int] = field(default_factory=list)
    cancelled: int = 0
    stuck: set[str] = field(default_factory=set)
    """Objects that cannot be removed."""
    anothers: set[str] = field(default_factory=set)
    """Objects whose names somebody else has by now."""

    def node_paths(self, recipe: Recipe) -> NodePaths:
        if not self.capabilities.shares_folder:
            return mounted_paths(recipe.launch, launcher=self.name)
        return NodePaths(launcher=self.name, shares_filesystem=True)

    def render(self, request: LaunchRequest) -> Rendered:
        self.submitted.append(request)
        name = f"sy-{request.run_id}"
        objects = ({"kind": "service", "name": name}, {"kind": "job", "name": name})
        text = f"# {request.nodes} x {request.devices_per_node}\n{json.dumps(objects)}\n"
        return Rendered(
            launcher=self.name, run_id=request.run_id, name=name, text=text, objects=objects
        )

    def submit(self, rendered: Rendered, ledger: Ledger) -> Submission:
        for place, kind in enumerate(("fake service", "fake job")):
            entry = ledger.intend(kind, rendered.name, launcher=self.name)
            if self.refuses is not None and place == self.refuses_after:
                ledger.fail(entry, str(self.refuses))
                raise self.refuses
            self.created.add(kind)
            ledger.confirm(entry, f"{place + 7}")
        return Submission(
            launcher=self.name,
            run_id=rendered.run_id,
            id="8",
            name=rendered.name,
            details={"zone": "here"},
        )

    def marked(self, kind: Kind, content: dict[str, Any]) -> str:
        """A line that node 0 of the job submitted last would print."""
        return mark(kind, content, nonce=self.submitted[-1].nonce)

    def status(self, job: Submission) -> JobStatus:
        assert job.details["zone"] == "here"
        if self.unanswered:
            raise self.unanswered.pop(0)
        return self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]

    def logs(self, job: Submission, *, node: int | None, follow: bool) -> Iterator[LogLine]:
        assert job.id == "8"
        wanted = [line for line in self.lines if node is None or line.source == f"node {node}"]
        yield from wanted
        if follow:
            self.at_end_of_logs()

    def resizes(self, job: Submission) -> bool:
        assert job.id == "8"
        return bool(self.capabilities.resizes)

    def resize(self, job: Submission, nodes: int) -> None:
        assert job.id == "8"
        self.scaled.append(nodes)

    def cancel(self, job: Submission) -> None:
        assert job.id == "8"
        self.cancelled += 1
        self.at_cancel()

    def remove(self, job: Submission, ledger: Ledger) -> Removal:
        assert job.launcher == self.name
        removal = Removal()
        for entry in reversed(ledger.live()):
            if entry.kind in self.stuck:
                continue
            ledger.remove(entry)
            if entry.kind in self.anothers:
                removal.not_owned.append(f"{entry.kind} {entry.name}")
                continue
            self.created.discard(entry.kind)
            removal.removed.append(f"{entry.kind} {entry.name}")
        return removal


def fake_that_can(**changes: Any) -> FakeLauncher:
    """A launcher in memory with other capabilities."""
    kind = type("Other", (FakeLauncher,), {"capabilities": replace(CAPABILITIES, **changes)})
    made = kind()
    assert isinstance(made, FakeLauncher)
    return made


@dataclass
class AnsweringLauncher(FakeLauncher):
    """Its side jobs answer what they are told to, and are over then."""

    result: dict[str, Any] = field(default_factory=dict)
    statuses: list[JobStatus] = field(
        default_factory=lambda: [JobStatus(state=JobState.SUCCEEDED, reason="done")]
    )

    def logs(self, job: Submission, *, node: int | None, follow: bool) -> Iterator[LogLine]:
        yield from super().logs(job, node=node, follow=follow)
        content = {"side": job.details["side"], "exit_code": 0, "result": self.result}
        text = mark("answer", content, nonce=job.details[NONCE_DETAIL])
        yield LogLine(source="node 0", text=text)
