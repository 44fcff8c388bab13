"""sessions/<session>.node-<k>.json: every node's report that it has what node 0 has.

Node 0 has settled model and data and written down where they are (``resolved.json``). Each
other node looks there. Without shared storage, it fetches the same commit, and prepares the
same data; then it compares. It answers ``ready``, or ``refused`` with the reason, before
any device computes. Until then it reports its work, with a heartbeat, so that a dead node
can be distinguished from a working one. It ``asks`` node 0 for files that only their
content can distinguish. Node 0 adds their digests to ``<session>.model.json``.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from shardyard.config.model.files import (
    ModelFiles,
    differences,
    files_of,
    from_json,
    to_json,
    undecided,
    with_digests,
)
from shardyard.config.model.hub import HubRequest, digest_of, fetch
from shardyard.config.resolved import Resolved
from shardyard.config.rules.check import load_checked_recipe
from shardyard.config.versions import is_needed_to_train, plug_ins_of
from shardyard.control.attempt import prepare_data
from shardyard.control.request import Request
from shardyard.control.subprocesses import error_of
from shardyard.errors import LostNodeError, RequestError, ShardyardError
from shardyard.io.files import read_json_object, write_json
from shardyard.io.polling import poll_in_background, wait_for
from shardyard.node.handshake import replace_quickly
from shardyard.rundir.attempt_files import read_resolved
from shardyard.rundir.layout import RunDir
from shardyard.units import format_seconds

State = Literal["at work", "ready", "refused", "stopped"]
LogFunction = Callable[[str], None]

_BEAT_S = 2.0
_POLL_S = 0.25
LOST_AFTER_S = 60.0
"""Without a beat; network file systems show a new name as late as this."""
_COMES_SOON_S = 10.0
"""Nodes of one start come together."""
COMES_WITHIN_S = 600.0
"""Wait for a node without a heartbeat yet; as long as the rendezvous waits for one."""


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """Status that one node reports."""

    attempt: int
    host: str
    state: State
    words: str = ""
    exit_code: int = 0
    asks: tuple[str, ...] = ()
    """Files whose digest node 0 has to give."""
    beat: int = 0

    @staticmethod
    def read(path: Path) -> "NodeReport | None":
        """None: there is none, or it is no report."""
        try:
            report = NodeReport(**read_json_object(path))
        except (OSError, ValueError, TypeError):
            return None
        is_whole = report.state in get_args(State) and isinstance(report.exit_code, int)
        return replace(report, asks=tuple(report.asks)) if is_whole else None


class Readiness:
    """Files of one session, next to node 0's message."""

    def __init__(self, run: RunDir, session: str) -> None:
        self._folder = run.path / "sessions"
        self._session = session
        self.run = run

    def report(self, node: int) -> Path:
        return self._folder / f"{self._session}.node-{node}.json"

    @property
    def model(self) -> Path:
        return self._folder / f"{self._session}.model.json"

    def reports(self) -> list[Path]:
        """Return the report files of all nodes that have sent one."""
        return list(self._folder.glob(f"{self._session}.node-*.json"))

    def withdraw(self) -> None:
        """Take back what an earlier start of the same session said."""
        for path in [*self.reports(), self.model]:
            with suppress(OSError):
                path.unlink()


# -- node 0 ---------------------------------------------------------------------------------------


@contextmanager
def serve_digests(files: Readiness, attempt: int, resolved: Resolved) -> Iterator[None]:
    """Say which files node 0 has, and their digests where a node asks; late ones ask later.

    Raises:
        RequestError: A file of the model was changed after it was fetched.
    """
    if resolved.recipe.cluster.nodes == 1 and resolved.recipe.elastic.max_nodes in (1, "auto"):
        yield
        return
    folder = None if resolved.model_dir is None else Path(resolved.model_dir)
    seen = {} if folder is None else files_of(folder)
    write_json(files.model, {"attempt": attempt, "files": to_json(seen)})
    known = seen

    def answer() -> bool:
        nonlocal known
        if folder is None:
            return True
        asked = {
            name
            for path in files.reports()
            if (report := NodeReport.read(path)) is not None and report.attempt == attempt
            for name in report.asks
            if name in known and known[name].sha256 is None
        }
        if asked:
            with suppress(OSError, ShardyardError):  # the folder is gone, or full: told there
                known = with_digests(folder, known, sorted(asked))
                write_json(files.model, {"attempt": attempt, "files": to_json(known)})
        return False

    with poll_in_background(answer, every_s=_POLL_S * 2, name="readiness"):
        yield


