"""`python -m shardyard.node`: the program that every scheduler starts once on each node.

``with_homes`` sets where the nodes of a launched run keep their downloads and prepared
data, unless the recipe says it.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click

from shardyard import network_interface
from shardyard.config.load import dump_recipe
from shardyard.config.paths import make_paths_absolute
from shardyard.config.resolved import Resolved, RollbackTarget
from shardyard.config.rules.check import load_checked_recipe
from shardyard.config.schema.recipe import Recipe
from shardyard.config.versions import check_packages, engines_for
from shardyard.control.agent_process import run_node_process
from shardyard.control.alerts import alerting, validate_addresses
from shardyard.control.attempt import Attempt, check_storage, no_plan, resolve_locally, write_down
from shardyard.control.code_bundle import take_code
from shardyard.control.request import Request
from shardyard.control.resume import (
    check_cost_limit,
    check_step_exists,
    go_back,
    is_finished,
    latest_attempt,
)
from shardyard.control.train import write_last_report
from shardyard.errors import EXIT_DRAINED, EXIT_INTERRUPTED, RequestError, ShardyardError
from shardyard.io.files import write_text
from shardyard.io.path_option import LocalPath
from shardyard.launchers.base import (
    EXPLICIT,
    NODE_ASSIGNMENT_READERS,
    pop_back_to,
    pop_launched_by,
    read_node_assignment,
)
from shardyard.launchers.node_rank import NodeAssignment
from shardyard.launchers.secrets import resolve_local
from shardyard.log import info, warn
from shardyard.node.bench import bench_node
from shardyard.node.budget import (
    AttemptLimits,
    check_not_stopped,
    enforce_limits,
    has_stopped_itself,
)
from shardyard.node.failover import Node0Failover, has_node0_failed_over
from shardyard.node.handshake import Session, SessionEnd
from shardyard.node.log_markers import marked_on_stdout, take_nonce
from shardyard.node.network_check import network_checked
from shardyard.node.preflight import Readiness, prepare_node, serve_digests, wait_for_nodes
from shardyard.node.script import script_node
from shardyard.plugins import PlugIn
from shardyard.rundir.attempt_files import read_resolved
from shardyard.rundir.jsonl import EventWriter, read_lines
from shardyard.rundir.layout import RunDir
from shardyard.rundir.lease import Lease
from shardyard.rundir.network import take_bench
from shardyard.rundir.script import take_script
from shardyard.trackers.supervisor import exporting


def with_homes(recipe: Recipe, run: RunDir, *, shares_folder: bool) -> Recipe:
    """Set defaults of ``data.dir`` and ``model.dir``, the same for all runs next to this one.

    The next run and its other nodes thus find the results of one run or of `shardyard prepare`.

    Args:
        run: Run folder as the node sees it.
        shares_folder: Whether the machine of the command line sees that folder too; else the folder
            that a command starts in is a pod's own, and the runs' is what all nodes share.
    """
    if recipe.model.dir is None:
        store = {"dir": str(run.path.parent / "models")}
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update=store)})
    if shares_folder or "dir" in recipe.data.model_fields_set:
        return recipe
    home = {"dir": str(run.path.parent / "prepared")}
    return recipe.model_copy(update={"data": recipe.data.model_copy(update=home)})


# `python -m shardyard.node`: what every scheduler starts once on each node.
#
# Node 0 does what `train` and `resume` do: it prepares the data and writes the next attempt down,
# then tells the others. Each node then runs its agent and ends with the agent's exit code. stdout
# of node 0 holds the run's events and metrics as marked lines; all talk goes to stderr.


@click.command()
@click.argument("recipe", type=LocalPath(path_type=Path))
@click.option("--run-dir", type=LocalPath(path_type=Path), required=True, help="The run's folder.")
@click.option(
    "--place",
    "word",
    required=True,
    help=f"What starts it: {', '.join((*NODE_ASSIGNMENT_READERS, EXPLICIT))}.",
)
@click.option("--node-rank", type=click.IntRange(min=0), help="With --place given: this node.")
@click.option("--nodes", type=click.IntRange(min=1), help="With --place given: how many.")
@click.option("--rendezvous", metavar="HOST:PORT", help="With --place given: a port of node 0.")
@click.option(
    "--code", type=LocalPath(path_type=Path), help="launch.code, where not in the run's folder."
)
@click.option(
    "--store-moves",
    is_flag=True,
    help="Continue where node 0 is lost; its launcher lets others live.",
)
@click.option("--session", help="With --place given: new at each start, the same on all nodes.")
def command(
    recipe: Path,
    *,
    run_dir: Path,
    word: str,
    node_rank: int | None,
    nodes: int | None,
    rendezvous: str | None,
    session: str | None,
    store_moves: bool,
    code: Path | None,
) -> int:
    """Train this node's share of RECIPE."""
    began_s = time.monotonic()
    nonce, launched_by = take_nonce(os.environ), pop_launched_by(os.environ)
    bench, back_to = take_bench(os.environ), pop_back_to(os.environ)
    script = take_script(os.environ)
    _listen()
    if word == EXPLICIT:
        place = _from_options(node_rank, nodes, rendezvous, session)
    else:
        place = read_node_assignment(word, os.environ)
    place = replace(place, store_moves=store_moves)
    run = RunDir(run_dir.expanduser().resolve())
    talk = Session(run, place.session)
    try:
        asked = load_checked_recipe([recipe], [], of_run=True)
        if bench is None:
            network_interface.check(os.environ)
    except ShardyardError as error:  # a package may be missing, or a variable wrong, here alone
        _report_rejection(error, run, place, talk)
    os.environ.update(resolve_local(asked.secrets, os.environ))
    if bench is not None:
        return bench_node(bench, asked, run, place, nonce)
    validate_addresses(asked.observe.alerts, os.environ)
    folder = take_code(asked, run, code)
    if script is not None:
        return script_node(script, asked, run, place, nonce=nonce, folder=folder)
    if place.node_rank > 0:
        return _join(run, place, talk)
    with marked_on_stdout(run, nonce=nonce):
        if store_moves and has_node0_failed_over(run, talk):
            return _join(run, place, talk)
        return _lead(_LeadNode(recipe, run, place, launched_by, back_to), talk, started_s=began_s)


