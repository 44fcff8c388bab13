"""`shardyard runs`: the runs in a folder and their states, with the jobs of launched ones."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from shardyard.cli.completion import by
from shardyard.cli.completion import launchers as launcher_names
from shardyard.cli.options import (
    json_option,
    launchers_in,
    overrides_argument,
    runs_dir_option,
)
from shardyard.config.rules.tags import tag_words
from shardyard.control.costs import NOT_COUNTED, RunAccount, add_up, check_groups
from shardyard.control.runs import ListedRun, list_runs, strays
from shardyard.control.submission import launcher_named
from shardyard.io.terminal import echo, echo_err, print_table
from shardyard.launchers.base import SchedulerJob
from shardyard.launchers.ledger import SIDE_DETAIL
from shardyard.rundir.state import RunState
from shardyard.units import format_age, format_usd


@click.command()
@overrides_argument
@click.option(
    "--on",
    metavar="LAUNCHER",
    shell_complete=by(launcher_names),
    help="Also list this launcher's Shardyard jobs without a run folder here.",
)
@runs_dir_option
@click.option("--cost", "is_cost", is_flag=True, help="Show what the runs have cost.")
@click.option(
    "--by",
    metavar="WORD",
    multiple=True,
    help="With --cost: add up by a tag, or by owner, launcher or month; may be repeated.",
)
@click.option("--month", metavar="YYYY-MM", help="With --cost: count only this month (UTC).")
@json_option
@click.pass_context
def command(
    context: click.Context,
    overrides: tuple[str, ...],
    runs_dir: Path,
    *,
    on: str | None,
    is_cost: bool,
    by: tuple[str, ...],
    month: str | None,
    as_json: bool,
) -> None:
    """List runs, the most recently changed last.

    With --on, OVERRIDES such as launch.kubernetes.context=NAME set where to look for jobs.
    """
    launchers = launchers_in(context)
    if on is None and overrides:
        raise click.UsageError("settings say where --on looks, and --on is not given.")
    if (by or month) and not is_cost:
        raise click.UsageError("--by and --month add up costs, and --cost is not given.")
    if is_cost:
        if on is not None:
            raise click.UsageError("--cost reads the folder of runs, and --on asks a scheduler.")
        _show_costs(runs_dir, by, month, as_json=as_json)
        return
    lost = None
    if on is not None:
        lost = strays(launcher_named(on, launchers), overrides, runs_dir)
    found = list_runs(runs_dir, launchers=launchers)
    if as_json:
        rows = [run.to_json() for run in found]
        content = rows if lost is None else {"runs": rows, "strays": [asdict(job) for job in lost]}
        echo(json.dumps(content, indent=1))
        return
    if not found:
        echo_err(f"no runs in {runs_dir}/")
    else:
        _show(found)
    if lost is not None:
        _show_strays(lost, on=str(on), runs_dir=runs_dir)


def _show_costs(runs_dir: Path, by: tuple[str, ...], month: str | None, *, as_json: bool) -> None:
    """Costs of each run, or of groups of them, with what is not known."""
    listed = list_runs(runs_dir, within_s=0.0)
    accounts = [account for run in listed if (account := run.account()) is not None]
    check_groups(by, month, accounts)
    rows = add_up(accounts, by, month=month)
    unknown = [account for account in accounts if account.unknown_reason]
    if as_json:
        content = {
            "month": month,
            "rows": [row.to_json() for row in rows] if by else [],
            "runs": [{"id": each.run_id, **each.to_json()} for each in accounts],
            "usd": round(sum(row.usd for row in rows), 4),
            "not_counted": NOT_COUNTED,
        }
        echo(json.dumps(content, indent=1))
        return
    if not accounts:
        echo_err(f"no runs in {runs_dir}/")
        return
    if by:
        cells = [
            (*(row.group[word] or "-" for word in by), str(row.runs), format_usd(row.usd),
             str(row.unknown or ""))
            for row in rows
        ]  # fmt: skip
        print_table((*by, "runs", "cost", "cost not known"), cells)
    else:
        print_table(
            ("run", "owner", "tags", "cost", "price"), [_cost_row(each, month) for each in accounts]
        )
    echo(f"total: {format_usd(sum(row.usd for row in rows))}")
    if unknown:
        echo_err(f"not in the total: {len(unknown)} runs whose cost is not known")
    echo_err(f"not counted: {NOT_COUNTED}")


def _cost_row(account: RunAccount, month: str | None) -> tuple[str, ...]:
    usd = account.usd if month is None else account.usd_by_month.get(month, 0.0)
    known = "" if usd is None else format_usd(usd)
    tags = tag_words(account.tags, " ")
    why = account.source or f"not known: {account.unknown_reason}"
    return account.run_id, account.owner, tags, known, why


def _show_strays(lost: Sequence[SchedulerJob], *, on: str, runs_dir: Path) -> None:
    if not lost:
        echo_err(f"{on} has no job of ours that no run in {runs_dir}/ knows")
        return
    echo(f"jobs of ours on {on} that no run in {runs_dir}/ knows, and that may cost money:")
    rows = [(job.run_id, job.id, job.state.value, job.where, job.end) for job in lost]
    print_table(("run", "job", "state", "where", "ends with"), rows)
    echo_err("where a run's folder was moved, --runs-dir takes the one that it is in now")


def _show(listing: Sequence[ListedRun]) -> None:
    now = time.time()
    columns: tuple[str, ...] = ("run", "state", "step", "loss", "changed")
    table: list[tuple[str, ...]] = [_row(run.state, now=now) for run in listing]
    if any(run.entry is not None for run in listing):
        columns = (*columns[:2], "job", *columns[2:])
        rows = zip(table, listing, strict=True)
        table = [(*row[:2], _job_words(run), *row[2:]) for row, run in rows]
    if any(run.state.started_from for run in listing):
        columns = (*columns, "from")
        table = [
            (*row, run.state.started_from or "") for row, run in zip(table, listing, strict=True)
        ]
    print_table(columns, table)


def _job_words(run: ListedRun) -> str:
    if run.entry is None:
        return ""
    word = "over" if run.state.state == "finished" else run.job_state or "no answer in time"
    kind = run.entry.details.get(SIDE_DETAIL, "").partition("-")[0]
    return f"{run.entry.launcher}: {f'{kind} ' if kind else ''}{word}"


def _row(state: RunState, *, now: float) -> tuple[str, str, str, str, str]:
    return (
        state.id,
        state.state,
        "" if state.step is None else f"{state.step:,}",
        "" if state.loss is None else f"{state.loss:.4f}",
        "" if state.updated_at is None else format_age(now - state.updated_at),
    )
