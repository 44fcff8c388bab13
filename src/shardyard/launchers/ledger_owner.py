"""Checks who may have written a ledger, before a verb ends or starts anything in it.

Each launcher also asks the remote side whether an object is the run's; this is the local
side.
"""

import os
import pwd
import shlex
import stat
from pathlib import Path

from shardyard.errors import AccessError
from shardyard.rundir.layout import RunDir

_PAGE = "run-folder#write-permissions"

_STEERING = ("recipe.yaml", "launch", "launch/*", "logs", "submissions", "submissions/*",
             "side", "side/*")  # fmt: skip
"""Files of a run that a verb submits, believes, or writes into; globs."""

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def check_trusted(ledger: Path, *, trusts_folder: bool) -> None:
    """Raise if another user may have decided what a ledger names.

    Args:
        trusts_folder: The user said to trust everyone who may write there.

    Raises:
        AccessError: Another user owns it, or may write it or into its folder.
    """
    if trusts_folder or not ledger.exists():
        return
    folder = ledger.parent
    # If the ledger is a link, the owners of the file behind it decide as much.
    real = ledger.resolve()
    inside = [path for name in _STEERING for path in sorted(folder.glob(name)) if path.exists()]
    paths = list(dict.fromkeys([ledger, real, folder, real.parent, *inside]))
    foreign = [path for path in paths if path.stat().st_uid != os.geteuid()]
    writable = [path for path in paths if path.stat().st_mode & _OTHERS_WRITE]
    if not foreign and not writable:
        return
    reasons = _owners(foreign)
    reasons += [f"{path} may be written by {_writers(path)}" for path in writable]
    mend = [f"Run this as {_user(foreign[0].stat().st_uid)}."] if foreign else []
    if writable:
        mend.append(f"Take that right away: chmod go-w {shlex.join(map(str, writable))}")
    raise AccessError(
        f"{'; '.join(reasons)}; you are {_user(os.geteuid())}. Users who can write there decide "
        f"what this command starts or ends in your name. {' '.join(mend)}\nOr say --trust-folder "
        "if you trust all of them; Shardyard still checks that what it ends belongs to the run.",
        page=_PAGE,
    )


def _owners(paths: list[Path]) -> list[str]:
    """Say whose files these are, one sentence for each user."""
    by_user: dict[str, list[Path]] = {}
    for path in paths:
        by_user.setdefault(_user(path.stat().st_uid), []).append(path)
    reasons = []
    for user, theirs in by_user.items():
        more = f" and {len(theirs) - 1} more belong" if len(theirs) > 1 else " belongs"
        reasons.append(f"{theirs[0]}{more} to {user}")
    return reasons


def check_writable(run_dir: RunDir) -> None:
    """Raise if this user may not write where a run continues: in its own folder.

    Raises:
        AccessError: It belongs to another user.
    """
    written = [run_dir.path, run_dir.lease, run_dir.events, run_dir.metrics, run_dir.checkpoints]
    shut = [
        path
        for path in written
        # access() asks for the real user by default, but files are opened as the effective one.
        if path.exists() and not os.access(path, os.W_OK, effective_ids=True)
    ]
    if not shut:
        return
    owner, folder = _user(shut[0].stat().st_uid), shlex.quote(str(run_dir.path))
    raise AccessError(
        f"{shut[0]} belongs to {owner}, and you, {_user(os.geteuid())}, may not write there. A run "
        f"continues in its own folder. Run this as {owner}; or continue with a copy of your own: "
        f"cp -r {folder} FOLDER, then `shardyard resume FOLDER`.",
        page=_PAGE,
    )


def current_user() -> str:
    """Return the name of the user of this process."""
    return _user(os.geteuid())


def owner_of(path: Path) -> str:
    """Return the name of the user who owns a file or folder."""
    return _user(path.stat().st_uid)


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def _writers(path: Path) -> str:
    return "everybody" if path.stat().st_mode & stat.S_IWOTH else "its group"