def wait_for_nodes(
    files: Readiness,
    attempt: int,
    resolved: Resolved,
    *,
    say: LogFunction,
    say_every_s: float = 30.0,
    lost_after_s: float = LOST_AFTER_S,
    comes_within_s: float = COMES_WITHIN_S,
) -> None:
    """Wait until every node is ready, or as many as an elastic run begins with.

    The wait for a node that works is unlimited. For a node without a heartbeat it is short
    where the others are enough. The rendezvous waits ``elastic.start_wait_s`` for it, and it
    compares its files when it comes.

    Raises:
        ShardyardError: A node was rejected; with its exit code.
        LostNodeError: Too few are left.
    """
    nodes, elastic = resolved.recipe.cluster.nodes, resolved.recipe.elastic
    fewest = nodes if elastic.min_nodes == "auto" else elastic.min_nodes
    watched = {
        rank: _NodeTracker(files.report(rank), attempt, lost_after_s) for rank in range(1, nodes)
    }
    started_s = told_s = time.monotonic()
    while True:
        waited_s = time.monotonic() - started_s
        by_state: dict[NodeState, list[int]] = {stand: [] for stand in get_args(NodeState)}
        for rank, node in watched.items():
            by_state[node.poll_state()].append(rank)
        if by_state["refused"]:
            raise watched[by_state["refused"][0]].rejection_error(by_state["refused"][0])
        ready = 1 + len(by_state["ready"])
        may_come = len(by_state["absent"]) if waited_s < comes_within_s else 0
        if ready + len(by_state["at work"]) + may_come < fewest:
            raise _too_few(watched, by_state, fewest, waited_s)
        has_waited = not by_state["absent"] or waited_s >= min(elastic.start_wait_s, _COMES_SOON_S)
        if not by_state["at work"] and ready >= fewest and has_waited:
            return
        if waited_s + started_s - told_s >= say_every_s:
            told_s = waited_s + started_s
            named = "; ".join(
                watched[rank].words(rank)
                for rank in sorted(by_state["at work"] + by_state["absent"])
            )
            say(f"waiting to begin to train ({waited_s:.0f} s so far): {named}")
        time.sleep(_POLL_S)


NodeState = Literal["absent", "at work", "ready", "refused", "lost"]


class _NodeTracker:
    """One node, as node 0 hears of it."""

    def __init__(self, path: Path, attempt: int, lost_after_s: float) -> None:
        self._path, self._attempt, self._lost_after_s = path, attempt, lost_after_s
        self._report: NodeReport | None = None
        self._changed_s = time.monotonic()

    def poll_state(self) -> NodeState:
        """Probe the node, and return its state."""
        found = NodeReport.read(self._path)
        if found is not None and found.attempt == self._attempt and found != self._report:
            self._report, self._changed_s = found, time.monotonic()
        if self._report is None:
            return "absent"
        if self._report.state == "refused":
            return "refused"
        is_silent = time.monotonic() - self._changed_s > self._lost_after_s
        if is_silent or self._report.state == "stopped":
            return "lost"
        return self._report.state

    def words(self, rank: int) -> str:
        if self._report is None:
            return f"node {rank} has not been heard of"
        return f"node {rank} ({self._report.host}) {self._report.words}"

    def rejection_error(self, rank: int) -> ShardyardError:
        assert self._report is not None
        words = f"node {rank} ({self._report.host}): {self._report.words}"
        return error_of(self._report.exit_code, words)


def _too_few(
    watched: Mapping[int, _NodeTracker],
    by_state: Mapping[NodeState, list[int]],
    min_nodes: int,
    waited_s: float,
) -> LostNodeError:
    gone = [f"{watched[rank].words(rank)}, then no more" for rank in by_state["lost"]]
    gone += [
        f"node {rank} was not heard of for {format_seconds(waited_s)}"
        for rank in by_state["absent"]
    ]
    return LostNodeError(
        f"{'; '.join(gone)}. The run begins with {min_nodes} nodes at least (elastic.min_nodes), "
        "and none has trained yet. Look at the output of that node, and start the job again."
    )


# -- the other nodes ------------------------------------------------------------------------------


class _Reporter:
    """Writer of this node's report, repeated until it is stopped."""

    def __init__(self, path: Path, attempt: int, log: LogFunction) -> None:
        self._path, self._log = path, log
        self._report = NodeReport(attempt=attempt, host=socket.gethostname(), state="at work")
        self._lock = threading.Lock()

    def update(self, **changes: Any) -> None:
        with self._lock:
            self._report = replace(self._report, **changes, beat=self._report.beat + 1)
            replace_quickly(self._path, asdict(self._report))

    def log_activity(self, words: str) -> None:
        """Print and report what this node does now."""
        self._log(words)
        self.update(words=words)

    @contextmanager
    def beating(self) -> Iterator[None]:
        with poll_in_background(self.update, every_s=_BEAT_S, name="readiness"):
            yield


@contextmanager
def prepare_node(
    files: Readiness,
    attempt: int,
    node: int,
    *,
    log: LogFunction,
    rejection: ShardyardError | None = None,
) -> Iterator[None]:
    """Get node 0's model and data, compare, and report; the block is for the wait for its start.

    Args:
        rejection: Why this node cannot take part, where that is known already.

    Raises:
        ShardyardError: This node cannot have the same; node 0 has the report.
    """
    reporter = _Reporter(files.report(node), attempt, log)
    with reporter.beating():
        try:
            if rejection is not None:
                raise rejection
            reporter.update(words="looks for model and data")
            resolved = read_resolved(files.run.resolved(attempt))
            _compare_plug_ins(resolved, files.run.manifest(attempt))
            _get_model(resolved, files, attempt, reporter)
            _get_data(resolved, files.run, attempt, reporter)
            reporter.update(state="ready", words="is ready", asks=())
        except ShardyardError as error:
            reporter.update(state="refused", words=str(error), exit_code=error.exit_code)
            raise
        except BaseException as error:
            reporter.update(state="stopped", words=f"was stopped ({type(error).__name__})")
            raise
        yield


