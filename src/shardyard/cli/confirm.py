"""Questions to the user, and the previews shown instead of acting."""

import json
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import click

from shardyard.control.aux_jobs import SideTerms
from shardyard.control.submission import Proposal
from shardyard.errors import RequestError
from shardyard.io.sanitize import sanitize
from shardyard.io.terminal import echo, echo_raw


def confirm(question: str, *, is_yes: bool) -> None:
    """Ask before something is changed.

    Raises:
        RequestError: There is no terminal to ask on.
        click.Abort: The answer is no.
    """
    if is_yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise RequestError(
            "not confirmed, as this is not a terminal. Add --yes to do it, or --dry-run to see "
            "what would be done."
        )
    click.confirm(sanitize(question), abort=True, err=True)


def side_terms(
    *, is_yes: bool, dry_run: bool = False, as_json: bool = False, trusts_folder: bool = False
) -> SideTerms:
    """On what terms a verb submits a side job: what its options say."""
    return SideTerms(
        agree=partial(confirm, is_yes=is_yes),
        show=partial(print_request, as_json=as_json) if dry_run else None,
        trusts_folder=trusts_folder,
    )


def print_request(proposal: Proposal, *, as_json: bool) -> None:
    """Exactly what would be sent."""
    if as_json:
        echo(json.dumps(_content(proposal), indent=1))
    else:
        echo_raw(proposal.rendered.text)  # exactly what would be sent


def print_requests(proposals: Sequence[Proposal], *, as_json: bool) -> None:
    """The same of several jobs; in JSON a list."""
    if as_json:
        echo(json.dumps([_content(each) for each in proposals], indent=1))
        return
    for each in proposals:
        print_request(each, as_json=False)


def _content(proposal: Proposal) -> dict[str, Any]:
    rendered = proposal.rendered
    return {
        "run_id": rendered.run_id,
        "launcher": rendered.launcher,
        "name": rendered.name,
        "text": rendered.text,
        "objects": list(rendered.objects),
        "files": rendered.files,
        "plan": None if proposal.plan is None else proposal.plan.to_json(),
    }
