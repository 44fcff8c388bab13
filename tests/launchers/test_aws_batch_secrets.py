"""Planted secrets: no verb on AWS Batch prints one, sends one, or writes one down.

The launching process has them in its environment, and AWS keeps them; what is sent are references.
That they reach the containers is shown in tests/e2e/test_batch_docker.py.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardyard.cli import main
from shardyard.launchers.aws_batch.requests import job_name
from tests.launchers.batch_requests import EXECUTION_ROLE, SETTINGS
from tests.launchers.batch_server import BatchServer
from tests.launchers.planted import Planted, planted_secrets

pytest.importorskip("boto3", reason="needs shardyard[aws]")
pytest.importorskip("moto.server", reason="needs moto[batch,server]")

pytestmark = pytest.mark.heavy

RUN = "planted"
RECIPE = (
    "model.preset=llama-tiny", "run.steps=2", "cluster.instance=p4d.24xlarge", f"run.id={RUN}",
    "data.source=/runs/text", "data.seq_len=32", *SETTINGS,
)  # fmt: skip


@pytest.fixture
def planted(moto: BatchServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Planted:
    """Secrets in AWS and in this process's environment; the work is done in a folder beside."""
    moto.reset()
    moto.make_queue("trainers")
    made = planted_secrets(tmp_path, kinds=("env", "env"))
    arn = moto.client("secretsmanager").create_secret(Name="a", SecretString=made.values[0])
    moto.client("ssm").put_parameter(Name="/b", Value=made.values[1], Type="SecureString")
    for name, value in (moto.environ | made.environ).items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_PROFILE", "AWS_DEFAULT_REGION", "AWS_REGION", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    references = {"PLANTED_0": f"aws-sm:{arn['ARN']}", "PLANTED_1": "ssm:/b"}
    return replace(made, secrets=references)


def test_no_verb_lets_a_secret_out(
    moto: BatchServer, planted: Planted, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*RECIPE, f"secrets={json.dumps(planted.secrets)}"]
    said = ""
    for verb in (
        ["config", *words],
        ["doctor", *words, "--on", "aws-batch"],
        ["launch", *words, "--on", "aws-batch", "--dry-run"],
        ["launch", *words, "--on", "aws-batch", "--yes"],
        ["status", RUN, "--json"],
        ["logs", RUN],
        ["runs"],
        ["cancel", RUN],
    ):
        code = main(verb)
        output = capsys.readouterr()
        said += output.out + output.err
        assert code == (1 if verb[0] == "doctor" else 0), f"{verb[0]}: {output.err}"
    batch = moto.client("batch")
    definitions = batch.describe_job_definitions(jobDefinitionName=job_name(RUN))["jobDefinitions"]
    (listed,) = batch.list_jobs(jobQueue="trainers", jobStatus="SUCCEEDED")["jobSummaryList"]
    jobs = batch.describe_jobs(jobs=[listed["jobId"]])["jobs"]
    assert main(["teardown", RUN, "--yes"]) == 0
    output = capsys.readouterr()
    said += output.out + output.err
    assert (Path("runs") / RUN / "ledger.jsonl").is_file()
    assert planted.leaks(said, definitions, jobs, Path()) == []
    container = jobs[0]["nodeProperties"]["nodeRangeProperties"][0]["container"]
    references = {"PLANTED_0": planted.secrets["PLANTED_0"].partition(":")[2], "PLANTED_1": "/b"}
    assert {row["name"]: row["valueFrom"] for row in container["secrets"]} == references
    assert container["executionRoleArn"] == EXECUTION_ROLE


def test_the_scan_finds_what_it_looks_for(planted: Planted, tmp_path: Path) -> None:
    (tmp_path / "work" / "leak.json").write_text(json.dumps({"token": planted.values[0]}))
    assert planted.leaks(Path()) == ["leak.json holds secret 0"]
