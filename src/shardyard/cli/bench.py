"""`shardyard bench network`: what is between the nodes of a recipe, in nccl-tests' own table."""

import json
import re
from typing import TYPE_CHECKING, Any

import click

from shardyard.cli.options import json_option, launchers_in, recipe_argument
from shardyard.errors import RequestError
from shardyard.io.terminal import echo, echo_err
from shardyard.rundir.network import COLLECTIVES

if TYPE_CHECKING:
    from shardyard.control.bench import BenchOptions
    from shardyard.launchers.base import Launcher


class _Bytes(click.ParamType[int]):
    """A size as nccl-tests take it: 8, 64K, 16M, 1G; powers of 1,024."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"(\d+)([KMG]?)", str(value).upper())
        if found is None:
            self.fail(f"{value!r} is not a size such as 8, 64K, 16M or 1G", param, ctx)
        exponent: int = ("", "K", "M", "G").index(found[2])
        return int(found[1]) << (10 * exponent)


@click.group()
def command() -> None:
    """Benchmark what training speed depends on."""


@command.command()
@recipe_argument
@click.option(
    "--on", required=True, metavar="LAUNCHER", help="Launcher to run on, as for `shardyard launch`."
)
@click.option(
    "--collective",
    "collectives",
    type=click.Choice(COLLECTIVES),
    multiple=True,
    help="Collective to measure; repeatable. Default: all.",
)
@click.option(
    "--begin", type=_Bytes(), default="8", show_default=True, help="Smallest message, in bytes."
)
@click.option(
    "--end", type=_Bytes(), help="Largest message. Default: 16M on CPUs, 1G on accelerators."
)
@click.option(
    "--warmup",
    type=click.IntRange(min=0),
    default=5,
    show_default=True,
    help="Warm-up calls per size.",
)
@click.option(
    "--iters",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="Timed calls per size.",
)
@click.option(
    "--pairs", "is_pairs", is_flag=True, help="Measure each pair of nodes, and find slow nodes."
)
@click.option(
    "--transports",
    metavar="LIST",
    help="Networks to compare, one job each: efa,one-efa,sockets, or with :INTERFACE.",
)
@click.option(
    "--program",
    type=click.Choice(["torch", "nccl-tests"]),
    default="torch",
    show_default=True,
    help="Benchmark program.",
)
@click.option("--yes", "is_yes", is_flag=True, help="Do not ask.")
@click.option(
    "--dry-run", is_flag=True, help="Print the job that would be submitted, without submitting it."
)
@json_option
@click.pass_context
def network(
    context: click.Context,
    recipe: tuple[str, ...],
    *,
    on: str,
    collectives: tuple[str, ...],
    begin: int,
    end: int | None,
    warmup: int,
    iters: int,
    is_pairs: bool,
    transports: str | None,
    program: str,
    is_yes: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Measure the bandwidth of collectives between the nodes of RECIPE, as nccl-tests does.

    Submits a job with the image, devices and environment variables that a training would have.
    The exit code is 1 if results are wrong or a node is slow.
    """
    # not above: `--help` waits for no schema
    from shardyard.bench.nccl_table import collective_named
    from shardyard.cli.confirm import confirm, print_request
    from shardyard.control.bench import BenchOptions, bench_proposal, describe_bench, follow_bench
    from shardyard.control.launch import submitted
    from shardyard.control.submission import describe, launcher_named

    if program != "torch":
        raise RequestError(
            "--program nccl-tests is not built: between nodes its programs need mpirun, and where "
            "an image has them is not known here. Run all_reduce_perf in a pod as its README says "
            "and give its log to `shardyard plan --calibrate`, or use --program torch, which "
            "measures what training calls."
        )
    if is_pairs and collectives not in ((), ("all_reduce",)):
        raise click.UsageError("--pairs measures all-reduces: leave --collective out.")
    if is_pairs and transports is not None:
        raise click.UsageError("--pairs and --transports are two measurements: give one of them.")
    named = tuple(collective_named(name) for name in collectives or COLLECTIVES)
    asked = BenchOptions(
        collectives=named, begin_bytes=begin, end_bytes=end, warmup=warmup, iterations=iters,
        is_pairs=is_pairs,
    )  # fmt: skip
    launcher = launcher_named(on, launchers_in(context))
    if transports is not None:
        return _side_by_side(
            recipe, launcher, asked, transports, is_yes=is_yes, dry_run=dry_run, as_json=as_json
        )
    proposal = bench_proposal(recipe, launcher, asked, is_dry_run=dry_run)
    assert proposal.request.bench is not None
    lines = describe(proposal, in_full=dry_run)
    for line in [*lines, f"measured: {describe_bench(proposal.request.bench)}"]:
        echo_err(line)
    if dry_run:
        print_request(proposal, as_json=as_json)
        return 0
    confirm("submit it?", is_yes=is_yes)
    job = submitted(proposal)
    echo_err(f"job: {job.id} ({job.name}) on {job.on}")
    answers = follow_bench(job, print_line=echo_err if as_json else echo)
    if as_json:
        place = {"run_id": job.run_id, "run_dir": str(job.run_dir.path)}
        echo(json.dumps({**place, **answers.to_json()}, indent=1))
    return 1 if answers.wrong_values or answers.slow_nodes else 0


def _side_by_side(
    recipe: tuple[str, ...],
    launcher: "Launcher",
    options: "BenchOptions",
    transports: str,
    *,
    is_yes: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    from shardyard.bench.transports import variants_in
    from shardyard.cli.confirm import confirm, print_requests
    from shardyard.control.bench import measure_each, proposals_of, words_of
    from shardyard.control.submission import describe

    found = words_of(variants_in(transports), recipe, launcher, options)
    proposals = proposals_of(found, launcher, options, is_dry_run=dry_run)
    for proposal in proposals:
        echo_err("\n".join(describe(proposal, in_full=dry_run)))
    if dry_run:
        print_requests(proposals, as_json=as_json)
        return 0
    confirm(f"submit {len(proposals)} jobs, one after the other?", is_yes=is_yes)
    side_by_side = measure_each(found, launcher, options, print_line=echo_err)
    if as_json:
        echo(json.dumps(side_by_side.to_json(), indent=1))
    else:
        echo("\n".join(side_by_side.lines))
    if side_by_side.failures:  # each is said already
        return side_by_side.failures[0].exit_code
    return 0 if side_by_side.is_sound else 1
