"""`shardyard cluster create|adopt|show|scale|delete`: an EKS cluster or a Batch queue.

eksctl, CloudFormation, kubectl and helm do it. The order, the waiting, the price and the proof
that all is removed in the end are ours.
"""

import json
import tempfile
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click

from shardyard.cli.confirm import confirm
from shardyard.cli.options import json_option
from shardyard.cluster.api_access import access_warning
from shardyard.cluster.batch.queue import jobs_of
from shardyard.cluster.clients import World, check_same_account, new_world, world_named
from shardyard.cluster.cost_report import Bill, Stage, bill_of, predicted_bill, requested_nodes
from shardyard.cluster.create import (
    make,
    node_report,
    nodes_part,
    scale,
    scale_act,
    warn_of_pods,
    write_settings,
)
from shardyard.cluster.delete import (
    Preview,
    Removed,
    check_confirmed_name,
    part_state,
    preview_removal,
    remove,
)
from shardyard.cluster.existing import Requirement, existing_adoption, survey
from shardyard.cluster.fsx import as_json as as_json_text
from shardyard.cluster.live_prices import ask_prices, price_query, rate_for
from shardyard.cluster.part_order import parts_of, plane_of
from shardyard.cluster.prices import Cost, hourly_costs
from shardyard.cluster.spec import AdoptedCluster, ClusterSpec
from shardyard.cluster.spec_file import read_cluster_spec
from shardyard.cluster.terraform import render_terraform
from shardyard.errors import RequestError
from shardyard.hardware.catalogue import Rate
from shardyard.io.path_option import LocalPath
from shardyard.io.terminal import echo, echo_err, echo_raw, print_table
from shardyard.log import warn

_dir_option = click.option(
    "--dir",
    "clusters",
    type=LocalPath(path_type=Path, file_okay=False),
    default=Path("clusters"),
    show_default=True,
    help="Parent folder of the clusters created from this machine.",
)
_yes_option = click.option("--yes", "is_yes", is_flag=True, help="Do not ask for confirmation.")
_name_argument = click.argument("name")
_hours_option = click.option(
    "--hours",
    type=click.FloatRange(min=0, min_open=True),
    default=24.0,
    show_default=True,
    help="Hours to predict the bill for.",
)
_prices_option = click.option(
    "--prices",
    type=click.Choice(["table", "aws"]),
    default="table",
    show_default=True,
    help="Prices of accelerator nodes: from the dated table, or today's from AWS.",
)


@click.group()
def command() -> None:
    """Create an EKS cluster or an AWS Batch queue, and delete it with proof of deletion."""


@command.command()
@click.argument("description", nargs=-1, required=True, metavar="FILE|KEY=VALUE...")
@_dir_option
@click.option(
    "--dry-run", is_flag=True, help="Print the commands and requests, without creating anything."
)
@click.option(
    "--terraform",
    "is_terraform",
    is_flag=True,
    help="With --dry-run: print the cluster as main.tf.json for Terraform.",
)
@_hours_option
@_prices_option
@_yes_option
@json_option
def create(
    *,
    description: tuple[str, ...],
    clusters: Path,
    dry_run: bool,
    is_terraform: bool,
    hours: float,
    prices: str,
    is_yes: bool,
    as_json: bool,
) -> None:
    """Create the cluster that a YAML file and key=value settings describe.

    Repeat an interrupted command to continue.

    docs/verbs/cluster.md lists the settings.
    """
    given = read_cluster_spec(description)
    if about := access_warning(given):
        warn(about)
    if is_terraform:
        _show_terraform(given, dry_run=dry_run)
        return
    rate = _day_rate(given) if prices == "aws" else None
    stage = Stage(hours=hours, nodes=given.nodes.count)
    if dry_run:
        _show_request(given, stage, rate, as_json=as_json)
        return
    _show_costs(given, stage, rate, to_stderr=as_json)
    confirm(f"make {given.name} in {given.region}?", is_yes=is_yes)
    world = new_world(given, clusters)
    make(world)
    settings = write_settings(world)
    if as_json:
        content = {"name": given.name, "folder": str(world.folder), **_costs(given, stage, rate)}
        echo(json.dumps(content | {"recipe": str(settings)}, indent=1))
        return
    echo(f"{given.name} is ready; its files are in {world.folder}")
    for line in _next_steps(world, settings):
        echo(line)


def _show_terraform(spec: ClusterSpec, *, dry_run: bool) -> None:
    """Print what Terraform would create; Shardyard creates none of it.

    Raises:
        RequestError: It is no dry run, or only eksctl or CloudFormation can create the cluster.
    """
    if not dry_run:
        raise RequestError(
            "--terraform prints a file, and Terraform makes what is in it. Add --dry-run and write "
            "it to main.tf.json, or leave --terraform out."
        )
    echo_raw(as_json_text(render_terraform(spec)))


