"""`doctor --on aws-batch`: each thing that would stop a run is a finding with its remedy.

AWS is moto over HTTP; the two calls that it does not know, of Service Quotas and IAM's simulator,
are answered by botocore's Stubber, which validates both sides.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from shardyard.cli import main
from shardyard.doctor.finding import Finding
from shardyard.io.aws import aws_client
from shardyard.launchers.aws_batch.checks import QUOTAS, batch_checks
from shardyard.launchers.aws_batch.requests import LOG_GROUP
from tests.image.registries import answering
from tests.launchers.batch_requests import EXECUTION_ROLE, ROLE, batch_request
from tests.launchers.batch_server import REGION, BatchServer

pytest.importorskip("boto3", reason="needs shardyard[aws]")
pytest.importorskip("moto.server", reason="needs moto[batch,server]")

pytestmark = pytest.mark.heavy

IMAGE = f"123456789012.dkr.ecr.{REGION}.amazonaws.com/shardyard:1"


@pytest.fixture
def aws(moto: BatchServer, monkeypatch: pytest.MonkeyPatch) -> BatchServer:
    """An empty account that this process speaks to."""
    for name, value in moto.environ.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_PROFILE", "AWS_DEFAULT_REGION", "AWS_REGION", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    moto.reset()
    return moto


def made(aws: BatchServer, *overrides: str, without: str = "") -> tuple[str, ...]:
    """An account with all that the recipe asks for, made as `cluster create` does."""
    settings = ("cluster.instance=p4d.24xlarge", *overrides)
    if without != "roles":
        aws.make_role(ROLE)
        aws.make_role(EXECUTION_ROLE)
    aws.make_instance_profile("ecsInstanceRole")
    aws.make_environment(batch_request(*settings).recipe)
    aws.client("ecr").create_repository(repositoryName="shardyard")
    aws.push_manifest("shardyard", "1")
    aws.client("logs").create_log_group(logGroupName=LOG_GROUP)
    return (f"launch.image={IMAGE}", *settings)


def findings(*overrides: str, **stubbed: Any) -> dict[str, list[Finding]]:
    found: dict[str, list[Finding]] = {}

    def make_client(session: Any, service: str) -> Any:
        stub = stubbed.get(service.replace("-", "_"))
        return stub or aws_client(session, service, retries=1)  # what moto lacks, once

    for finding in batch_checks(batch_request(*overrides), make_client=make_client):
        found.setdefault(finding.name, []).append(finding)
    return found


def only(found: dict[str, list[Finding]], name: str) -> Finding:
    (finding,) = found[name]
    return finding


def new_client(service: str) -> Any:
    import boto3.session

    return boto3.session.Session(region_name=REGION).client(service)


def stubbed(service: str, *answers: tuple[str, dict[str, Any], dict[str, Any]]) -> Any:
    """A client that gives these answers, to these parameters alone, in this order."""
    from botocore.stub import Stubber

    client = new_client(service)
    stubber = Stubber(client)
    for call, asked, answer in answers:
        stubber.add_response(call, answer, asked)
    stubber.activate()
    return client


def quota(vcpus: float) -> Any:
    answer = {"Quota": {"Value": vcpus, "QuotaName": "Running On-Demand P instances"}}
    asked = {"ServiceCode": "ec2", "QuotaCode": QUOTAS["p"]}
    return stubbed("service-quotas", ("get_service_quota", asked, answer))


def let_default_group_in(aws: BatchServer) -> str:
    """As a VPC's default group does at first; that of moto does not."""
    ec2 = aws.client("ec2")
    wanted = [{"Name": "group-name", "Values": ["default"]}]
    (group,) = ec2.describe_security_groups(Filters=wanted)["SecurityGroups"]
    pair = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group["GroupId"]}]}
    ec2.authorize_security_group_ingress(GroupId=group["GroupId"], IpPermissions=[pair])
    return str(group["GroupId"])


def test_nodes_whose_own_interfaces_are_shut_to_each_other_are_told(aws: BatchServer) -> None:
    settings = made(aws, "cluster.nodes=2")
    shut = only(findings(*settings, service_quotas=quota(192)), "task network")
    group = let_default_group_in(aws)
    assert shut.verdict == "problem" and f"default security group, {group}" in shut.what
    assert f"--group-id {group} --protocol tcp" in shut.mend
    alone = (*settings, "cluster.nodes=1")
    assert "task network" not in findings(*alone, service_quotas=quota(192))


def test_an_account_made_as_cluster_create_does_is_fit(aws: BatchServer) -> None:
    settings = made(aws, "cluster.nodes=2")
    let_default_group_in(aws)
    found = findings(*settings, service_quotas=quota(192))
    verdicts = {name: [finding.verdict for finding in of] for name, of in found.items()}
    asked_of_iam = [of.what for of in found["image"] if of.verdict == "warning"]
    # moto makes no placement groups and simulates no policies
    assert len(asked_of_iam) == 1 and "may ecr:BatchGetImage cannot be asked" in asked_of_iam[0]
    assert verdicts == {
        "credentials": ["ok"], "queue": ["ok"], "EFA": ["ok"], "task network": ["ok"],
        "stop time": ["ok"],
        "launch.aws_batch.job_role": ["ok"], "launch.aws_batch.execution_role": ["ok"],
        "log group": ["ok"], "quota": ["ok"], "image": ["ok", "warning"],
    }  # fmt: skip
    assert "arn:aws:sts" in only(found, "credentials").what
    assert "instances of shardyard-trainers get 4 EFA interfaces" in only(found, "EFA").what


