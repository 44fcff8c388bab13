"""A profile of a run that trains: asked for by a file in its folder, waited for by its events."""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from shardyard.config.rules.observe import is_ranks, ranks_of
from shardyard.control.follow import Tail
from shardyard.control.job import fetch_progress
from shardyard.control.run_location import RunLocation, nodes_folder
from shardyard.errors import CapacityError, RequestError, ShardyardError
from shardyard.io.files import parse_json
from shardyard.launchers.base import Executor, JobState
from shardyard.launchers.ledger_owner import check_trusted
from shardyard.log import info
from shardyard.own_processes import ISOLATED
from shardyard.rundir.jsonl import read_lines_backwards
from shardyard.rundir.layout import RunDir
from shardyard.rundir.profiles import ProfileSummary, leave_request, new_request, take_request
from shardyard.rundir.script import check_has_recipe
from shardyard.rundir.state import read_state

_LOOK_S = 0.3
_ASK_S = 5.0
"""Seconds between checks that the job continues; a scheduler answers them."""
_FETCH_S = 10.0


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """Requested steps and ranks of a profile."""

    steps: int
    ranks: str


def check_profilable(home: RunLocation, options: ProfileOptions) -> None:
    """Raise unless the run trains now, and has the ranks that are named.

    Raises:
        RequestError: It does not.
    """
    run_dir = home.run_dir
    if not is_ranks(options.ranks):
        ranks_of(options.ranks, 1)  # says what is wrong
    check_has_recipe(run_dir, verb="`profile`", instead="Use torch.profiler in the script.")
    later = f"`shardyard resume {run_dir.handle} observe.profile.at_step=N`"
    if home.launched is not None:
        status = home.launched.status()
        if status.state is JobState.WAITING:
            raise RequestError(
                f"job {home.launched.id} of run {run_dir.run_id} waits for its nodes "
                f"({status.reason}): no step is done that could be profiled. Ask again once it "
                "trains, or launch with `observe.profile.at_step=N`."
            )
        state = status.state.value if status.state.is_over else "running"
    else:
        state = read_state(run_dir).state
    if state == "new":
        raise RequestError(
            f"run {run_dir.run_id} has not begun, so it has no step to profile. Start it with "
            f"`shardyard resume {run_dir.handle}`."
        )
    if state != "running":
        raise RequestError(
            f"run {run_dir.run_id} does not train now ({state}), so no step of it can be profiled. "
            f"{later} continues it and profiles from step N on, if it has steps left."
        )
    world_size = _world_size(home)
    if world_size is not None:
        ranks_of(options.ranks, world_size)


def request_profile(
    home: RunLocation, options: ProfileOptions, *, trusts_folder: bool = False
) -> str:
    """Ask for a profile, and return its id.

    Raises:
        RequestError: One is requested already, or the nodes' files cannot be reached from here.
        AccessError: Another user may have decided in which job a command would run.
    """
    if home.folder is not None:
        return request_local_profile(home.folder, options)
    launched, recipe = home.remote
    launcher = launched.launcher
    if launcher.capabilities.shares_folder:
        raise _prepares(home.run_dir)
    check_trusted(home.run_dir.ledger, trusts_folder=trusts_folder)
    if not isinstance(launcher, Executor):
        raise RequestError(
            f"a run on {launcher.name} cannot be asked from here: its nodes share no folder with "
            "this machine, and no command can be run on them. Give `observe.profile.at_step=N` "
            f"when it is launched, or on `shardyard resume {home.run_dir.handle}`."
        )
    folder = nodes_folder(recipe, home.run_dir)
    command = [
        "python", *ISOLATED, "shardyard.node.ask_profile", folder, "--steps", str(options.steps),
        "--ranks", options.ranks,
    ]  # fmt: skip
    try:
        said = b"".join(launcher.exec(launched.submission, command))
        answer = parse_json(said.splitlines()[-1])
    except CapacityError:
        raise
    except (ShardyardError, ValueError, IndexError) as error:
        raise ShardyardError(
            f"the nodes of job {launched.name} could not be asked for a profile: {error}. Their "
            "image must hold this version of shardyard (`shardyard image build`). No profile was "
            "requested."
        ) from error
    if "error" in answer:
        raise RequestError(str(answer["error"]))
    return str(answer["id"])


