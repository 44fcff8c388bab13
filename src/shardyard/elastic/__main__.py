"""`python -m shardyard.elastic RUN_DIR --attempt N`: the agent of one node.

The last line of stdout is one JSON object: {"outcome", "exit_code", "message"}. All talk goes to
agent-K.log (K: node rank) in the attempt's folder.
"""

import argparse
import atexit
import json
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from shardyard import network_interface
from shardyard.config.endpoints import metrics_endpoint
from shardyard.config.formulas import snapshot_labels, steps_between_checkpoints
from shardyard.config.resolved import Resolved
from shardyard.config.secrets import without_secret_variables
from shardyard.data.in_use import InUse
from shardyard.elastic import forkserver
from shardyard.elastic.drain import DrainRequest
from shardyard.elastic.forkserver import (
    gc_paused,
    skip_shape_inference,
)
from shardyard.elastic.shared_memory import NOTES, AgentMemory
from shardyard.errors import LostNodeError, ShardyardError, StorageError
from shardyard.foreign_variables import enable_expandable_segments, remove_for_agent
from shardyard.io.files import make_folder
from shardyard.io.sanitize import log_line
from shardyard.observe.exporter import RunReader, serve_metrics
from shardyard.own_processes import end_with
from shardyard.rundir.attempt_files import read_resolved, read_store_location
from shardyard.rundir.layout import RunDir
from shardyard.rundir.lease import Lease
from shardyard.telemetry.supervisor import Ranks, TelemetrySupervisor

if TYPE_CHECKING:
    from shardyard.elastic.agent import AttemptResult, Worker


def main(
    argv: Sequence[str] | None = None,
    *,
    worker: "Worker | None" = None,
    preload: Sequence[str] | None = None,
) -> int:
    """Conduct one attempt on this node.

    Args:
        worker: Entry point of the workers, by default the training.
        preload: Modules that the parent of all workers imports once; by default training's.

    Returns:
        The exit code: 0, 1, 2, 75, 130 or 143.
    """
    args = _parse(argv)
    skip_shape_inference()  # before anything imports torch
    sys.stdout.flush()
    stdout = os.dup(1)
    try:
        answer = _conduct(args, worker, preload)
    except ShardyardError as error:
        from shardyard.elastic.agent import AttemptResult

        answer = AttemptResult("failed", error.exit_code, str(error), page=error.page)
    except BaseException as error:  # noqa: BLE001  the outermost line of a process
        from shardyard.elastic.agent import AttemptResult

        traceback.print_exc()
        text = f"the agent failed unexpectedly ({type(error).__name__}: {error}). See {_log(args)}."
        answer = AttemptResult("failed", 1, text)
    with suppress(OSError):  # the reader may be gone
        os.write(stdout, json.dumps(asdict(answer)).encode() + b"\n")
    return answer.exit_code


def _conduct(
    args: argparse.Namespace, worker: "Worker | None", preload: Sequence[str] | None
) -> "AttemptResult":
    run = RunDir(args.run_dir.resolve())
    resolved = read_resolved(run.resolved(args.attempt))
    lease = _lease_of(run, args)  # before anything is written: another agent may hold the run
    data = InUse(*map(Path, resolved.data.fingerprints), run=run.path)
    log = _log(args)
    shown = _redirect_output_to(log)
    drain = DrainRequest(resolved.recipe.elastic.drain_timeout_s, ignore_repeats=args.asked_once)
    drain.listen()
    if args.part_of is not None:
        end_with(args.part_of)
    if args.with_parent is not None:
        drain.listen_for_end_of(args.with_parent)
    network_interface.check(os.environ)
    remove_for_agent(os.environ)
    # before the fork server, which passes on where they are
    slots = {label: AgentMemory.create(label) for label in snapshot_labels(resolved.recipe)}
    notes = AgentMemory.create(NOTES)
    enable_expandable_segments(resolved.recipe.cluster.device, os.environ)
    forkserver.start(
        forkserver.preload_of(resolved.recipe) if preload is None else preload,
        secrets=resolved.recipe.secrets,
    )
    try:
        # Imported now: the fork server imports the same modules at the same time.
        with gc_paused():
            from shardyard.elastic.agent import NodeAttempt
            from shardyard.elastic.peer_snapshots import PeerReplication
            from shardyard.elastic.worker import run_worker

        telemetry = _telemetry(run, args, resolved, notes)
        attempt = NodeAttempt(
            run=run,
            number=args.attempt,
            resolved=resolved,
            drain=drain,
            worker=worker or run_worker,
            log=log,
            endpoint=args.rendezvous,
            node_rank=args.node_rank,
            own_host=args.own_host,
            heartbeats=notes,
            peer_replication=PeerReplication.of(slots, resolved.recipe),
            store_moves=args.store_moves,
            findings=telemetry.findings,
            print_status=partial(_print_and_forward, shown),
        )
        reader = _reader(run, args, resolved, notes)
        place = metrics_endpoint(resolved.recipe.observe.prometheus)
        with serve_metrics(reader, run, place, node_rank=args.node_rank) as scrapes:
            with telemetry.running():
                answer = attempt.conduct()
            if may_wait(answer):
                scrapes.wait_for_one_more()
            return answer
    finally:
        forkserver.stop()
        drain.stop_listening()
        data.close()
        if lease:
            lease.close()