@pytest.mark.usefixtures("aws")
def test_without_credentials_nothing_else_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    found = findings()
    assert list(found) == ["credentials"]
    assert only(found, "credentials").verdict == "problem"
    assert "aws sso login" in only(found, "credentials").what
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    assert "No request was sent" in only(findings(), "credentials").what


@pytest.mark.usefixtures("aws")
def test_an_empty_account_lacks_everything_and_says_how_to_make_it() -> None:
    found = findings("cluster.instance=p4d.24xlarge", service_quotas=quota(0))
    assert only(found, "queue").verdict == "problem"
    assert "'trainers' does not exist" in only(found, "queue").what
    assert "cluster create kind=batch recipe=RECIPE name=QUEUE` makes" in only(found, "queue").mend
    for finding in found["roles"] + found["instances"]:
        assert "'trainers' does not exist" in finding.what
    assert (only(found, "log group").verdict, only(found, "log group").mend) == (
        "warning", f"aws logs create-log-group --region {REGION} --log-group-name {LOG_GROUP}",
    )  # fmt: skip
    assert found["image"][0].what.startswith("123456789012.dkr.ecr")
    assert found["image"][0].what.endswith(" does not exist")
    assert "shardyard image push" in found["image"][0].mend


def test_instances_without_efa_would_start_no_container(aws: BatchServer) -> None:
    aws.make_queue("trainers")  # no launch template
    aws.make_role(ROLE)
    aws.make_role(EXECUTION_ROLE)
    found = findings("cluster.instance=p4d.24xlarge", "cluster.nodes=2", service_quotas=quota(192))
    efa = only(found, "EFA")
    assert efa.verdict == "problem"
    assert "get 0 EFA interfaces, and p4d.24xlarge has 4" in efa.what
    assert "/dev/infiniband/uverbs0" in efa.what
    assert "shardyard cluster create kind=batch" in efa.mend
    assert only(found, "placement group").verdict == "warning"
    stop = only(found, "stop time")
    assert "give a container 30 s to end" in stop.what
    assert "ECS_CONTAINER_STOP_TIMEOUT" in stop.mend


def test_a_drain_longer_than_the_stop_time_is_a_warning(aws: BatchServer) -> None:
    settings = made(aws)
    found = findings(*settings, "elastic.drain_timeout_s=3600.0", service_quotas=quota(96))
    assert only(found, "stop time").verdict == "warning"
    assert "ECS_CONTAINER_STOP_TIMEOUT=3630s" in only(found, "stop time").mend


def test_roles_must_be_there_and_trust_containers(aws: BatchServer) -> None:
    settings = made(aws, without="roles")
    aws.make_role(ROLE, trusted="ec2.amazonaws.com")
    found = findings(*settings, service_quotas=quota(96))
    job, execution = (only(found, f"launch.aws_batch.{name}_role") for name in ("job", "execution"))
    assert (job.verdict, execution.verdict) == ("problem", "problem")
    assert "does not trust ecs-tasks.amazonaws.com" in job.what
    assert "update-assume-role-policy" in job.mend
    assert f"role {EXECUTION_ROLE} does not exist" in execution.what
    aws.client("iam").remove_role_from_instance_profile(
        InstanceProfileName="ecsInstanceRole", RoleName="of-ecsInstanceRole"
    )
    instance = only(findings(*settings, service_quotas=quota(96)), "instance role")
    assert "instance profile ecsInstanceRole does not exist or has no role" in instance.what
    assert "AmazonEC2ContainerServiceforEC2Role" in instance.mend


def test_a_quota_below_what_the_run_needs_is_a_problem(aws: BatchServer) -> None:
    settings = made(aws, "cluster.nodes=2")
    finding = only(findings(*settings, service_quotas=quota(191)), "quota")
    assert finding.verdict == "problem"
    assert "Running On-Demand P instances: 191 vCPUs, and the run needs 192" in finding.what
    assert "--quota-code L-417A185B --desired-value 192" in finding.mend


def test_a_quota_that_nobody_changed_is_aws_own(aws: BatchServer) -> None:
    from botocore.stub import Stubber

    settings, which = made(aws), {"ServiceCode": "ec2", "QuotaCode": QUOTAS["p"]}
    client = new_client("service-quotas")
    stubber = Stubber(client)
    stubber.add_client_error("get_service_quota", "NoSuchResourceException", expected_params=which)
    answer = {"Quota": {"Value": 0.0, "QuotaName": "Running On-Demand P instances"}}
    stubber.add_response("get_aws_default_service_quota", answer, which)
    stubber.activate()
    assert "0 vCPUs, and the run needs 96" in only(findings(*settings, service_quotas=client),
                                                   "quota").what  # fmt: skip