@command.command()
@click.argument("description", nargs=-1, required=True, metavar="RECIPE|FILE|KEY=VALUE...")
@_dir_option
@click.option(
    "--dry-run", is_flag=True, help="Print the commands and requests, without changing anything."
)
@_hours_option
@_prices_option
@_yes_option
@json_option
def adopt(
    *,
    description: tuple[str, ...],
    clusters: Path,
    dry_run: bool,
    hours: float,
    prices: str,
    is_yes: bool,
    as_json: bool,
) -> None:
    """Add what a recipe needs to an existing EKS cluster.

    Repeat an interrupted command to continue. `delete` removes only these additions.
    """
    begun, given, needs = _to_be_added(description, clusters)
    rate = _day_rate(given) if prices == "aws" else None
    stage = Stage(hours=hours, nodes=given.nodes.count)
    content = {
        "name": given.name,
        "needs": [need.to_json() for need in needs],
        "adds": list(given.adds),
        **_costs(given, stage, rate),
    }
    if dry_run and as_json:
        echo(json.dumps(content | {"parts": _texts(given)}, indent=1))
        return
    _show_needs(given, needs, to_stderr=as_json or dry_run)
    if not given.adds:
        echo(json.dumps(content, indent=1) if as_json else f"{given.name} already has all of it")
        return
    if dry_run:
        _show_request(given, stage, rate, as_json=False)
        return
    _show_costs(given, stage, rate, to_stderr=as_json)
    confirm(f"add these to {given.name} in {given.region}?", is_yes=is_yes)
    world = new_world(given, clusters) if begun is None else begun
    make(world)
    settings = write_settings(world)
    if as_json:
        made = {"folder": str(world.folder), "recipe": str(settings)}
        echo(json.dumps(content | made, indent=1))
        return
    echo(f"{given.name} has what was added; its files are in {world.folder}")
    for line in _next_steps(world, settings):
        echo(line)


def _to_be_added(
    description: tuple[str, ...], clusters: Path
) -> tuple[World | None, AdoptedCluster, tuple[Requirement, ...]]:
    """Return what was begun from here, or survey the cluster; a survey leaves no files behind."""
    asked = read_cluster_spec(description, is_adopted=True)
    begun = existing_adoption(asked, clusters)
    if begun is not None and isinstance(begun.spec, AdoptedCluster):
        return begun, begun.spec, ()
    with tempfile.TemporaryDirectory() as folder:
        found = survey(World(folder=Path(folder), spec=asked, owner=""))
    return None, found.cluster, found.needs


def _show_needs(spec: AdoptedCluster, needs: tuple[Requirement, ...], *, to_stderr: bool) -> None:
    """Show what is needed, what of it exists, and what would be added."""
    rows = [
        (need.what, need.found or "no", ", ".join(need.adds) or need.by_hand or "nothing")
        for need in needs
    ] or [(kind, "begun before", "goes on") for kind in spec.adds]
    if to_stderr:
        for what, found, added in rows:
            echo_err(f"{what}: there: {found}; added: {added}")
        return
    print_table(("needed", "there", "added"), rows)


def _next_steps(world: World, settings: Path) -> list[str]:
    given = world.spec
    recipe, is_batch = given.recipe or "RECIPE", given.kind == "batch"
    on = "aws-batch" if is_batch else "kubernetes"
    found = [f"settings of a recipe for it are in {settings}:\n\n{settings.read_text()}"]
    if is_batch:
        found.append(
            "instances come with jobs and go behind them; to keep some, which cost: shardyard "
            f"cluster scale {given.name} N"
        )
    else:
        found += [
            f"first: export KUBECONFIG={world.kubeconfig.resolve()}",
            f"then, what it lacks for the recipe: shardyard doctor {recipe} {settings} --on {on} "
            "--install",
        ]
        if not given.nodes.count and nodes_part(given) is not None:
            found.append(f"accelerator nodes, which cost: shardyard cluster scale {given.name} N")
    found.append(f"to use it: shardyard launch {recipe} {settings} --on {on}")
    found.append(f"at the end: shardyard cluster delete {given.name}")
    return found


def _day_rate(spec: ClusterSpec) -> Rate:
    """Ask AWS for today's price of an accelerator node, rented as it is described."""
    nodes = spec.nodes
    asked = price_query(
        str(nodes.instance),
        region=spec.region,
        zone=spec.zone,
        nodes=nodes.count or nodes.max or 1,
    )
    return rate_for(ask_prices(asked), spec.capacity.kind)


def _show_request(spec: ClusterSpec, stage: Stage, rate: Rate | None, *, as_json: bool) -> None:
    parts = _texts(spec)
    if as_json:
        echo(json.dumps({"parts": parts, **_costs(spec, stage, rate)}, indent=1))
        return
    _show_costs(spec, stage, rate, to_stderr=True)
    for part in parts:  # documents of one stream: two of eksctl's files have the same keys
        if part["text"]:
            echo_raw(f"---\n# {part['kind']} {part['name']}\n{part['text']}\n")


