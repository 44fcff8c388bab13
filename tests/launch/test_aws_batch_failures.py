"""A submission that fails half-way: what is repeated, what is undone, what the ledger keeps."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardyard.errors import AccessError, CapacityError, RequestError, ShardyardError
from shardyard.launch.aws_batch import BatchLauncher
from shardyard.launch.aws_errors import UncertainError
from shardyard.launch.ledger import Ledger
from tests.launch.batch_endpoint import HANG_UP, Endpoint, batch_endpoint
from tests.launch.batch_requests import batch_request

pytest.importorskip("boto3", reason="needs shardyard[aws]")

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


def written(ledger: Ledger) -> list[str]:
    lines = [json.loads(line) for line in ledger.path.read_text().splitlines()]
    return [f"{line['action']} {line['kind']}" for line in lines]


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.jsonl")


def test_a_throttled_submission_is_repeated(endpoint: Endpoint, ledger: Ledger) -> None:
    endpoint.failures["submitjob"] = [THROTTLED, THROTTLED]
    waits: list[float] = []
    assert submit(ledger, waits) == "j-1"
    assert waits == [1.0, 2.0]
    assert endpoint.calls.count("submitjob") == 3


def test_one_that_stays_throttled_is_undone(endpoint: Endpoint, ledger: Ledger) -> None:
    endpoint.failures["submitjob"] = [THROTTLED] * 9
    with pytest.raises(CapacityError, match="Wait a minute") as raised:
        submit(ledger)
    assert raised.value.exit_code == 3
    assert "deregisterjobdefinition" in endpoint.calls
    assert ledger.live() == []


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


@pytest.mark.parametrize(
    ("failure", "kind", "words"),
    [
        ((403, "ExpiredTokenException"), AccessError, "aws sso login"),
        ((403, "AccessDeniedException"), AccessError, "the right to RegisterJobDefinition"),
        ((400, "ClientException"), RequestError, "Correct that"),
    ],
)
def test_a_refused_definition_leaves_nothing(
    endpoint: Endpoint,
    ledger: Ledger,
    *,
    failure: tuple[int, str],
    kind: type[ShardyardError],
    words: str,
) -> None:
    endpoint.failures["registerjobdefinition"] = [failure]
    with pytest.raises(kind, match=words):
        submit(ledger)
    assert written(ledger) == ["intended batch job definition", "failed batch job definition"]
    assert "submitjob" not in endpoint.calls


def test_the_definition_of_a_refused_job_is_removed(endpoint: Endpoint, ledger: Ledger) -> None:
    endpoint.failures["submitjob"] = [(403, "AccessDeniedException")]
    with pytest.raises(AccessError, match="the right to SubmitJob"):
        submit(ledger)
    assert endpoint.calls[-1] == "deregisterjobdefinition"
    assert ledger.live() == []


def test_when_the_undoing_fails_too_the_ledger_keeps_the_definition(
    endpoint: Endpoint, ledger: Ledger
) -> None:
    denied = (403, "AccessDeniedException")
    endpoint.failures["submitjob"] = [denied]
    endpoint.failures["deregisterjobdefinition"] = [denied]
    with pytest.raises(AccessError, match="the right to SubmitJob"):
        submit(ledger)
    assert [entry.kind for entry in ledger.live()] == ["batch job definition"]
