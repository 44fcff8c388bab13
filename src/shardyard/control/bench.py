"""`shardyard bench network`: a job whose nodes measure what is between them, and what they answer.

It is submitted as a training of the recipe would be: the same nodes, devices, image, variables and
place, so that what is measured is what a training will have.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shardyard.bench import nccl_table, transports
from shardyard.bench.nccl_table import LEAST_NODES, CollectiveTiming, Pair, evaluate_pairs
from shardyard.bench.transports import Variant
from shardyard.config.schema.recipe import Recipe
from shardyard.control.job import LaunchedJob, wait_until
from shardyard.control.launch import submitted
from shardyard.control.request import Request
from shardyard.control.submission import Proposal, check_run_is_new, propose, with_machines
from shardyard.control.subprocesses import error_of
from shardyard.errors import RequestError, ShardyardError
from shardyard.io.sanitize import log_line
from shardyard.launchers.base import JobState, Launcher
from shardyard.launchers.log_markers import parse
from shardyard.log import info
from shardyard.planner.measured_network import is_of_table
from shardyard.rundir.layout import RunDir, new_run_id
from shardyard.rundir.network import (
    COLLECTIVES,
    ELEMENT_BYTES,
    Collective,
    NetworkBench,
    ObservedNetwork,
    network_of,
)
from shardyard.units import format_bytes

_END_BYTES = {"cpu": 16 * 2**20}
_END_BYTES_OF_DEVICES = 2**30


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Options of a benchmark, as the user gives them."""

    collectives: tuple[Collective, ...] = COLLECTIVES
    begin_bytes: int = 8
    end_bytes: int | None = None
    """None: 16 MiB on CPUs, 1 GiB on devices."""
    warmup: int = 5
    iterations: int = 20
    is_pairs: bool = False

    def of(self, recipe: Recipe, processes: int) -> NetworkBench:
        """Return the benchmark for nodes that read a recipe and start this many processes each.

        Raises:
            RequestError: The recipe leaves no collective to measure there.
        """
        ranks = recipe.cluster.nodes * processes
        end = self.end_bytes or _END_BYTES.get(recipe.cluster.device, _END_BYTES_OF_DEVICES)
        if ranks == 1:
            raise RequestError(
                "cluster.nodes=1 with one process: a collective needs two ranks or more. Ask for "
                "more with cluster.nodes or cluster.devices."
            )
        if self.is_pairs and recipe.cluster.nodes == 1:
            raise RequestError(
                f"--pairs with cluster.nodes=1: one node has no pairs. Ask for {LEAST_NODES} nodes "
                "or more: with two, a slow one cannot be identified."
            )
        if not ELEMENT_BYTES <= self.begin_bytes <= end:
            raise RequestError(
                f"--begin {self.begin_bytes} to --end {end} bytes holds no size: sizes double from "
                f"the first, which has at least the {ELEMENT_BYTES} bytes of one number. Give "
                "--begin 8 and a larger --end."
            )
        if self.collectives != ("all_reduce",) and end < ELEMENT_BYTES * ranks:
            raise RequestError(
                f"--end {end} bytes over {ranks} ranks is less than one number each, so that "
                f"gather and scatter are impossible. Give --end {ELEMENT_BYTES * ranks} or more."
            )
        return NetworkBench(
            collectives=("all_reduce",) if self.is_pairs else self.collectives,
            begin_bytes=self.begin_bytes,
            end_bytes=end,
            warmup=self.warmup,
            iterations=self.iterations,
            is_pairs=self.is_pairs,
            processes=processes,
        )


