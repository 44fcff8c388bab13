"""Creates an object between its two lines in the ledger, and checks whether one is that of a line.

Anybody may make an object of the same name, before ours or after it, and a ledger can be
changed. So an object is known by its uid, and by what our annotations say; the delete
itself has the uid as its precondition.
"""

from collections.abc import Callable, Mapping
from typing import Any

from shardyard.errors import AccessError, ShardyardError
from shardyard.launchers.base import ORIGIN_DETAIL, LaunchRequest
from shardyard.launchers.kubernetes.api import PLURALS, Api
from shardyard.launchers.kubernetes.refusals import ApiUncertainError, ExistsError
from shardyard.launchers.ledger import Ledger, LedgerEntry

_PAGE = "verbs/cancel#teardown"

RUN_ID = "shardyard/run-id"
"""Annotation: the run that made it."""
ORIGIN = "shardyard/origin"
"""Annotation: the submission that made it."""

SHARED = "ClusterTrainingRuntime"
"""Kind whose objects are many runs' and so carry no run's id."""

MANAGED_BY = ("app.kubernetes.io/managed-by", "shardyard")

Object = dict[str, Any]


def origin_notes(request: LaunchRequest) -> dict[str, str]:
    """The annotation of a submission's objects."""
    return {ORIGIN: request.origin} if request.origin else {}


def create_in_ledger(
    api: Api, item: Object, ledger: Ledger, *, launcher: str, details: Mapping[str, str],
    explain: Callable[[ExistsError], str],
) -> str:  # fmt: skip
    """Create one object between its two lines in the ledger; returns its uid.

    Args:
        explain: Message of the error where the name is taken.

    Raises:
        ShardyardError: It was not created, or its state is unknown.
    """
    entry = ledger.intend(item["kind"], item["metadata"]["name"], launcher=launcher, **details)
    try:
        uid = str(api.create(item)["metadata"]["uid"])
    except ApiUncertainError:
        raise  # The ledger keeps it as intended, so that teardown looks for it.
    except ExistsError as error:
        ledger.fail(entry, str(error))
        raise ExistsError(explain(error)) from error
    except ShardyardError as error:
        ledger.fail(entry, str(error))
        raise
    ledger.confirm(entry, uid)
    return uid


def is_owned(api: Api, item: Object, entry: LedgerEntry, *, run_id: str | None) -> bool:
    """Return whether an object is the entry's; another one of its name is not touched.

    Args:
        run_id: The run of the ledger; None: it is no run's, but lists what was installed.

    Raises:
        AccessError: It has the entry's uid and is marked as another's; or the entry has no uid, as
            the answer to its creation was lost, and no mark decides it.
    """
    meta = item["metadata"]
    notes = meta.get("annotations") or {}
    if entry.id is not None and meta["uid"] != entry.id:
        return False
    mark = _mark_mismatch(entry, meta, run_id)
    if entry.id is not None:
        if mark:
            raise AccessError(
                _not_owned_message(api, entry, f"it is the object of this uid, but {mark}"),
                page=_PAGE,
            )
        return True
    origin = entry.details.get(ORIGIN_DETAIL)
    if origin:
        return not mark and notes.get(ORIGIN) == origin
    if mark:
        return False
    # Ledgers of earlier versions have no origin, and another user's run may have the same id.
    raise AccessError(
        _not_owned_message(
            api, entry, "whether its creation succeeded was never known, nor who made this"
        ),
        page=_PAGE,
    )


def _mark_mismatch(entry: LedgerEntry, meta: Object, run_id: str | None) -> str:
    """Return the mark that an object lacks to be ours; empty: it is marked as it should be."""
    if run_id is None or entry.kind == SHARED:
        label, wanted = MANAGED_BY
        found = (meta.get("labels") or {}).get(label)
        where = f"label {label}"
    else:
        wanted, where = run_id, f"annotation {RUN_ID}"
        found = (meta.get("annotations") or {}).get(RUN_ID)
    return "" if found == wanted else f"its {where} is {found!r}, not {wanted!r}"


def _not_owned_message(api: Api, entry: LedgerEntry, reason: str) -> str:
    where = f"kubectl --context {api.context} -n {api.namespace}"
    name = f"{PLURALS[entry.kind][1]} {entry.name}"
    return (
        f"context {api.context!r}, namespace {api.namespace!r}: {entry.kind} {entry.name} is left "
        f"as it is: {reason}. What others made is not ended. Look at it with {where} get {name} -o "
        f"yaml; if it is yours, end it with {where} delete {name}."
    )