def test_what_may_not_be_asked_is_a_warning(aws: BatchServer) -> None:
    from botocore.stub import Stubber

    settings, client = made(aws), new_client("service-quotas")
    stubber = Stubber(client)
    stubber.add_client_error("get_service_quota", "AccessDeniedException", http_status_code=403)
    stubber.activate()
    finding = only(findings(*settings, service_quotas=client), "quota")
    assert finding.verdict == "warning"
    assert "cannot be asked" in finding.what and "GetServiceQuota" in finding.what


def test_an_image_elsewhere_is_asked_of_its_registry(aws: BatchServer) -> None:
    settings = made(aws)
    with answering(404, {}) as registry:
        image = f"launch.image={registry}/me/it:1"
        found = findings(*settings, image, service_quotas=quota(96))
    assert only(found, "image").verdict == "problem"
    assert f"{registry} has no me/it with 1" in only(found, "image").what


@pytest.mark.parametrize(("decision", "verdict"), [("allowed", "ok"), ("implicitDeny", "problem")])
def test_whether_instances_may_pull_is_asked_of_iam(
    aws: BatchServer, decision: str, verdict: str
) -> None:
    settings = made(aws)
    without = ("launch.aws_batch.job_role=null", "launch.aws_batch.execution_role=null")
    role = "arn:aws:iam::123456789012:role/of-ecsInstanceRole"
    actions = ["ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"]
    repository = f"arn:aws:ecr:{REGION}:123456789012:repository/shardyard"
    answer = aws.client("iam").get_instance_profile(InstanceProfileName="ecsInstanceRole")
    profile = answer["InstanceProfile"]
    profile["Roles"][0]["AssumeRolePolicyDocument"] = "{}"
    iam = stubbed(
        "iam",
        ("get_instance_profile", {"InstanceProfileName": "ecsInstanceRole"},
         {"InstanceProfile": profile}),
        ("simulate_principal_policy",
         {"PolicySourceArn": role, "ActionNames": actions, "ResourceArns": [repository]},
         {"EvaluationResults": [{"EvalActionName": action, "EvalDecision": decision}
                                for action in actions]}),
    )  # fmt: skip
    pull = findings(*settings, *without, service_quotas=quota(96), iam=iam)["image"][1]
    assert pull.verdict == verdict
    assert role in pull.what and "ecr:GetDownloadUrlForLayer" in pull.what
    assert ("AmazonEC2ContainerServiceforEC2Role" in pull.mend) == (verdict == "problem")


def test_secrets_are_looked_for_and_never_read(aws: BatchServer) -> None:
    settings = made(aws)
    manager, ssm = aws.client("secretsmanager"), aws.client("ssm")
    arn = manager.create_secret(Name="hub", SecretString="of nobody's concern")["ARN"]
    ssm.put_parameter(Name="/team/wandb", Value="of nobody's either", Type="SecureString")
    gone = arn.replace(":hub-", ":gone-")
    found = findings(
        *settings, f"secrets.HF_TOKEN='aws-sm:{arn}#token'", "secrets.WANDB=ssm:/team/wandb",
        f"secrets.GONE=aws-sm:{gone}", "secrets.NONE=ssm:/team/none", service_quotas=quota(96),
    )  # fmt: skip
    assert found["secrets.HF_TOKEN"][0].verdict == found["secrets.WANDB"][0].verdict == "ok"
    assert "its value was not read, nor whether it has token" in found["secrets.HF_TOKEN"][0].what
    for name, command in (("GONE", "secretsmanager create-secret"), ("NONE", "ssm put-parameter")):
        finding = only(found, f"secrets.{name}")
        assert finding.verdict == "problem" and command in finding.mend
    assert "of nobody's" not in str(found)
    manager.delete_secret(SecretId=arn)
    found = findings(*settings, f"secrets.HF_TOKEN=aws-sm:{arn}", service_quotas=quota(96))
    assert "is being deleted" in only(found, "secrets.HF_TOKEN").what


def test_a_parameter_is_found_by_its_arn_too(aws: BatchServer) -> None:
    settings = made(aws)
    aws.client("ssm").put_parameter(Name="/a/b", Value="x", Type="SecureString")
    arn = f"arn:aws:ssm:{REGION}:123456789012:parameter/a/b"
    found = findings(*settings, f"secrets.B=ssm:{arn}", service_quotas=quota(96))
    assert found["secrets.B"][0].verdict == "ok"


def test_the_verb_prints_it_and_ends_with_1(
    aws: BatchServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    settings = made(aws, "cluster.nodes=2")
    monkeypatch.chdir(tmp_path)
    words = ["model.preset=llama-tiny", "launch.aws_batch.queue=others", "launch.run_dir=/runs"]
    queue = [word for word in settings if not word.startswith("launch.aws_batch.queue=")]
    more = ["launch.aws_batch.region=us-east-1", *queue, *words]
    assert main(["doctor", *more, "--on", "aws-batch", "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    problems = [row for row in answer["findings"] if row["verdict"] == "problem"]
    assert any("There is trainers." in row["what"] for row in problems)
    assert list(tmp_path.iterdir()) == []
