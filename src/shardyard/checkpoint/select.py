"""Find the checkpoint that ``--step`` means, verified, and what `shardyard fetch` can bring."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardyard.checkpoint.load import SelectedCheckpoint, find_sound
from shardyard.checkpoint.retention import complete_steps, pointer_problem, read_pointer, step_name
from shardyard.checkpoint.verify import MANIFEST, read_manifest, verify_manifest
from shardyard.errors import CheckpointError, RequestError, ShardyardError
from shardyard.io.digests import FileDigest, digest_file
from shardyard.rundir.contracts import is_fetched
from shardyard.rundir.layout import RunDir


def choose_checkpoint(run_dir: RunDir, step: str) -> SelectedCheckpoint:
    """The checkpoint that ``--step`` means, verified.

    Args:
        step: A number, ``best``, or ``latest``: the newest sound one.

    Raises:
        RequestError: There is none.
        CheckpointError: It is damaged; for ``latest``: all are.
    """
    steps = complete_steps(run_dir.checkpoints)
    if not steps:
        raise RequestError(
            f"run {run_dir.run_id} has no checkpoint yet: {run_dir.checkpoints} holds none. One is "
            "written every checkpoint.every steps and at the end; wait, or resume the run."
        )
    if step == "latest":
        chosen = find_sound(run_dir.checkpoints)
        assert chosen is not None, steps
        return chosen
    number = read_pointer(run_dir.checkpoints, "best") if step == "best" else _number(step)
    if step == "best" and number is None and (why := pointer_problem(run_dir.checkpoints, "best")):
        raise RequestError(
            f"--step best: {why}. There are checkpoints of steps {', '.join(map(str, steps))}: "
            "give one of them, or latest."
        )
    if number not in steps:
        raise RequestError(
            f"--step {step}: run {run_dir.run_id} has no such checkpoint. It has those of steps "
            f"{', '.join(map(str, steps))}. Give one of them, latest, or best (named after an "
            "evaluation)."
        )
    path = run_dir.checkpoint(number)
    # `latest` may fall back to an older step. A step that was asked for by name may not.
    damage = verify_manifest(path)
    if damage:
        raise CheckpointError(
            f"{path} is damaged: {'; '.join(map(str, damage))}. Its weights cannot be trusted. "
            "Use --step latest for the newest sound checkpoint."
        )
    return SelectedCheckpoint(number, path, ())


def _number(step: str) -> int | None:
    return int(step) if step.isdecimal() else None


# `shardyard fetch` lists the files of a run with their digests, and verifies the checkpoint.
#
# This module runs as a program on the machine that has the run folder, as only that one can read
# the files: ``python -m shardyard.checkpoint.select RUN_DIR [--step latest]``. It prints one JSON
# object a line: each file as soon as it is read, and the end last, so that a cut listing shows.

ALL = "all"

FileCallback = Callable[[str, FileDigest], None]


@dataclass(frozen=True, kw_only=True)
class ListingEnd:
    """Content of the last line."""

    steps: list[int]
    """Steps of the listed checkpoints."""
    best: int | None
    """Step of the checkpoint that ``best`` names."""
    warnings: list[str]


def list_run(run_dir: RunDir, step: str, report: FileCallback) -> ListingEnd:
    """Tell every file that comes here, and what it must be.

    Args:
        step: A number, best, latest (the newest sound one, or none where there is none) or all.

    Raises:
        RequestError: There is no such run or step.
        CheckpointError: The step is damaged, or all are.
    """
    if not run_dir.path.is_dir():
        raise RequestError(
            f"the run folder {run_dir.path} is missing where the nodes look for it. It was "
            "removed, or the volume was changed since."
        )
    steps, warnings = _chosen(run_dir, step)
    for name in _names(run_dir.path):
        try:
            report(name, digest_file(run_dir.path / name))
        except FileNotFoundError:
            continue  # a log that was rotated away, a report that is being replaced
        except OSError as error:
            warnings.append(f"{name} cannot be read there: {error.strerror}; it is left out")
    for number in steps:
        folder = run_dir.checkpoint(number)
        inside = f"{run_dir.checkpoints.name}/{folder.name}"
        for name, digest in read_manifest(folder).files.items():
            report(f"{inside}/{name}", digest)  # was read and held to the manifest just now
        report(f"{inside}/{MANIFEST}", digest_file(folder / MANIFEST))
    return ListingEnd(
        steps=steps, best=read_pointer(run_dir.checkpoints, "best"), warnings=warnings
    )


def _chosen(run_dir: RunDir, step: str) -> tuple[list[int], list[str]]:
    """Steps to bring, oldest first, and what a person should know of them."""
    there = complete_steps(run_dir.checkpoints)
    if step == ALL:
        damage = {each: verify_manifest(run_dir.checkpoint(each)) for each in there}
        sound = [each for each in there if not damage[each]]
        if there and not sound:
            raise CheckpointError(f"all {len(there)} checkpoints of {run_dir.path} are damaged.")
        return sound, [
            f"{step_name(each)} is damaged: {'; '.join(map(str, found))}. It is left out"
            for each, found in damage.items()
            if found
        ]
    if step == "latest" and not there:
        return [], ["the run has no checkpoint yet"]
    chosen = choose_checkpoint(run_dir, step)
    notes = [] if chosen.note is None else [f"{chosen.note}. The newest sound one is fetched"]
    return [chosen.step], [*notes, *(f"{each}. An older one is fetched" for each in chosen.damaged)]


def _names(folder: Path) -> Iterator[str]:
    """Yield the names of the files next to the checkpoints, without links."""
    for place, folders, files in os.walk(folder):
        if Path(place) == folder and "checkpoints" in folders:
            folders.remove("checkpoints")
        folders.sort()
        for file in sorted(files):
            path = Path(place) / file
            name = path.relative_to(folder).as_posix()
            # A link may lead out of the run folder, to files that are none of the run's.
            if is_fetched(name) and path.is_file() and not path.is_symlink():
                yield name


def main(argv: list[str]) -> int:
    """Print the listing; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m shardyard.checkpoint.select")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--step", default="latest", help="a number, latest, best or all")
    asked = parser.parse_args(argv)

    def report_file(name: str, digest: FileDigest) -> None:
        _print({"file": name, **asdict(digest)})

    try:
        end = list_run(RunDir(asked.run_dir), asked.step, report_file)
    except ShardyardError as error:
        _print(error.to_json())
        return error.exit_code
    _print({"end": asdict(end)})
    return 0


def _print(content: dict[str, Any]) -> None:
    # Python buffers a pipe by blocks, and the reader is to have each file's line at once.
    print(json.dumps(content), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
