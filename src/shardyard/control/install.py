"""Install what a target lacks, and remove it again: said first, asked for, written down."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import quote

from shardyard.control.request import Request
from shardyard.control.submission import Proposal, propose
from shardyard.errors import RequestError, ShardyardError
from shardyard.launchers.base import (
    InstallablePart,
    Installs,
    InstallsWatchers,
    Launcher,
    LaunchRequest,
    Watchers,
)
from shardyard.launchers.ledger import Ledger
from shardyard.launchers.ledger_owner import check_trusted
from shardyard.log import info, warn
from shardyard.rundir.layout import RunDir, new_run_id


@dataclass(frozen=True, kw_only=True)
class Target:
    """Target of an installation, and the ledger of what was changed.

    Installed parts belong to the target, not to a run: its ledger is next to the runs.
    """

    launcher: Installs
    request: LaunchRequest
    ledger: Ledger

    @property
    def name(self) -> str:
        """Name of the cluster."""
        return self.launcher.target_name(self.request)

    @property
    def installed(self) -> list[str]:
        """Kind and name of what was installed from here and is there, the last first."""
        return [f"{entry.kind} {entry.name}" for entry in reversed(self.ledger.live())]


def proposal_for(request: Request, launcher: Launcher) -> Proposal:
    """Return what a launch would submit now, in its folder, under a name as long as the real one.

    Raises:
        RequestError: It cannot be launched there.
    """
    run = request.recipe.run
    run_id = run.id or new_run_id(str(request.preview().recipe.run.name))
    run_dir = RunDir(Path(run.dir).expanduser().resolve() / run_id)
    return propose(request, launcher, run_dir=run_dir, is_dry_run=True)


def target_of(request: Request, launcher: Launcher) -> Target:
    """Return the target that a request would be launched on, for changes.

    Raises:
        RequestError: Shardyard cannot install there, or the request cannot be launched there.
    """
    if not isinstance(launcher, Installs):
        raise RequestError(
            f"Shardyard cannot install anything on {launcher.name}; its administrators set it up. "
            f"docs/launch-{launcher.name}.md says what is needed, docs/monitoring.md how runs are "
            "watched there."
        )
    asked = proposal_for(request, launcher).request
    folder, name = Path(request.recipe.run.dir).expanduser(), launcher.target_name(asked)
    ledger = Ledger(folder / f"installed-{launcher.name}-{quote(name, safe='')}.jsonl")
    return Target(launcher=launcher, request=asked, ledger=ledger)


def missing_on(
    target: Target, watchers: Watchers | None = None, *, is_dry_run: bool = False
) -> list[InstallablePart]:
    """Return the parts that a target lacks and can be given, in the order of installation.

    Args:
        watchers: Watchers of runs and devices; None: those that the recipe needs.
        is_dry_run: Treat a target that cannot be asked as an empty one.

    Raises:
        ShardyardError: It cannot be asked, or cannot be given these.
    """
    ask, everything = _part_queries(target, watchers)
    try:
        missing = ask()
    except ShardyardError as error:
        if not is_dry_run:
            raise
        warn(
            f"what the target has already is unknown: {error} All that the recipe needs is shown, "
            "except drivers of its claims, which only the cluster knows."
        )
        missing = everything()
    for part in missing:
        info(f"missing: {part.name}: {part.purpose}")
    if not missing:
        info("all that can be installed is there")
    return missing


def _part_queries(
    target: Target, watchers: Watchers | None
) -> tuple[Callable[[], list[InstallablePart]], Callable[[], list[InstallablePart]]]:
    """Return functions for the parts that a target lacks, and that an empty one would lack."""
    launcher, request = target.launcher, target.request
    if watchers is None:
        return partial(launcher.missing, request), partial(launcher.needed, request)
    if not isinstance(launcher, InstallsWatchers):
        raise RequestError(
            f"Shardyard installs no monitoring on {target.name}. docs/monitoring.md says how to "
            "connect your own Prometheus and Grafana."
        )
    parts = launcher.watchers(request, watchers)
    return partial(launcher.missing_watchers, request, parts), lambda: parts


def install(
    target: Target,
    parts: Sequence[InstallablePart],
    *,
    agree: Callable[[str], None],
    on_installed: Callable[[InstallablePart], None] = lambda _: None,
) -> None:
    """Install parts of ``missing_on``.

    Args:
        agree: Called before; raises if the answer is no.
        on_installed: Called after each.
    """
    if parts:
        agree(f"install it on {target.name}?")
    for part in parts:
        target.launcher.install(target.request, part, target.ledger)
        on_installed(part)


def uninstall(
    target: Target, *, agree: Callable[[str], None] | None, trusts_folder: bool = False
) -> list[str]:
    """Remove only what was installed from here, and return the names of it.

    Args:
        agree: Called before; raises if the answer is no. None: the names are only reported.
        trusts_folder: Continue although others may write into the folder of the ledger.
    """
    check_trusted(target.ledger.path, trusts_folder=trusts_folder)
    names = target.installed
    if not names:
        info(f"no component was installed from here, says {target.ledger.path}")
        return []
    info(f"to be removed: {', '.join(names)}")
    if agree is None:
        return []
    agree("remove it?")
    return target.launcher.uninstall(target.request, target.ledger)