def _listen() -> None:
    """SIGTERM and SIGINT end the preparation; the agent's start takes them over."""
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)  # may have been started with it ignored
    # Slurm's warning before the time limit. A handler and no thread that waits for it: the kernel
    # would give the signal to any thread of a library that does not hold it back.
    signal.signal(signal.SIGUSR1, lambda *_: os.kill(os.getpid(), signal.SIGTERM))


def stop(number: int, _frame: FrameType | None) -> NoReturn:
    """A signal's handler: end, with the exit code that says by which."""
    raise SystemExit(EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_DRAINED)


def _from_options(
    node_rank: int | None, nodes: int | None, rendezvous: str | None, session: str | None
) -> NodeAssignment:
    host, _, port = (rendezvous or "").rpartition(":")
    is_whole = node_rank is not None and nodes is not None and session is not None
    if not is_whole or not host or not port.isdecimal():
        raise RequestError(
            "--place given needs all of --node-rank K --nodes N --rendezvous HOST:PORT --session "
            "S. They give this node's place in the run. Give them, or name the scheduler with "
            "--place."
        )
    assert node_rank is not None and nodes is not None and session is not None
    if node_rank >= nodes:
        raise RequestError(
            f"--node-rank {node_rank} is not a node of --nodes {nodes}. Nodes are counted from 0. "
            f"Use 0 to {nodes - 1}."
        )
    return NodeAssignment(
        node_rank=node_rank, nodes=nodes, host=host.strip("[]"), port=int(port), session=session
    )


