"""Cost of the runs of a folder, added up by tag, owner, launcher or month.

Each number comes from a run's own files. Node 0 counts what the run has cost at the price of its
plan (event ``spent``), also over restarts. A count belongs to the month in which it was written.
Where no count is here, the cost is not known, and the reason is given; none is guessed.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from shardyard.config.rules.tags import read_tag_words
from shardyard.errors import RequestError, StorageError
from shardyard.io.files import read_json_object
from shardyard.launchers.ledger import OWNER_DETAIL, TAGS_DETAIL, LedgerEntry
from shardyard.launchers.ledger_owner import owner_of
from shardyard.rundir.jsonl import read_lines, read_lines_backwards
from shardyard.rundir.layout import RunDir

OWNER, LAUNCHER, MONTH = "owner", "launcher", "month"
GROUPS = (OWNER, LAUNCHER, MONTH)
"""Keys, besides tags, by which costs can be added up."""
NOT_COUNTED = "storage, side jobs, traffic, waiting for nodes, and clusters without a run"


@dataclass(frozen=True, kw_only=True)
class RunAccount:
    """Owner and cost of a run."""

    run_id: str
    owner: str
    """User who submitted the newest job; of a run that was not launched, the folder's owner."""
    launcher: str
    tags: dict[str, str]
    usd_by_month: dict[str, float] = field(default_factory=dict)
    """``2026-11`` (UTC) -> US dollars."""
    usd_per_hour: float | None = None
    """Price of the newest count, all nodes together."""
    source: str = ""
    """Source of the price; empty: the cost is not known."""
    unknown_reason: str = ""
    """Why the cost is not known; empty: it is."""

    @property
    def usd(self) -> float | None:
        """Cost of all attempts together; None: not known."""
        return None if self.unknown_reason else round(sum(self.usd_by_month.values()), 4)

    def to_json(self) -> dict[str, Any]:
        """Return the keys that ``shardyard runs --json`` has of it."""
        cost = {
            "usd": self.usd, "usd_per_hour": self.usd_per_hour, "by_month": self.usd_by_month,
            "source": self.source, "unknown_reason": self.unknown_reason,
        }  # fmt: skip
        return {"owner": self.owner, "tags": self.tags, "cost": cost}


@dataclass(kw_only=True)
class CostRow:
    """Costs of the runs that share a value of each group."""

    group: dict[str, str]
    """``team`` -> ``nlp``; empty text: the runs have no such tag."""
    runs: int = 0
    usd: float = 0.0
    unknown: int = 0
    """Runs among them whose cost is not known."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def account_of(run_dir: RunDir, entry: LedgerEntry | None) -> RunAccount:
    """Return the account of a run.

    Args:
        entry: Its newest job; None: it was not launched.

    Raises:
        StorageError: A file of its folder cannot be read.
    """
    details = {} if entry is None else entry.details
    if entry is None:
        tags = next(read_lines(run_dir.events), {}).get("tags")
    else:
        tags = read_tag_words(details.get(TAGS_DETAIL, ""))
    by_month, newest = _counts(run_dir)
    return RunAccount(
        run_id=run_dir.run_id,
        owner=details.get(OWNER_DETAIL) or owner_of(run_dir.path),
        launcher="" if entry is None else entry.launcher,
        tags={str(k): str(v) for k, v in tags.items()} if isinstance(tags, dict) else {},
        usd_by_month=by_month,
        usd_per_hour=None if newest is None else newest["usd_per_hour"],
        source="" if newest is None else _price_source(run_dir),
        unknown_reason="" if newest is not None else _unknown_reason(run_dir, entry),
    )


def _counts(run_dir: RunDir) -> tuple[dict[str, float], dict[str, Any] | None]:
    """Dollars by month, and the newest count; each count is of all attempts until then."""
    found = [
        event
        for event in read_lines_backwards(run_dir.events, with_any=('"spent"',))
        if event.get("kind") == "spent"
        and None not in (event.get("usd"), event.get("usd_per_hour"), event.get("t"))
    ]
    by_month: dict[str, float] = {}
    before = 0.0
    for event in reversed(found):
        month = time.strftime("%Y-%m", time.gmtime(event["t"]))
        by_month[month] = round(by_month.get(month, 0.0) + event["usd"] - before, 4)
        before = event["usd"]
    return by_month, found[0] if found else None


def _price_source(run_dir: RunDir) -> str:
    price = _price(run_dir)
    return f"count of node 0 at {price.get('source', 'the price of its plan')}"


def _price(run_dir: RunDir) -> dict[str, Any]:
    attempts = run_dir.attempts()
    if not attempts:
        return {}
    try:
        price = read_json_object(run_dir.plan(attempts[-1])).get("price")
    except (OSError, ValueError, StorageError):
        return {}
    return price if isinstance(price, dict) else {}


def _unknown_reason(run_dir: RunDir, entry: LedgerEntry | None) -> str:
    if not run_dir.attempts():
        if entry is None:
            return "no attempt has started"
        return f"its files are on the cluster, or it waits: `shardyard fetch {run_dir.handle}`"
    price = _price(run_dir)
    if price.get("usd_per_hour") is None:
        return str(price.get("source") or "no price of its machines is known")
    return "no step has run yet"


def add_up(
    accounts: Iterable[RunAccount], by: Sequence[str], *, month: str | None
) -> list[CostRow]:
    """Add up accounts, the dearest group first.

    Args:
        by: Tags, or words of ``GROUPS``.
        month: Count only this one, such as ``2026-11``.
    """
    rows: dict[tuple[str, ...], CostRow] = {}
    for account in accounts:
        months = {name: usd for name, usd in account.usd_by_month.items() if month in (None, name)}
        if account.unknown_reason and month is None:
            months = {"": 0.0}
        parts = list(months.items()) if MONTH in by else [("", sum(months.values()))]
        for name, usd in parts if months else []:
            values = tuple(_value(account, word, name) for word in by)
            row = rows.setdefault(values, CostRow(group=dict(zip(by, values, strict=True))))
            row.runs += 1
            row.usd = round(row.usd + usd, 4)
            row.unknown += bool(account.unknown_reason)
    return sorted(rows.values(), key=lambda row: (-row.usd, *row.group.values()))


def _value(account: RunAccount, word: str, month: str) -> str:
    match word:
        case "owner":
            return account.owner
        case "launcher":
            return account.launcher
        case "month":
            return month
        case _:
            return account.tags.get(word, "")


def check_groups(by: Sequence[str], month: str | None, accounts: Sequence[RunAccount]) -> None:
    """Reject a tag that no run has, and a month that is none.

    Raises:
        RequestError: Names the tags that there are.
    """
    tags = {name for account in accounts for name in account.tags}
    for word in by:
        if accounts and word not in (*GROUPS, *tags):
            known = ", ".join([*GROUPS, *sorted(tags)])
            raise RequestError(
                f"--by {word}: no run here has the tag {word}. Use one of {known}, or set "
                f"run.tags.{word}=VALUE in later runs."
            )
    if month is not None:
        try:
            time.strptime(month, "%Y-%m")
        except ValueError:
            raise RequestError(
                f"--month {month} cannot be read. Write it as {time.strftime('%Y-%m')}."
            ) from None