def request_local_profile(run_dir: RunDir, options: ProfileOptions) -> str:
    """Ask for a profile in a folder that this machine sees, and return its id.

    Raises:
        RequestError: The run has no attempt yet, or another profile is requested.
        StorageError: The folder cannot be written.
    """
    attempts = run_dir.attempts()
    if not attempts:
        raise _prepares(run_dir)
    request = new_request(attempts[-1], steps=options.steps, ranks=options.ranks)
    if leave_request(run_dir, request):
        return request.id
    other = take_request(run_dir)
    since = "" if other is None else f", asked for {max(0, time.time() - other.asked_t):.0f} s ago"
    raise RequestError(
        f"a profile of run {run_dir.run_id} is being taken already{since}. Two at once would "
        "measure each other. Wait for its end, which `shardyard report` and the events tell."
    )


def _prepares(run_dir: RunDir) -> RequestError:
    return RequestError(
        f"run {run_dir.run_id} prepares its first attempt: no step is done that could be profiled. "
        f"Ask again once it trains; `shardyard runs` and `shardyard top {run_dir.handle}` say when."
    )


def wait(
    home: RunLocation, id: str, *, sleep: Callable[[float], None] = time.sleep
) -> tuple[ProfileSummary, str]:
    """Wait for a profile; returns it, and the folder of its traces where they were written.

    Raises:
        ShardyardError: It was given up, or the run ended without a word of it.
    """
    where = home.run_dir if home.folder is None else home.folder
    tail = Tail(where.events)
    for is_last in _polls(home, sleep):
        for event in tail.read():
            if event.get("id") != id:
                continue
            if event["kind"] == "profile_abandoned":
                raise ShardyardError(
                    f"no profile was taken: {event.get('reason')}. Ask again while the run trains."
                )
            if event["kind"] == "profiled":
                profile = ProfileSummary.from_json(event["profile"])
                return profile, _folder_of(home, profile)
        if is_last:
            break
    raise ShardyardError(
        f"run {home.run_dir.run_id} ended before its profile was written. `shardyard report "
        f"{home.run_dir.handle}` says how it ended; resume it, and ask again."
    )


def to_json(profile: ProfileSummary, folder: str) -> dict[str, Any]:
    """Return the content that ``--json`` prints."""
    return {**profile.to_json(), "folder": folder}


def _polls(home: RunLocation, sleep: Callable[[float], None]) -> Iterator[bool]:
    """One turn a look at the events, each with whether it is the last: the run is over."""
    asked_s = fetched_s = time.monotonic()
    while True:
        is_over, now_s = False, time.monotonic()
        if now_s - asked_s >= _ASK_S:
            is_over, asked_s = _is_over(home), now_s
        if home.folder is None and (is_over or now_s - fetched_s >= _FETCH_S):
            fetch_progress(home.remote[0])
            fetched_s = now_s
        yield is_over
        sleep(_LOOK_S)


def _is_over(home: RunLocation) -> bool:
    if home.launched is None:
        return read_state(home.run_dir).state not in ("running", "draining")
    return home.launched.status().state.is_over


def _folder_of(home: RunLocation, profile: ProfileSummary) -> str:
    if home.folder is not None:
        return str(home.folder.profile(profile.step))
    launched, recipe = home.remote
    info(
        f"the traces are on the nodes' storage: `shardyard fetch {launched.run_dir.handle}` brings "
        "them here"
    )
    name = home.run_dir.profile(profile.step).name
    return f"{nodes_folder(recipe, home.run_dir)}/profiles/{name}"


def _world_size(home: RunLocation) -> int | None:
    """Return the number of ranks that train; None: not reported yet."""
    where = home.run_dir if home.folder is None else home.folder
    events = read_lines_backwards(where.events, with_any=('"world_size"',))
    found = next((event.get("world_size") for event in events if "world_size" in event), None)
    return found if type(found) is int else None


def answer_of(run_dir: RunDir, options: ProfileOptions) -> dict[str, Any]:
    """Return a node's answer to a request for its run's profile: one JSON object."""
    try:
        return {"id": request_local_profile(run_dir, options), **asdict(options)}
    except ShardyardError as error:
        return {"error": str(error)}