def _join(run: RunDir, assignment: NodeAssignment, session: Session) -> int:
    """A node other than node 0, or that one where another does its part."""
    word = session.wait(log=lambda words: info(words))
    if isinstance(word, SessionEnd):
        info(f"node 0: {word.words}")
        return word.exit_code
    files = Readiness(run, assignment.session)
    with prepare_node(files, word, assignment.node_rank, log=info):
        end = session.wait_to_begin(word)
    if end is not None:
        info(f"node 0: {end.words}")
        return end.exit_code
    stand_in = Node0Failover(run, word, assignment, session)
    with stand_in.ready():
        exit_code, words, left_s = _train(run, word, assignment)
    exit_code = scheduler_exit_code(exit_code, run, word, assignment)
    if stand_in.is_active:
        session.end(words, exit_code)
        write_last_report(run, word, read_resolved(run.resolved(word)).recipe, remaining_s=left_s)
    return exit_code


def _report_rejection(
    error: ShardyardError, run: RunDir, assignment: NodeAssignment, session: Session
) -> NoReturn:
    """Report the reason to the other nodes, then end: none of them trains without this one."""
    if assignment.node_rank == 0:
        session.withdraw()
        with _failure_reported(session):
            raise error
    info(f"{error}")
    word = session.wait(log=info)
    if not isinstance(word, SessionEnd):
        files = Readiness(run, assignment.session)
        with prepare_node(files, word, assignment.node_rank, log=info, rejection=error):
            pass
    raise error


def scheduler_exit_code(
    exit_code: int, run: RunDir, attempt: int, assignment: NodeAssignment
) -> int:
    """The exit code for the scheduler: it is not to start a run again that has stopped itself."""
    is_own_wish = exit_code != 0 and assignment.is_container and has_stopped_itself(run, attempt)
    return EXIT_INTERRUPTED if is_own_wish else exit_code


class _LeadNode:
    """Inputs from which node 0 prepares."""

    def __init__(
        self,
        recipe: Path,
        run: RunDir,
        assignment: NodeAssignment,
        launched_by: PlugIn | None,
        back_to: RollbackTarget | None = None,
    ) -> None:
        self._file = recipe
        self.run = run
        self.assignment = assignment
        self._launched_by = launched_by
        self._back_to = back_to

    def prepare(self) -> Attempt | None:
        """The next attempt, written down, with the lease; None if the run is finished."""
        Lease(self.run.lease).close()  # refuse at once, not after an hour of preparation
        number, previous, asked_before = latest_attempt(self.run)
        back_to = self._step_back(previous)
        if back_to is not None and previous is not None:
            previous = replace(previous, back_to=back_to)
        recipe = self._recipe()
        for warning in check_packages(engines_for(recipe)):
            warn(f"{warning}")
        check_cost_limit(self.run, recipe.launch)
        check_not_stopped(self.run, self.assignment.session)
        request = Request.of(recipe, name=self.run.run_id, previous=previous)
        is_same_data = (
            previous is not None
            and load_checked_recipe([asked_before], [], of_run=True).data == recipe.data
            and all(Path(folder).is_dir() for folder in previous.data.fingerprints)
        )
        machine, resolved = resolve_locally(
            request,
            previous=previous,
            data=previous.data if previous is not None and is_same_data else None,
        )
        check_shared_accelerators(resolved, self.assignment)
        step = None if back_to is None else back_to.step
        if is_finished(self.run, previous, resolved, step=step):
            return None
        attempt = Attempt(
            run_dir=self.run, number=number, requested=recipe, resolved=resolved, machine=machine
        )
        check_storage(attempt)
        prediction = attempt.plan()
        lease = Lease(self.run.lease)  # until the agent has it: a second job writes nothing
        try:
            _check_not_overtaken(self.run, number)
            if back_to is not None:
                replaced = ", ".join(map(str, go_back(self.run, back_to))) or "none"
                info(f"going back to step {back_to.step}; checkpoints replaced: {replaced}")
            _write_run_started(self.run, recipe)
            write_down(attempt, prediction, launched_by=self._launched_by)
        except BaseException:
            lease.close()
            raise
        info(no_plan() if prediction is None else prediction.line())
        return replace(attempt, lease=lease)

    def _step_back(self, previous: Resolved | None) -> RollbackTarget | None:
        """The step to go back to; None where none was asked, or a start of this job has done so.

        Raises:
            RequestError: There is no checkpoint of the step.
        """
        done = None if previous is None or previous.back_to is None else previous.back_to.submission
        if self._back_to is None or self._back_to.submission == done:
            return None
        check_step_exists(self.run, self._back_to)
        return self._back_to

    def _recipe(self) -> Recipe:
        recipe = make_paths_absolute(load_checked_recipe([self._file], [], of_run=True))
        recipe = with_homes(recipe, self.run, shares_folder=not self.assignment.is_container)
        return with_nodes(with_rendezvous(recipe, self.assignment), self.assignment.nodes)


