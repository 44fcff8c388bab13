"""What the run did not make on AWS Batch is left alone, whatever its ledger says: against moto."""

from collections.abc import Callable
from pathlib import Path

import pytest

from shardyard.errors import AccessError, StorageError
from shardyard.launchers.aws_batch.launcher import BatchLauncher
from shardyard.launchers.base import Removal
from shardyard.launchers.ledger import Ledger, Submission
from tests.launchers.batch_server import REGION, BatchServer
from tests.launchers.test_aws_batch import NAME, rendered

pytest.importorskip("boto3", reason="needs shardyard[aws]")
pytest.importorskip("moto.server", reason="needs moto[batch,server]")

pytestmark = pytest.mark.heavy

PLACE = {"region": REGION, "queue": "trainers"}
COLLEAGUE = "shardyard-colleague"


@pytest.fixture
def batch(moto: BatchServer, monkeypatch: pytest.MonkeyPatch) -> BatchServer:
    """A server with a queue, in which jobs wait."""
    for name, value in moto.environ.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_PROFILE", "AWS_DEFAULT_REGION", "AWS_REGION", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    moto.reset()
    moto.make_queue("trainers")
    moto.hold_jobs(seconds=60)
    return moto


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.jsonl")


def of_colleague(batch: BatchServer, **tags: str) -> tuple[str, str]:
    """ARN of a job definition and id of a job that somebody else made."""
    client = batch.client("batch")
    container = {
        "image": "x", "command": ["true"],
        "resourceRequirements": [
            {"type": "VCPU", "value": "1"}, {"type": "MEMORY", "value": "512"},
        ],
    }  # fmt: skip
    definition = client.register_job_definition(
        jobDefinitionName=COLLEAGUE, type="container", containerProperties=container, tags=tags
    )
    job = client.submit_job(
        jobName=COLLEAGUE, jobQueue="trainers", jobDefinition=COLLEAGUE, tags=tags
    )
    return definition["jobDefinitionArn"], job["jobId"]


def status_of(batch: BatchServer, job_id: str) -> str:
    (job,) = batch.client("batch").describe_jobs(jobs=[job_id])["jobs"]
    return str(job["status"])


def job_of(job_id: str, name: str) -> Submission:
    return Submission(launcher="aws-batch", run_id="llama-1", id=job_id, name=name, details=PLACE)


def test_a_definition_that_no_submission_names_so_is_refused_by_its_line(ledger: Ledger) -> None:
    ledger.intend("batch job definition", "colleague-prod", launcher="aws-batch", **PLACE)
    with pytest.raises(StorageError, match=r"ledger.jsonl line 1 .* name='colleague-prod' is not"):
        BatchLauncher().remove(job_of("", "colleague-prod"), ledger)


@pytest.mark.parametrize("tags", [{}, {"shardyard-run": "colleague"}])
def test_what_a_forged_ledger_names_by_its_id_lives_on(
    batch: BatchServer, ledger: Ledger, tags: dict[str, str]
) -> None:
    arn, job_id = of_colleague(batch, **tags)
    forged = job_of(job_id, COLLEAGUE)
    refusal = "tag shardyard-run is .*, not 'llama-1'"
    with pytest.raises(AccessError, match=refusal):
        BatchLauncher().cancel(forged)
    for kind, made in (("batch job", job_id), ("batch job definition", arn)):
        ledger.confirm(ledger.intend(kind, COLLEAGUE, launcher="aws-batch", **PLACE), made)
        with pytest.raises(AccessError, match=refusal):
            BatchLauncher().remove(forged, ledger)
        ledger.path.unlink()
    assert batch.definitions(COLLEAGUE) == [arn]
    assert status_of(batch, job_id) not in ("FAILED", "SUCCEEDED")


@pytest.mark.parametrize("origin", ["", "another"])
def test_an_interrupted_submission_ends_nothing_of_its_name_that_others_made(
    batch: BatchServer, ledger: Ledger, origin: str
) -> None:
    tags = {"shardyard-run": "colleague", **({"shardyard-origin": origin} if origin else {})}
    arn, job_id = of_colleague(batch, **tags)
    for kind in ("batch job definition", "batch job"):
        ledger.intend(kind, COLLEAGUE, launcher="aws-batch", **PLACE, origin="mine")
    found = BatchLauncher().remove(job_of("", COLLEAGUE), ledger)
    definition = f"batch job definition {arn.rpartition('/')[2]}"
    assert found == Removal(not_owned=[f"batch job {job_id}", definition])
    assert ledger.live() == [] and batch.definitions(COLLEAGUE) == [arn]
    assert status_of(batch, job_id) not in ("FAILED", "SUCCEEDED")


def test_the_job_of_another_user_s_run_of_the_same_id_lives_on(
    batch: BatchServer, ledger: Ledger, tmp_path: Path
) -> None:
    launcher = BatchLauncher()
    theirs = launcher.submit(rendered(nonce="theirs"), Ledger(tmp_path / "theirs.jsonl"))
    revisions = batch.definitions(NAME)
    for kind in ("batch job definition", "batch job"):
        ledger.intend(kind, NAME, launcher="aws-batch", **PLACE, origin="mine")
    assert launcher.remove(job_of("", NAME), ledger).removed == []
    assert batch.definitions(NAME) == revisions
    assert status_of(batch, theirs.id) not in ("FAILED", "SUCCEEDED")


@pytest.mark.parametrize("kind", ["batch job", "batch job definition"])
def test_whether_an_older_unanswered_call_was_ours_is_not_guessed(
    batch: BatchServer, ledger: Ledger, tmp_path: Path, kind: str
) -> None:
    """Its line has no origin; another user may have a run of this id."""
    job = BatchLauncher().submit(rendered(), Ledger(tmp_path / "theirs.jsonl"))
    ledger.intend(kind, NAME, launcher="aws-batch", **PLACE)
    with pytest.raises(AccessError, match=r"never known.*aws --region us-east-1 batch \w+-job"):
        BatchLauncher().remove(job_of("", NAME), ledger)
    assert len(ledger.live()) == 1 and len(batch.definitions(NAME)) == 1
    assert status_of(batch, job.id) not in ("FAILED", "SUCCEEDED")


@pytest.fixture
def other_submission(batch: BatchServer) -> Callable[[], list[str]]:
    """Registers a revision of the same name elsewhere; returns all revisions."""

    def make() -> list[str]:
        definition, _ = rendered(nonce="theirs").objects
        batch.client("batch").register_job_definition(**definition["params"])
        return batch.definitions(NAME)

    return make


def test_only_the_revisions_of_this_run_s_submissions_are_deregistered(
    batch: BatchServer, ledger: Ledger, other_submission: Callable[[], list[str]]
) -> None:
    launcher = BatchLauncher()
    job = launcher.submit(rendered(nonce="mine"), ledger)
    (mine,) = batch.definitions(NAME)
    both = other_submission()
    found = launcher.remove(job, ledger)
    definition = f"batch job definition {mine.rpartition('/')[2]}"
    # the other's revision has the name, but no line of the ledger may mean it
    assert found == Removal(removed=[f"batch job {job.id}", definition])
    assert batch.definitions(NAME) == [arn for arn in both if arn != mine]