def _compare_plug_ins(resolved: Resolved, manifest: Path) -> None:
    """Raise unless this node has the packages that node 0 uses, in the same versions."""
    node0_plugins: list[dict[str, str]] = []
    with suppress(FileNotFoundError):  # nothing is said of any
        listed = read_json_object(manifest).get("plug_ins", [])
        node0_plugins = [each for each in listed if is_needed_to_train(each)]
    ours = [plug_in.to_json() for plug_in in plug_ins_of(resolved.recipe, resolved.shape)]
    if ours != node0_plugins:
        here, there = (
            ", ".join(sorted({f"{each['distribution']} {each['version']}" for each in found}))
            or "none"
            for found in (ours, node0_plugins)
        )
        raise RequestError(
            f"of the packages that add to Shardyard this node uses {here}, and node 0 {there}. "
            "They could compute different things. Install the same versions on all nodes, or in "
            "launch.image."
        )


def _get_model(resolved: Resolved, files: Readiness, attempt: int, reporter: _Reporter) -> None:
    """Open the model's folder, or fetch the same commit, and hold it against node 0's."""
    if resolved.model_dir is None:
        return
    folder, model = Path(resolved.model_dir), resolved.recipe.model
    if model.hub is not None:
        wanted = HubRequest(
            kind="model.hub", name=model.hub, revision=resolved.model_commit, level="weights"
        )
        fetch(wanted, folder.parent, log=reporter.log_activity)
        if resolved.model_digest is not None and digest_of(folder) == resolved.model_digest:
            return
    if not folder.is_dir():
        raise RequestError(
            f"{folder} is not there, and node 0 reads the model from it. Put it on a volume that "
            "all nodes mount at the same path (launch.volumes), or copy it to each of them."
        )
    ours, theirs = files_of(folder), _files_of_node_0(files, attempt)
    asked = undecided(ours, theirs)
    if asked:
        reporter.log_activity(f"reads {len(asked)} files of {folder} to compare them with node 0's")
        reporter.update(asks=tuple(asked))
        ours = with_digests(folder, ours, asked)
        while undecided(ours, theirs):
            time.sleep(_POLL_S)
            theirs = _files_of_node_0(files, attempt)
    found = differences(ours, theirs)
    if found:
        raise RequestError(
            f"{folder} is not what node 0 has there: {'; '.join(found)}. The nodes would train "
            "different models. Remove the folder on the node that has the wrong one, to have it "
            "fetched or to copy it again."
        )


def _files_of_node_0(files: Readiness, attempt: int) -> ModelFiles:
    def read() -> ModelFiles | None:
        with suppress(OSError, ValueError):
            content = read_json_object(files.model)
            if content.get("attempt") == attempt:
                return from_json(content.get("files"))
        return None

    found = wait_for(read, within_s=LOST_AFTER_S, every_s=_POLL_S)
    if found is not None:
        return found
    raise LostNodeError(
        f"node 0 wrote no {files.model} for {format_seconds(LOST_AFTER_S)}, so its model cannot be "
        "compared with this node's. Look at the output of node 0."
    )


def _get_data(resolved: Resolved, run: RunDir, attempt: int, reporter: _Reporter) -> None:
    """Open the prepared data, or prepare it under the same name, and compare fingerprints."""
    wanted = resolved.data.fingerprints
    found = {folder: _fingerprint_in(Path(folder)) for folder in wanted}
    missing = [folder for folder, fingerprint in found.items() if fingerprint is None]
    if missing:
        reporter.log_activity(f"prepares {', '.join(missing)}, which is not on this node")
        recipe = load_checked_recipe([run.attempt_recipe(attempt)], [], of_run=True)
        request = Request.of(recipe, name=run.run_id, previous=resolved)
        found |= prepare_data(request, previous=resolved, like=resolved.data).fingerprints
    for folder, fingerprint in wanted.items():
        if found[folder] != fingerprint:
            data = resolved.recipe.data
            sets = {each.data.dir: each.name for each in resolved.data.eval_sets}
            source = f"data.source={data.source}"
            if folder in sets:
                source = f"data.eval_sets.{sets[folder]}={data.eval_sets[sets[folder]]}"
            raise RequestError(
                f"{folder} has the fingerprint {found[folder]} here and {fingerprint} on node 0: "
                f"this node's {source} or tokenizer has other content. Give all nodes the same "
                "files, or put data.dir on a volume that they share."
            )


def _fingerprint_in(folder: Path) -> str | None:
    """Return the fingerprint of a dataset that is completely prepared. None if there is none."""
    try:
        fingerprint = read_json_object(folder / "manifest.json").get("fingerprint")
    except (OSError, ValueError):
        return None
    return fingerprint if isinstance(fingerprint, str) else None