def _lease_of(run: RunDir, args: argparse.Namespace) -> Lease | None:
    """Return the lease that the starting process handed over, or one on the store's node."""
    if args.lease:
        return Lease.handed_over(args.lease)
    is_moved = read_store_location(run, args.attempt) is not None  # its server has the lease
    return Lease(run.lease) if args.node_rank == 0 and not is_moved else None


def _telemetry(
    run: RunDir, args: argparse.Namespace, resolved: Resolved, heartbeats: AgentMemory | None
) -> TelemetrySupervisor:
    return TelemetrySupervisor(
        run.telemetry_of(args.node_rank),
        attempt=args.attempt,
        every_s=resolved.recipe.observe.telemetry_every_s,
        devices=_accelerators(resolved),
        ranks=partial(_ranks, heartbeats, resolved),
        environ=without_secret_variables(os.environ, named=resolved.recipe.secrets),
    )


def _reader(
    run: RunDir, args: argparse.Namespace, resolved: Resolved, heartbeats: AgentMemory | None
) -> RunReader:
    every = steps_between_checkpoints(resolved.recipe)
    return RunReader(
        run,
        partial(_rank_seconds, heartbeats, resolved),
        attempt=args.attempt,
        every=None if every == "auto" else every,
        telemetry=run.telemetry_of(args.node_rank),
    )


def may_wait(answer: "AttemptResult") -> bool:
    """Whether the end of an attempt may be a little later, so that its outcome is seen.

    A drain's time is for saving, and where a node was lost all are to be started again at once.
    """
    is_draining = answer.outcome == "drained" or answer.drain_left_s is not None
    return not is_draining and answer.exit_code != LostNodeError.exit_code


def _rank_seconds(heartbeats: AgentMemory | None, resolved: Resolved) -> list[tuple[int, float]]:
    found = _ranks(heartbeats, resolved)
    pairs = zip(found.get("step", ()), found.get("compute_s", ()), strict=True)
    return [(int(step or 0), compute_s or 0.0) for step, compute_s in pairs]


def _ranks(heartbeats: AgentMemory | None, resolved: Resolved) -> Ranks:
    """The last step of each rank of this node; empty before any has noted one."""
    from shardyard.elastic.heartbeat import read_heartbeats

    count = resolved.recipe.cluster.devices
    assert isinstance(count, int)
    found = read_heartbeats(heartbeats, count)
    return {
        "step": [note.step for note in found],
        "step_s": [_seconds(note.step_ns) for note in found],
        "compute_s": [_seconds(note.compute_ns) for note in found],
    } if found else {}  # fmt: skip


def _seconds(duration_ns: int) -> float | None:
    """Convert to seconds; None: the rank has reported no duration yet."""
    return round(duration_ns / 1e9, 6) if duration_ns else None


def _accelerators(resolved: Resolved) -> int:
    cluster = resolved.recipe.cluster
    assert isinstance(cluster.devices, int)
    return 0 if cluster.device == "cpu" else cluster.devices


def _parse(argv: Sequence[str] | None) -> Any:
    parser = argparse.ArgumentParser(prog="python -m shardyard.elastic", description=__doc__)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("--attempt", type=int, required=True, help="number of the attempt")
    parser.add_argument("--rendezvous", metavar="HOST:PORT", help="where the agents meet: node 0")
    parser.add_argument("--node-rank", type=int, default=0, help="0 serves the meeting place")
    parser.add_argument("--own-host", metavar="HOST", help="this node, as the others reach it")
    parser.add_argument(
        "--store-moves", action="store_true", help="continue where the node that serves it is lost"
    )
    parent = parser.add_mutually_exclusive_group()
    parent.add_argument(
        "--part-of", type=int, metavar="PID", help="end when this process, the node's own, is lost"
    )
    parent.add_argument(
        "--with-parent", type=int, metavar="PID", help="drain when this process, the parent, ends"
    )
    parser.add_argument(
        "--asked-once", action="store_true", help="of several signals only the first counts"
    )
    parser.add_argument(
        "--lease", type=int, action="append", metavar="FD", help="the lease, taken by the parent"
    )
    return parser.parse_args(argv)


def _log(args: argparse.Namespace) -> Path:
    attempt = RunDir(args.run_dir.resolve()).attempt(args.attempt)
    return attempt / f"agent-{args.node_rank}.log"


def _print_and_forward(stderr_fd: int, text: str) -> None:
    """Say something in the log, and where the caller of this process says what it does."""
    print(text, flush=True)
    with suppress(OSError):  # the reader may be gone
        os.write(stderr_fd, f"{log_line(text)}\n".encode())


def _redirect_output_to(log: Path) -> int:
    """Point stdout and stderr of this process and its children at the log.

    Returns:
        Descriptor of what stderr was until now.
    """
    try:
        make_folder(log.parent)
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError as error:
        raise StorageError(
            f"{log} cannot be written: {error.strerror}. Check that the run folder is yours and "
            "has room."
        ) from error
    shown = os.dup(2)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    logging.basicConfig(level=logging.WARNING)
    logging.raiseExceptions = False  # a full disk must not turn log lines into tracebacks
    return shown


def leave(exit_code: int) -> NoReturn:
    """End this process after its exit functions.

    The interpreter's own end would take torch down first. That takes a second, which callers
    that wait for a drain do not have.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # a full disk
            stream.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    leave(main())