@dataclass(kw_only=True)
class Answers:
    """Results of a network benchmark."""

    nodes: list[str] = field(default_factory=list)
    ranks: int = 0
    rows: list[CollectiveTiming] = field(default_factory=list)
    pairs: dict[Pair, float] = field(default_factory=dict)
    """Bus bandwidth of each pair of nodes, GB/s."""
    traffic: list[dict[str, Any]] = field(default_factory=list)
    network: ObservedNetwork | None = None
    """Network between the nodes; None: there is one node, or it was not reported."""
    is_done: bool = False
    failure: dict[str, Any] | None = None

    def take(self, content: dict[str, Any]) -> None:
        """Take one marked line of node 0; a job that was started again clears earlier results."""
        kind = content.pop("bench", None)
        match kind:
            case "ranks":
                self.nodes, self.ranks = content["nodes"], content["ranks"]
                self.rows, self.pairs, self.traffic = [], {}, []
                self.is_done, self.failure, self.network = False, None, None
            case "row":
                collective = nccl_table.collective_named(content.pop("collective"))
                self.rows.append(CollectiveTiming(collective=collective, **content))
            case "pair":
                self.pairs[content["a"], content["b"]] = content["busbw_gbs"]
            case "traffic":
                self.traffic.append(content)
            case "network":
                self.network = network_of(content)
            case "done":
                self.is_done = True
            case "failed":
                self.failure = content
            case _:
                pass  # of another version; what it says is missing then

    @property
    def slow_nodes(self) -> list[str]:
        """Names of the nodes that are slower than the others."""
        if not self.pairs:
            return []
        return [self.nodes[node] for node in evaluate_pairs(self.pairs).slow_nodes]

    @property
    def wrong_values(self) -> int:
        """Number of wrong values in all collectives."""
        return sum(row.incorrect_values for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        rows = []
        for row in self.rows:
            out_gbs, in_gbs = row.busbw_gbs(self.ranks)
            rows.append({**asdict(row), "out_busbw_gbs": out_gbs, "in_busbw_gbs": in_gbs})
        averages = {
            name: nccl_table.average_busbw_gbs(
                [row for row in self.rows if row.collective == name], self.ranks
            )
            for name in dict.fromkeys(row.collective for row in self.rows)
        }
        return {
            "nodes": self.nodes,
            "ranks": self.ranks,
            "rows": rows,
            "average_busbw_gbs": averages,
            "wrong_values": self.wrong_values,
            "pairs": [{"a": a, "b": b, "busbw_gbs": gbs} for (a, b), gbs in self.pairs.items()],
            "slow_nodes": self.slow_nodes,
            "traffic": self.traffic,
            "network": None if self.network is None else asdict(self.network),
        }


def bench_proposal(
    words: Sequence[str], launcher: Launcher, options: BenchOptions, *, is_dry_run: bool = False
) -> Proposal:
    """Return what would be submitted for a benchmark, without creating anything.

    Raises:
        RequestError: It cannot be measured there.
    """
    known = with_machines(words, launcher)
    request = Request.read(known, needs_weights=False, only_looks=True, sees=launcher.node_paths)
    run, limit = request.recipe.run, request.recipe.launch.max_usd
    if limit is not None:
        raise RequestError(
            f"launch.max_usd={limit:g} is not held to by a benchmark, which has no steps to count. "
            "Give launch.max_usd=null, and launch.time_limit, which ends the job."
        )
    name = f"{request.preview().recipe.run.name}-bench"
    run_dir = RunDir(Path(run.dir).expanduser().resolve() / (run.id or new_run_id(name)))
    check_run_is_new(run_dir)
    return propose(request, launcher, run_dir=run_dir, is_dry_run=is_dry_run, bench=options.of)


def describe_bench(bench: NetworkBench) -> str:
    """Describe what is measured, in a line."""
    if bench.is_pairs:
        return f"pairs of nodes, all-reduces of {format_bytes(bench.end_bytes)}"
    sizes = f"{format_bytes(bench.begin_bytes)} to {format_bytes(bench.end_bytes)}"
    return f"{', '.join(bench.collectives)}: {sizes}, {bench.iterations} calls each"


def follow_bench(
    job: LaunchedJob,
    *,
    print_line: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> Answers:
    """Follow the job to its end, and return what it measured.

    Args:
        print_line: Called with each line of the tables as it comes; other lines of node 0 are
            logged.

    Raises:
        ShardyardError: It ended without all answers.
        KeyboardInterrupt: This command was interrupted; the job continues.
    """
    answers, handle = Answers(), job.run_dir.handle
    try:
        status = wait_until(job, lambda now: now.state != JobState.WAITING, sleep=sleep)
        if status.state != JobState.GONE:
            for line in job.launcher.logs(job.submission, node=0, follow=True):
                marked = parse(line.text, nonce=job.nonce)
                if marked is not None and marked.kind == "answer":
                    answers.take(marked.content)
                elif marked is None:
                    (print_line if is_of_table(line.text) else info)(log_line(line.text))
        status = wait_until(job, lambda now: now.state.is_over, sleep=sleep)
    except KeyboardInterrupt:
        info(
            f"\nfollowing ended, the benchmark continues. `shardyard logs {handle}` shows its "
            f"tables, `shardyard cancel {handle}` ends it"
        )
        raise
    job.fetch()
    if answers.is_done:
        return answers
    if answers.failure is not None:
        raise error_of(answers.failure["exit_code"], answers.failure["error"])
    raise ShardyardError(
        f"job {job.id} of {job.run_id} is over ({status.state.value}: {status.reason}) and did not "
        f"measure all. Its last lines are above, and `shardyard logs {handle} --all` shows those "
        "of all nodes. The same command starts another."
    )


# `shardyard bench network --transports`: a job for each network, and a common table.
#
# A job each, and not one that measures all: which network is used is settled when NCCL begins, by
# variables of its process, and in pods by what the container is given. So each has the folder, the
# log and the event of a benchmark of its own.

Words = dict[Variant, tuple[str, ...]]
"""Words of the recipe for each variant, and what it changes."""


def words_of(
    variants: Sequence[Variant], words: Sequence[str], launcher: Launcher, options: BenchOptions
) -> Words:
    """Return the words that each variant is submitted with, without creating anything.

    The run of a variant is named after it.

    Raises:
        RequestError: One of them cannot be measured there.
    """
    base = bench_proposal(words, launcher, options, is_dry_run=True)
    recipe, cluster = base.request.recipe, base.request.cluster
    device = recipe.cluster.device
    if device == "auto" and cluster is not None:
        device = cluster.accelerator.device
    found = {}
    for variant in variants:
        changes = transports.overrides_of(variant, recipe, device=device, launcher=launcher.name)
        name = f"run.id={base.run_dir.run_id}-{variant.label}"
        found[variant] = (*words, name, *changes)
    return found


def proposals_of(
    words_by_variant: Words, launcher: Launcher, options: BenchOptions, *, is_dry_run: bool = False
) -> list[Proposal]:
    """All that would be submitted, looked at before the first is."""
    return [
        bench_proposal(words, launcher, options, is_dry_run=is_dry_run)
        for words in words_by_variant.values()
    ]


@dataclass(kw_only=True)
class SideBySide:
    """Results of all variants."""

    measured: dict[Variant, tuple[LaunchedJob, Answers]] = field(default_factory=dict)
    failures: list[ShardyardError] = field(default_factory=list)
    """Errors of the variants that were not measured completely."""

    @property
    def rates(self) -> transports.Rates:
        """Rates of the variants that were measured."""
        rows = {variant.name: answers.rows for variant, (_, answers) in self.measured.items()}
        ranks = {answers.ranks for _, answers in self.measured.values()}
        if len(ranks) > 1:
            raise RequestError(
                f"the jobs came up with different numbers of ranks ({sorted(ranks)}), so that they "
                "are not to be held against each other. Give the launcher all nodes of each."
            )
        return transports.rates(rows, max(ranks, default=1))

    @property
    def lines(self) -> list[str]:
        """The common table, and the networks that were not used although they were asked for."""
        said = transports.lines(self.rates, [variant.name for variant in self.measured])
        for variant, (_, answers) in self.measured.items():
            used = "nobody named" if answers.network is None else answers.network.words
            is_used = variant.is_used(answers.network)
            wrong = "" if is_used else ": NOT the requested one, so its column does not measure it"
            said.append(f"# {variant.name}: network used: {used}{wrong}")
        return said

    @property
    def is_sound(self) -> bool:
        """Whether every network was used that was asked for, and no value came out wrong."""
        return all(
            variant.is_used(answers.network) and not answers.wrong_values
            for variant, (_, answers) in self.measured.items()
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        names = [variant.name for variant in self.measured]
        runs = [
            {
                "transport": variant.name,
                "is_used": variant.is_used(answers.network),
                "run_id": job.run_id,
                "run_dir": str(job.run_dir.path),
                **answers.to_json(),
            }
            for variant, (job, answers) in self.measured.items()
        ]
        rows = [
            {
                "collective": collective,
                "size_bytes": size,
                "busbw_gbs": by,
                "ratios": transports.ratios(by, names),
            }
            for (collective, size), by in self.rates.items()
        ]
        return {"transports": runs, "side_by_side": rows}


def measure_each(
    words_by_variant: Words,
    launcher: Launcher,
    options: BenchOptions,
    *,
    print_line: Callable[[str], None],
) -> SideBySide:
    """Submit and follow one job after the other; a failure keeps the others' answers.

    Args:
        print_line: Called with each line of the tables as it comes.

    Raises:
        KeyboardInterrupt: This command was interrupted; the job that is followed continues.
    """
    side_by_side = SideBySide()
    for variant, words in words_by_variant.items():
        try:
            # proposed anew: what is left of a capacity block is less by now
            job = submitted(bench_proposal(words, launcher, options))
            info(f"{variant.name}: job {job.id} ({job.name}) on {job.on}")
            side_by_side.measured[variant] = (job, follow_bench(job, print_line=print_line))
        except ShardyardError as error:
            info(f"error: {variant.name}: {error}")
            side_by_side.failures.append(error)
    return side_by_side
