"""The prerequisites: accepted by botocore, EFA interfaces as in the catalogue, no Spot."""

import base64
import json
import shlex
from typing import Any

import pytest

from shardyard.errors import RequestError
from shardyard.hardware.catalogue import instance, instance_names
from shardyard.launchers.aws_batch.setup import (
    WITHOUT_DRIVERS,
    commands,
    main,
    prerequisites,
)
from tests.launchers.batch_requests import SETTINGS, batch_recipe

SETUP = (
    "launch.aws_batch.subnets=[subnet-0123456789abcdef0]",
    "launch.aws_batch.security_groups=[sg-0123456789abcdef0]",
    "launch.aws_batch.instance_role=ecsInstanceRole",
)
TRAINABLE = [
    name for name in instance_names() if instance(name).accelerator.device in ("cuda", "hpu")
]


def calls(machine: str, *overrides: str, nodes: int = 2) -> dict[str, dict[str, Any]]:
    made = prerequisites(
        batch_recipe(
            f"cluster.instance={machine}", f"cluster.nodes={nodes}",
            "launch.aws_batch.ami=ami-0123456789abcdef0", *SETUP, *overrides,
        )
    )  # fmt: skip
    return {call["call"]: call["params"] for call in made}


def complaints(service: str, call: str, params: dict[str, Any]) -> str:
    session = pytest.importorskip("botocore.session").get_session()
    from botocore.validate import ParamValidator

    model = session.get_service_model(service).operation_model(call)
    return str(ParamValidator().validate(params, model.input_shape).generate_report())


@pytest.mark.parametrize("machine", TRAINABLE)
def test_botocore_accepts_every_call(machine: str) -> None:
    for service, call in [
        ("ec2", "CreatePlacementGroup"),
        ("ec2", "CreateLaunchTemplate"),
        ("batch", "CreateComputeEnvironment"),
        ("batch", "CreateJobQueue"),
    ]:
        assert complaints(service, call, calls(machine)[call]) == ""


@pytest.mark.parametrize("machine", TRAINABLE)
def test_interfaces_are_those_of_the_catalogue(machine: str) -> None:
    made = calls(machine)
    data = made["CreateLaunchTemplate"]["LaunchTemplateData"]
    interfaces = data.get("NetworkInterfaces", [])
    count = instance(machine).efa_count
    assert [row["NetworkCardIndex"] for row in interfaces] == list(range(count))
    assert [row["DeviceIndex"] for row in interfaces] == ([0] + [1] * (count - 1) if count else [])
    assert all(row["InterfaceType"] == "efa" for row in interfaces)
    environment = made["CreateComputeEnvironment"]["computeResources"]
    # Batch refuses groups in both places, and needs them in one.
    assert ("securityGroupIds" in environment) == (count == 0)


def test_nothing_runs_while_no_job_waits_and_nothing_is_spot() -> None:
    environment = calls("p5.48xlarge", nodes=4)["CreateComputeEnvironment"]["computeResources"]
    assert (environment["type"], environment["minvCpus"]) == ("EC2", 0)
    assert environment["maxvCpus"] == 4 * 192
    assert environment["placementGroup"] == "trainers-group"


def test_containers_get_the_time_of_a_drain() -> None:
    data = calls("p5.48xlarge", "elastic.drain_timeout_s=300.0")["CreateLaunchTemplate"]
    text = base64.b64decode(data["LaunchTemplateData"]["UserData"]).decode()
    assert "ECS_CONTAINER_STOP_TIMEOUT=330s" in text


def test_containers_cannot_take_the_instances_role() -> None:
    options = calls("p5.48xlarge")["CreateLaunchTemplate"]["LaunchTemplateData"]["MetadataOptions"]
    assert options == {"HttpTokens": "required", "HttpPutResponseHopLimit": 1}


def test_a_job_that_cannot_start_is_cancelled() -> None:
    actions = calls("p5.48xlarge")["CreateJobQueue"]["jobStateTimeLimitActions"]
    assert {action["state"] for action in actions} == {"RUNNABLE"}
    assert {action["action"] for action in actions} == {"CANCEL"}
    assert all(600 <= action["maxTimeSeconds"] <= 86400 for action in actions)


def test_missing_settings_are_all_named() -> None:
    with pytest.raises(RequestError) as raised:
        prerequisites(batch_recipe())
    for name in ("cluster.instance", "subnets", "security_groups", "instance_role"):
        assert name in str(raised.value)


def test_several_subnets_are_refused() -> None:
    with pytest.raises(RequestError, match=r"has 2.*Name one subnet"):
        calls("p5.48xlarge", "launch.aws_batch.subnets=[subnet-1, subnet-2]")


@pytest.mark.parametrize("machine", ["p3.16xlarge", "dl1.24xlarge"])
def test_types_without_drivers_in_batchs_image_need_one_of_yours(machine: str) -> None:
    assert machine.partition(".")[0] in WITHOUT_DRIVERS
    with pytest.raises(RequestError, match=r"no drivers.*launch\.aws_batch\.ami"):
        calls(machine, "launch.aws_batch.ami=null")


def test_the_calls_are_printed_as_commands_of_the_aws_cli(
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = [*SETTINGS, *SETUP, "cluster.instance=p5.48xlarge", "cluster.nodes=2"]
    assert main(["model.preset=llama-tiny", *settings]) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    verbs = [line[:3] for line in lines]
    assert verbs == [
        ["aws", "ec2", "create-placement-group"],
        ["aws", "ec2", "create-launch-template"],
        ["aws", "batch", "create-compute-environment"],
        ["aws", "batch", "create-job-queue"],
    ]
    made = prerequisites(batch_recipe(*settings))
    assert [json.loads(line[-1]) for line in lines] == [call["params"] for call in made]
    assert all(line[3:5] == ["--region", "us-east-1"] for line in lines)
    assert "--region" not in commands(made, None)


def test_missing_settings_end_with_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model.preset=llama-tiny", "cluster.instance=p5.48xlarge"]) == 2
    assert "launch.aws_batch.queue" in capsys.readouterr().err


def test_machines_that_nothing_can_be_trained_on_get_no_queue(
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = [*SETTINGS, *SETUP, "model.preset=llama-tiny", "cluster.instance=trn1.32xlarge"]
    assert main(settings) == 2
    assert "a run on Trainium1 can be planned, not trained yet" in capsys.readouterr().err
