"""A submission that fails half-way: what is repeated, what is undone, what the ledger keeps."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from shardyard.io.aws import UncertainError
from shardyard.launchers.aws_batch.launcher import BatchLauncher
from shardyard.launchers.ledger import Ledger
from tests.launchers.batch_endpoint import HANG_UP, JOB_ID, Endpoint, batch_endpoint
from tests.launchers.batch_requests import batch_request

pytest.importorskip("boto3", reason="needs shardyard[aws]")

pytestmark = pytest.mark.heavy

THROTTLED = (429, "TooManyRequestsException")


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Endpoint]:
    with batch_endpoint() as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
        yield endpoint


def submit(ledger: Ledger, waits: list[float] | None = None) -> str:
    launcher = BatchLauncher(sleep=(waits if waits is not None else []).append)
    rendered = launcher.render(batch_request("cluster.instance=p4d.24xlarge"))
    return launcher.submit(rendered, ledger).id


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.jsonl")


def test_a_throttled_submission_is_repeated(endpoint: Endpoint, ledger: Ledger) -> None:
    endpoint.failures["submitjob"] = [THROTTLED, THROTTLED]
    waits: list[float] = []
    assert submit(ledger, waits) == JOB_ID
    assert waits == [1.0, 2.0]
    assert endpoint.calls.count("submitjob") == 3


@pytest.mark.parametrize("failure", [HANG_UP, (500, "ServerException")])
def test_one_whose_answer_is_lost_is_not_repeated_and_stays_in_the_ledger(
    endpoint: Endpoint, ledger: Ledger, failure: tuple[int, str]
) -> None:
    """SubmitJob has no token: repeating it could start, and bill, two jobs."""
    endpoint.failures["submitjob"] = [failure]
    with pytest.raises(UncertainError, match="may have done it all the same"):
        submit(ledger)
    assert endpoint.calls.count("submitjob") == 1
    assert "deregisterjobdefinition" not in endpoint.calls
    assert [(entry.kind, entry.is_confirmed) for entry in ledger.live()] == [
        ("batch job definition", True),
        ("batch job", False),
    ]