def _texts(spec: ClusterSpec) -> list[dict[str, str]]:
    """Exactly what would be run and sent, part by part."""
    return [
        {"kind": part.kind, "name": part.name(spec), "text": part.text(spec, "OWNER")}
        for part in parts_of(spec)
    ]


def _costs(spec: ClusterSpec, stage: Stage, rate: Rate | None) -> dict[str, Any]:
    return {
        "costs": [asdict(cost) for cost in hourly_costs(spec, nodes=stage.nodes, rate=rate)],
        "predicted": predicted_bill(spec, [stage], rate=rate).to_json(),
    }


def _show_costs(
    spec: ClusterSpec, stage: Stage, rate: Rate | None, *, to_stderr: bool = False
) -> None:
    """Show what a running cluster costs, as a table or next to an answer in JSON."""
    costs = hourly_costs(spec, nodes=stage.nodes, rate=rate)
    rows = [(cost.what, _usd(cost), cost.source) for cost in costs]
    total = sum(cost.usd_per_hour or 0 for cost in costs)
    unknown = " and what is not known" if any(c.usd_per_hour is None for c in costs) else ""
    rows.append(("while it exists", f"${total:,.2f} an hour{unknown}", ""))
    bill = predicted_bill(spec, [stage], rate=rate)
    rows.append((f"in {stage.hours:g} h", bill.words(), "without traffic, requests and disks"))
    if to_stderr:
        for what, usd, source in rows:
            echo_err(f"{what}: {usd}" + (f" ({source})" if source else ""))
        return
    print_table(("what", "costs", ""), rows)


def _usd(cost: Cost) -> str:
    return "not known" if cost.usd_per_hour is None else f"${cost.usd_per_hour:,.2f} an hour"


@command.command()
@_name_argument
@_dir_option
@_hours_option
@_prices_option
@json_option
def show(*, name: str, clusters: Path, hours: float, prices: str, as_json: bool) -> None:
    """Show the state of each part of cluster NAME, from AWS and the cluster itself."""
    world = world_named(name, clusters)
    check_same_account(world)
    rate = _day_rate(world.spec) if prices == "aws" else None
    so_far = bill_of(world.spec, world.ledger, now=time.time(), rate=rate)
    stage = Stage(hours=hours, nodes=requested_nodes(world.spec, world.ledger))
    states = [(part, part_state(part, world)) for part in parts_of(world.spec)]
    if as_json:
        content = [
            {"kind": part.kind, "name": part.name(world.spec), "state": state.word,
             "why": state.reason}
            for part, state in states
        ]  # fmt: skip
        bills = {
            "bill": so_far.to_json(),
            "predicted": predicted_bill(world.spec, [stage], rate=rate).to_json(),
        }
        echo(json.dumps({"name": world.spec.name, "parts": content, **bills}, indent=1))
        return
    rows = [
        (f"{part.kind} {part.name(world.spec)}", f"{state.word} {state.reason}".strip())
        for part, state in states
    ]
    if isinstance(world.spec, AdoptedCluster):
        rows.insert(0, ("cluster, which was there before", plane_of(world.spec).state(world).word))
    print_table(("part", "state"), rows)
    if world.spec.kind == "batch":
        echo(f"jobs in its queue: {', '.join(jobs_of(world)) or 'none'}")
    echo(f"accelerator nodes: {node_report(world) or 'none'}")
    echo(f"paid so far, by its ledger: {so_far.words()}")
    if any(state.word != "absent" for _, state in states):
        _show_costs(world.spec, stage, rate)


@command.command("scale")
@_name_argument
@click.argument("nodes", type=click.IntRange(min=0))
@_dir_option
@_hours_option
@_prices_option
@click.option("--dry-run", is_flag=True, help="Print the commands, without running them.")
@_yes_option
@json_option
def scale_(
    *,
    name: str,
    nodes: int,
    clusters: Path,
    hours: float,
    prices: str,
    dry_run: bool,
    is_yes: bool,
    as_json: bool,
) -> None:
    """Scale cluster NAME to NODES accelerator nodes, and wait until they are ready.

    On AWS Batch, NODES is the minimum that runs without jobs; jobs add more while they run.
    """
    world = world_named(name, clusters)
    rate = _day_rate(world.spec) if prices == "aws" else None
    stage = Stage(hours=hours, nodes=nodes)
    before = requested_nodes(world.spec, world.ledger)
    content = {
        "name": world.spec.name, "nodes": nodes, "before": before,
        **_costs(world.spec, stage, rate),
    }  # fmt: skip
    if dry_run:
        act = scale_act(world, nodes).words(world)
        warn_of_pods(world, nodes)
        change = _usd_per_hour(world.spec, nodes, rate) - _usd_per_hour(world.spec, before, rate)
        if as_json:
            echo(json.dumps(content | {"commands": [act], "usd_per_hour_more": change}, indent=1))
            return
        echo(act)
        echo(f"{before} nodes become {nodes}, ${change:+,.2f} an hour of known prices")
    _show_costs(world.spec, stage, rate, to_stderr=as_json)
    if dry_run:
        return
    scale(world, nodes, agree=partial(confirm, is_yes=is_yes))
    if as_json:
        echo(json.dumps(content, indent=1))
        return
    echo(f"{world.spec.name} has {nodes} accelerator nodes")