def _lead(lead: _LeadNode, session: Session, *, started_s: float) -> int:
    """Node 0."""
    run, files = lead.run, Readiness(lead.run, lead.assignment.session)
    session.withdraw()
    files.withdraw()
    with _failure_reported(session), session.preparing():
        attempt = lead.prepare()
    if attempt is None:
        words = f"{run.run_id} is finished"
        session.end(words, 0, is_over=True)
        info(words)
        return 0
    terms = _terms(attempt, lead.assignment, started_s=started_s)
    number, resolved, lease = attempt.number, attempt.resolved, attempt.lease
    assert lease is not None
    with closing(lease), exporting(run, number, attempt.requested, os.environ) as exporters:
        with (
            _failure_reported(session),
            serve_digests(files, number, resolved),
            session.announced(number) as begin,
            alerting(run, attempt.requested.observe.alerts, os.environ),
            enforce_limits(run, number, terms),
        ):
            wait_for_nodes(files, number, resolved, say=info)
            begin()
            exit_code, words, left_s = _train(run, number, lead.assignment, lease)
        exporters.end(left_s)
        exit_code = scheduler_exit_code(exit_code, run, number, lead.assignment)
        session.end(words, exit_code)
        write_last_report(run, number, resolved.recipe, remaining_s=left_s)
    return exit_code


@contextmanager
def _failure_reported(session: Session) -> Iterator[None]:
    """Have the other nodes end too, with the reason, where node 0 does not come to train."""
    try:
        yield
    except ShardyardError as error:
        session.end(str(error), error.exit_code)
        raise
    except SystemExit:
        session.end("stopped before the training began", EXIT_DRAINED)
        raise
    except BaseException as error:
        session.end(f"failed before the training began ({type(error).__name__}: {error})", 1)
        raise


def _terms(attempt: Attempt, assignment: NodeAssignment, *, started_s: float) -> AttemptLimits:
    prediction, launch = attempt.plan(), attempt.requested.launch
    usd_per_hour = None if prediction is None else prediction.price.usd_per_hour
    if usd_per_hour is None and launch.max_usd is not None:
        why = no_plan() if prediction is None else prediction.price.source
        warn(
            f"launch.max_usd={launch.max_usd:g} cannot be held to: what an hour costs is "
            f"not known ({why})"
        )
    return AttemptLimits.of(
        attempt.requested,
        started_s=started_s,
        session=assignment.session,
        usd_per_hour=usd_per_hour,
    )


