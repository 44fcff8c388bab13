"""What a run made elsewhere, brought into its folder here."""

import json
import subprocess
from dataclasses import asdict

from shardyard.control.aux_jobs import SideTerms, run_side_job, side_request
from shardyard.control.bring import Brought, Progress, bring, said_progress
from shardyard.control.run_location import RunHome, nodes_folder
from shardyard.control.side_jobs import opened
from shardyard.errors import RequestError
from shardyard.io.aws import s3_client
from shardyard.io.complete import Complete
from shardyard.launchers.base import SideJob
from shardyard.log import say
from shardyard.python_program import python_program
from shardyard.rundir.layout import RunDir
from shardyard.transfer.listing import Listing, read_listing
from shardyard.transfer.receive import FolderSource
from shardyard.transfer.s3 import S3Source, parse_place


def bring_run(
    home: RunHome,
    target: RunDir,
    step: str,
    via: str | None,
    terms: SideTerms,
    *,
    progress: Progress = said_progress,
) -> Brought | None:
    """Bring by the shortest way that there is; None: a request was shown alone."""
    place = None if via is None else parse_place(via)
    if home.folder is not None:
        if place is not None:
            raise RequestError(
                f"--via {via}: the files of run {home.run_dir.run_id} are in {home.folder.path}, "
                "which this machine sees. Leave --via out, or copy an export: shardyard export "
                f"{home.run_dir.handle} --to {via}"
            )
        if target.path.resolve() == home.folder.path.resolve():
            say(f"nothing to bring: {home.folder.path} is where the run's files are")
            return Brought(to=target.path, steps=(), files=0, bytes=0, warnings=())
        listing = list_here(home.folder, step)
        source = FolderSource(folder=home.folder.path)
        return bring(
            source, listing, target, asked=home.run_dir, progress=progress, dry_run=terms.dry_run
        )
    trained, recipe = home.far
    if place is not None:
        side = SideJob(kind="fetch", arguments={"via": str(place), "step": step})
        request = side_request(home.run_dir, trained.launcher, side, recipe=recipe)
        if run_side_job(home.run_dir, trained.launcher, request, terms) is None:
            return None
        there = S3Source(client=s3_client(), place=place)
        listing = _of_complete(there.complete(), home.run_dir)
        return bring(there, listing, target, asked=home.run_dir, progress=progress)
    with opened(home.run_dir, trained, recipe, terms) as nodes:
        if nodes is None:
            return None
        say(f"reading {nodes_folder(recipe, home.run_dir)}: the checkpoint is verified there first")
        listing = nodes.source.list(step)
        return bring(nodes.source, listing, target, asked=home.run_dir, progress=progress)


def list_here(folder: RunDir, step: str) -> Listing:
    """What a run's folder that this machine sees holds, the checkpoint of a step verified.

    Raises:
        ShardyardError: What the listing answered.
    """
    program = python_program("shardyard.checkpoint.listing", str(folder.path))
    with subprocess.Popen(
        [*program, "--step", step], stdout=subprocess.PIPE, text=True, encoding="utf-8"
    ) as process:
        assert process.stdout is not None
        return read_listing(process.stdout)


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
