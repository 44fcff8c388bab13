"""Install what a target lacks, and remove it again: shown first, asked for, written down."""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from shardyard.cli.asking import confirm
from shardyard.control.request import Request
from shardyard.control.submission import Proposal, propose
from shardyard.errors import RequestError
from shardyard.launch.base import Launcher
from shardyard.launch.installation import Installs, target_ledger
from shardyard.launch.ledger import Ledger
from shardyard.launch.trust import refuse_untrusted
from shardyard.rundir.layout import RunDir, new_run_id
from shardyard.talk import say
from shardyard.terminal import tell, tell_exactly


@dataclass(frozen=True, kw_only=True)
class InstallTerms:
    """On what terms a target is changed."""

    is_yes: bool
    dry_run: bool
    trusts_folder: bool
    as_json: bool


def proposal_for(request: Request, launcher: Launcher) -> Proposal:
    """What a launch would submit now, under a name as long as it would have.

    Raises:
        RequestError: It cannot be launched there.
    """
    run = request.recipe.run
    run_id = run.id or new_run_id(str(request.preview().recipe.run.name))
    with tempfile.TemporaryDirectory(prefix="shardyard-") as folder:
        run_dir = RunDir(Path(folder) / run_id)
        return propose(request, launcher, run_dir=run_dir, is_dry_run=True)


def install_missing(request: Request, launcher: Launcher, terms: InstallTerms) -> int:
    """Show what the target lacks, ask, install it; 0: it lacks nothing (any more)."""
    installs, proposal = _installs(launcher), proposal_for(request, launcher)
    ledger = _ledger(request, installs, proposal)
    missing = installs.missing(proposal.request)
    for part in missing:
        say(f"missing: {part.name}: {part.why}")
    if not missing:
        say("nothing is missing that can be installed")
    if terms.dry_run:
        if terms.as_json:
            _answer(missing=[{"name": part.name, "text": part.text} for part in missing])
        else:
            tell_exactly("".join(part.text for part in missing))
        return 0
    if missing:
        confirm(f"install it on {installs.target_name(proposal.request)}?", is_yes=terms.is_yes)
    for part in missing:
        installs.install(proposal.request, part, ledger)
        if not terms.as_json:
            tell(f"installed: {part.name}")
    if terms.as_json:
        _answer(installed=[part.name for part in missing], ledger=str(ledger.path))
    elif missing:
        tell(f"written down in {ledger.path}; --uninstall removes it")
    return 0


def remove_installed(request: Request, launcher: Launcher, terms: InstallTerms) -> int:
    """Remove what was installed from here, and nothing else."""
    installs, proposal = _installs(launcher), proposal_for(request, launcher)
    ledger = _ledger(request, installs, proposal)
    refuse_untrusted(ledger.path, trusts_folder=terms.trusts_folder)
    names = [f"{entry.kind} {entry.name}" for entry in reversed(ledger.live())]
    if not names:
        say(f"nothing was installed from here, says {ledger.path}")
    else:
        say(f"to be removed: {', '.join(names)}")
    removed: list[str] = []
    if names and not terms.dry_run:
        confirm("remove it?", is_yes=terms.is_yes)
        removed = installs.uninstall(proposal.request, ledger)
    if terms.as_json:
        _answer(removed=removed, left=[entry.name for entry in ledger.live()])
    else:
        for name in names if terms.dry_run else removed:
            tell(name if terms.dry_run else f"removed: {name}")
    return 0


def _installs(launcher: Launcher) -> Installs:
    if not isinstance(launcher, Installs):
        raise RequestError(
            f"nothing can be installed on {launcher.name} from here. Its own administrators set it "
            f"up; docs/launch-{launcher.name}.md says what is needed."
        )
    return launcher


def _ledger(request: Request, installs: Installs, proposal: Proposal) -> Ledger:
    folder = Path(request.recipe.run.dir).expanduser()
    name = installs.target_name(proposal.request)
    return target_ledger(folder, proposal.launcher.name, name)


def _answer(**content: object) -> None:
    tell(json.dumps(content, indent=1))
