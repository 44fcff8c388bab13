"""`shardyard fetch`: what a run made elsewhere, brought into its folder here."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from shardyard.aws import s3_client
from shardyard.cli.bring import Brought, bring, sentence
from shardyard.cli.launched import launchers_in
from shardyard.cli.nodes_files import opened, stay
from shardyard.cli.options import (
    LocalPath,
    json_option,
    run_argument,
    runs_dir_option,
    trust_option,
)
from shardyard.cli.run_home import RunHome, home_of, nodes_folder
from shardyard.cli.side_job import SideWork
from shardyard.cli.side_jobs import SideTerms, run_side_job, side_request
from shardyard.cli.terminal import say, tell
from shardyard.complete import Complete
from shardyard.errors import RequestError
from shardyard.launch.base import SideJob
from shardyard.rundir.layout import RunDir, find_run
from shardyard.transfer.listing import Listing, read_listing
from shardyard.transfer.receive import FolderSource
from shardyard.transfer.s3 import S3Source, parse_place, upload
from shardyard.units import format_bytes

_ALL = "all"


@click.command()
@run_argument
@click.option("--to", type=LocalPath(path_type=Path), help="Folder; default: the run's own here.")
@click.option("--step", default="latest", show_default=True, help="A step, latest or best.")
@click.option("--all", "is_all", is_flag=True, help="Every sound checkpoint.")
@click.option("--via", metavar="s3://BUCKET/PREFIX", help="Through S3; needed on AWS Batch.")
@click.option("--yes", "is_yes", is_flag=True, help="Do not ask.")
@trust_option
@runs_dir_option
@click.option("--dry-run", is_flag=True, help="Say what would be brought, or submitted for it.")
@json_option
@click.pass_context
def command(
    context: click.Context,
    run: str,
    *,
    to: Path | None,
    step: str,
    is_all: bool,
    via: str | None,
    is_yes: bool,
    trusts_folder: bool,
    runs_dir: Path,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Bring what RUN made elsewhere: newest sound checkpoint, report, logs, events and metrics.

    What is here already is not brought again; a call that was interrupted is repeated.
    """
    if is_all and step != "latest":
        raise click.UsageError("--all and --step exclude each other.")
    home = home_of(find_run(run, runs_dir), launchers_in(context))
    target = home.run_dir if to is None else RunDir(to.absolute())
    terms = SideTerms(is_yes=is_yes, dry_run=dry_run, as_json=as_json, trusts_folder=trusts_folder)
    brought = _bring(home, target, _ALL if is_all else step, via, terms)
    if brought is None:
        return
    if as_json:
        tell(json.dumps({**brought.to_json(), "dry_run": dry_run}, indent=1))
    elif not dry_run:
        tell(sentence(brought))


def _bring(
    home: RunHome, target: RunDir, step: str, via: str | None, terms: SideTerms
) -> Brought | None:
    """Bring by the shortest way that there is; None: nothing was to be brought, which was said."""
    place = None if via is None else parse_place(via)
    if home.folder is not None:
        if place is not None:
            raise RequestError(
                f"--via {via}: the files of run {home.run_dir.run_id} are in {home.folder.path}, "
                "which this machine sees. Leave --via out, or copy an export: shardyard export "
                f"{home.run_dir.handle} --to {via}"
            )
        if target.path.resolve() == home.folder.path.resolve():
            told = Brought(to=target.path, steps=(), files=0, bytes=0, warnings=())
            say(f"nothing to bring: {home.folder.path} is where the run's files are")
            return told if terms.as_json else None
        listing = list_here(home.folder, step)
        source = FolderSource(folder=home.folder.path)
        return bring(source, listing, target, asked=home.run_dir, dry_run=terms.dry_run)
    trained, recipe = home.far
    if place is not None:
        side = SideJob(kind="fetch", arguments={"via": str(place), "step": step})
        request = side_request(home.run_dir, trained.launcher, side, recipe=recipe)
        if run_side_job(home.run_dir, trained.launcher, request, terms) is None:
            return None
        there = S3Source(client=s3_client(), place=place)
        listing = _of_complete(there.complete(), home.run_dir)
        return bring(there, listing, target, asked=home.run_dir)
    with opened(home.run_dir, trained, recipe, terms) as nodes:
        if nodes is None:
            return None
        say(f"reading {nodes_folder(recipe, home.run_dir)}: the checkpoint is verified there first")
        listing = nodes.source.list(step)
        return bring(nodes.source, listing, target, asked=home.run_dir)


def list_here(folder: RunDir, step: str) -> Listing:
    """What a run's folder that this machine sees holds, the checkpoint of a step verified.

    Raises:
        ShardyardError: What the listing answered.
    """
    program = [sys.executable, "-m", "shardyard.checkpoint.listing", str(folder.path)]
    with subprocess.Popen(
        [*program, "--step", step], stdout=subprocess.PIPE, text=True, encoding="utf-8"
    ) as process:
        assert process.stdout is not None
        return read_listing(process.stdout)


def serve(
    work: SideWork, *, listed: Callable[[RunDir, str], Listing] = list_here
) -> dict[str, Any]:
    """On the node: send a run's files to S3, or be there to be read."""
    via = work.arguments.get("via")
    if via is None:
        return stay(work)
    place, client = parse_place(str(via)), s3_client()
    listing = listed(work.run, str(work.arguments["step"]))
    made_of = {
        "run": work.run.run_id,
        "steps": list(listing.steps),
        "best": listing.best,
        "warnings": list(listing.warnings),
    }
    complete = Complete(files=listing.files, made_of=made_of)
    say(f"sending {len(listing.files)} files, {format_bytes(listing.bytes)}, to {place}")
    upload(
        client, work.run.path, complete, place, told=lambda name, _: say(f"there: {name}"),
        replaces=True,
    )  # fmt: skip
    return {"place": str(place), "files": len(listing.files), "bytes": listing.bytes}


def _of_complete(complete: Complete, run_dir: RunDir) -> Listing:
    """What was sent to S3, held to the form of a listing."""
    run = complete.made_of.get("run")
    if run != run_dir.run_id:
        raise RequestError(
            f"the prefix holds files of run {run!r}, not of {run_dir.run_id!r}. Give another."
        )
    lines = [
        json.dumps({"file": name, **asdict(digest)}) for name, digest in complete.files.items()
    ]
    end = {key: complete.made_of.get(key) for key in ("steps", "best", "warnings")}
    return read_listing([*lines, json.dumps({"end": end})])