def _train(
    run: RunDir, attempt: int, assignment: NodeAssignment, lease: Lease | None = None
) -> tuple[int, str, float | None]:
    """Run this node's agent; its exit code, its words, and what is left of a drain's time.

    Args:
        lease: Of the run, on node 0; the agent takes it over.
    """
    with network_checked(
        run, attempt, node_rank=assignment.node_rank, is_one_machine=assignment.is_one_machine
    ) as network:
        answer = run_node_process(
            run,
            attempt,
            node_rank=assignment.node_rank,
            endpoint=assignment.endpoint,
            own_host=assignment.own_host,
            store_moves=assignment.store_moves,
            lease=lease,
        )
    exit_code, words = int(answer["exit_code"]), str(answer["message"])
    if "killed_by" in answer:  # as a shell says it: the node was lost, the run did not fail
        exit_code = 128 + int(answer["killed_by"])
    if network.is_rejected:
        # a restart would find the same network
        return RequestError.exit_code, network.words, None
    if exit_code != 0:
        is_error = answer["outcome"] == "failed"
        docs = f"\ndocs: {answer['page']}" if answer.get("page") else ""
        info(f"{'error: ' if is_error else ''}{words}{docs}")
    return exit_code, words, answer.get("drain_left_s")


def _check_not_overtaken(run: RunDir, number: int) -> None:
    """Raise if another job or command wrote this attempt while this one prepared.

    Raises:
        RequestError: It did.
    """
    if run.attempts()[-1:] >= [number]:
        raise RequestError(
            f"run {run.run_id} was continued by another job or command while this one prepared it. "
            f"Two at once would overwrite each other's checkpoints. See it with `shardyard status "
            f"{run.handle}`."
        )


def _write_run_started(run: RunDir, recipe: Recipe) -> None:
    """Write down that there is such a run, unless its launcher or an earlier attempt has."""
    if not run.recipe.is_file():
        write_text(run.recipe, dump_recipe(recipe))
    if not any(event.get("kind") == "run_started" for event in read_lines(run.events)):
        events = EventWriter(run.events, attempt=0, generation=0)
        asked = recipe.run
        events.write("run_started", run=run.run_id, tags=asked.tags, started_from=asked.from_)
        events.close()


def with_rendezvous(recipe: Recipe, assignment: NodeAssignment) -> Recipe:
    """The recipe with what its launcher says of where the nodes meet."""
    if assignment.rendezvous is None:
        return recipe
    elastic = recipe.elastic.model_copy(update={"rendezvous": assignment.rendezvous})
    return recipe.model_copy(update={"elastic": elastic})


def with_nodes(recipe: Recipe, nodes: int) -> Recipe:
    """The recipe for the number of nodes that are there.

    Raises:
        RequestError: The recipe does not allow that many.
    """
    asked, elastic = recipe.cluster.nodes, recipe.elastic
    fewest = asked if elastic.min_nodes == "auto" else elastic.min_nodes
    most = asked if elastic.max_nodes == "auto" else elastic.max_nodes
    if nodes == asked:
        return recipe
    if not fewest <= nodes <= most:
        raise RequestError(
            f"the job has {nodes} nodes but the recipe asks for cluster.nodes={asked}"
            f"{'' if fewest == most else f' (elastic: {fewest} to {most})'}. The plan, the batch "
            f"and the layout were made for that. Submit it with {asked} nodes, or set "
            f"cluster.nodes={nodes}."
        )
    info(f"{nodes} nodes are there instead of cluster.nodes={asked}")
    limits = {"min_nodes": fewest, "max_nodes": most}
    return recipe.model_copy(
        update={
            "cluster": recipe.cluster.model_copy(update={"nodes": nodes}),
            "elastic": elastic.model_copy(update=limits),
        }
    )


def check_shared_accelerators(resolved: Resolved, assignment: NodeAssignment) -> None:
    """Raise if several nodes are this one machine, and would take the same accelerators."""
    device = resolved.recipe.cluster.device
    if assignment.nodes > 1 and device != "cpu" and assignment.is_one_machine:
        raise RequestError(
            f"cluster.nodes={assignment.nodes} on this one machine with cluster.device={device}: "
            "every "
            "node would take the same accelerators. Use cluster.nodes=1 with all of them, or "
            "cluster.device=cpu."
        )