def _usd_per_hour(spec: ClusterSpec, nodes: int, rate: Rate | None) -> float:
    costs = hourly_costs(spec, nodes=nodes, rate=rate)
    return sum(cost.usd_per_hour or 0.0 for cost in costs)


@command.command()
@_name_argument
@_dir_option
@_yes_option
@click.option(
    "--delete-data", metavar="NAME", help="Name of the file system whose data may be deleted."
)
@click.option(
    "--dry-run", is_flag=True, help="Print what would be removed, and how, without removing it."
)
@json_option
def delete(
    *,
    name: str,
    clusters: Path,
    is_yes: bool,
    delete_data: str | None,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Delete cluster NAME, and check with AWS what is left.

    The exit code is 0 only if everything is gone. From an adopted cluster, it removes only what
    `adopt` added.
    """
    world = world_named(name, clusters)
    if dry_run:
        _show_preview(world, preview_removal(world), as_json=as_json)
        return 0

    def confirm_data_loss(what: str) -> None:
        check_confirmed_name(what, delete_data or "")

    removed = remove(world, agree=partial(confirm, is_yes=is_yes), agree_to_lose=confirm_data_loss)
    _show_removed(world, removed, as_json=as_json)
    return 0 if removed.is_clean else 1


def _show_preview(world: World, preview: Preview, *, as_json: bool) -> None:
    """Show what a removal would do."""
    if as_json:
        echo(json.dumps({"name": world.spec.name, **preview.to_json()}, indent=1))
        return
    for step in preview.steps:
        echo(f"# {step.part}, which is {step.word}")
        for line in step.commands:
            echo(line)
        if not step.commands and step.word not in ("absent", "going"):
            echo("# goes with the control plane")
    unknown = "" if preview.is_price_whole else " and what is not known"
    echo(f"# ends ${preview.usd_per_hour:,.2f} an hour{unknown}")
    echo(f"# then AWS is searched for {preview.asks_for} kinds of resources that may be left")
    for name in preview.data:
        echo(f"# holds data, which would be lost: needs --delete-data {name}")
    if isinstance(world.spec, AdoptedCluster):
        echo(f"# {world.spec.name} itself stays, with all that was there before")
    if preview.refused:
        echo(f"# not possible now: {preview.refused}")


def _show_removed(world: World, removed: Removed, *, as_json: bool) -> None:
    bill = bill_of(world.spec, world.ledger, now=time.time())
    if as_json:
        content = {"name": world.spec.name, **removed.to_json(), "bill": bill.to_json()}
        echo(json.dumps(content, indent=1))
        return
    rows = [
        (seen.part, seen.word, time.strftime("%H:%M:%S", time.localtime(seen.unix_s)), seen.asked)
        for seen in removed.seen
    ]
    if rows:
        print_table(("part", "is", "seen", "asked"), rows)
    _show_bill(bill, world.spec)
    for problem in removed.problems:
        echo(f"not removed: {problem}")
    for left in removed.left:
        echo(f"still in {world.spec.region}: {left.kind} {left.id} ({left.cost})")
    for one in removed.unanswered:
        echo(f"not known whether any is left: {one.kind} ({one.asked}): {one.why}")
    if world.spec.capacity.kind == "reservation":
        echo(
            f"{world.spec.capacity.reservation} is your reservation and bills on, used or not, "
            "until you cancel it"
        )
    if removed.is_clean and isinstance(world.spec, AdoptedCluster):
        echo(f"all that was added to {world.spec.name} is removed; the cluster stays")
    elif removed.is_clean:
        echo(f"all of {world.spec.name} in {world.spec.region} is removed; {world.folder} stays")


def _show_bill(bill: Bill, spec: ClusterSpec) -> None:
    rows = [
        (item.what, f"{item.hours:,.1f}", "not known" if item.usd is None else f"${item.usd:,.2f}")
        for item in bill.items
    ]
    rows.append(("all of its life, by its ledger", "", bill.words()))
    if spec.kind == "batch":
        rows.append(("instances that came with jobs", "", "in the report of each run"))
    print_table(("paid for", "hours", "US dollars"), rows)
