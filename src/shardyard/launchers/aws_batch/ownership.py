"""Checks whether a job or job definition of AWS Batch is the one in a line of the ledger.

Anybody can take a name, and a ledger can be changed; tags are what a submission wrote.
"""

from collections.abc import Mapping
from typing import Any

from shardyard.errors import AccessError
from shardyard.launchers.aws_batch.requests import ORIGIN_TAG, RUN_TAG
from shardyard.launchers.base import ORIGIN_DETAIL
from shardyard.launchers.ledger import LedgerEntry


def is_owned(described: Mapping[str, Any], entry: LedgerEntry, *, run_id: str, region: str) -> bool:
    """Return whether what Batch describes is the entry's; others of its name are not touched.

    Args:
        described: Result of DescribeJobs or DescribeJobDefinitions.
        run_id: The run of the ledger.

    Raises:
        AccessError: It has the entry's id and is tagged as another run's; or the entry has no id,
            as the answer to its creation was lost, and no tag decides it.
    """
    ids = (described.get("jobId"), described.get("jobDefinitionArn"))
    if entry.id is not None and entry.id not in ids:
        return False
    tags = described.get("tags") or {}
    is_of_run = tags.get(RUN_TAG) == run_id
    if entry.id is not None:
        if not is_of_run:
            tagged = f"its tag {RUN_TAG} is {tags.get(RUN_TAG)!r}, not {run_id!r}"
            raise AccessError(_not_owned_message(entry, tagged, described, region))
        return True
    origin = entry.details.get(ORIGIN_DETAIL)
    if origin or not is_of_run:
        return is_of_run and tags.get(ORIGIN_TAG) == origin
    # Ledgers of earlier versions have no origin, and another user's run may have the same id.
    why = "whether its creation succeeded was never known, nor who made this"
    raise AccessError(_not_owned_message(entry, why, described, region))


def _not_owned_message(
    entry: LedgerEntry, reason: str, described: Mapping[str, Any], region: str
) -> str:
    job_id = described.get("jobId")
    definition = f"deregister-job-definition --job-definition {described.get('jobDefinitionArn')}"
    end = f"terminate-job --job-id {job_id} --reason mine" if job_id else definition
    return (
        f"{entry.kind} {job_id or entry.name} in {region} is left as it is: {reason}. What others "
        f"made is not ended. If it is yours: aws --region {region} batch {end}."
    )
