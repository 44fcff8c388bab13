"""A moto server as a process: AWS Batch, EC2, IAM and CloudWatch Logs over HTTP on a free port.

Without a Docker engine it runs no containers: jobs succeed at once, or are held and then fail.
"""

import base64
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardyard.cluster.batch.stack import render_environment
from shardyard.cluster.network import location_in_spec
from shardyard.cluster.spec import STOP_MARGIN_S, ClusterSpec
from shardyard.cluster.spec_file import read_cluster_spec
from shardyard.config.schema.recipe import Recipe
from shardyard.launchers.aws_batch.requests import LOG_GROUP
from tests.launchers.docker_engine import DockerEngine

REGION = "us-east-1"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}
_START_LIMIT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class BatchServer:
    """The server, and what the tests made in it."""

    url: str
    environ: dict[str, str]
    """What a process needs to speak to it."""
    _clients: dict[str, Any] = field(default_factory=dict, init=False)

    def client(self, service: str) -> Any:
        """A client of the tests' own; each takes a second to make."""
        import boto3.session

        if service not in self._clients:
            session = boto3.session.Session(
                region_name=REGION,
                aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
                aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
            )
            self._clients[service] = session.client(service, endpoint_url=self.url)
        return self._clients[service]

    def run_containers(self) -> None:
        """From now on jobs run in containers of the Docker engine that the server was given."""
        self._post("/moto-api/config", {"batch": {"use_docker": True}})

    def hold_jobs(self, seconds: int) -> None:
        """Let jobs stay so long in each state; then they fail, as the server has no Docker."""
        self._post("/moto-api/config", {"batch": {"use_docker": True}})
        transition = {"progression": "time", "seconds": seconds}
        body = {"model_name": "batch::job", "transition": transition}
        self._post("/moto-api/state-manager/set-transition", body)

    def write_log(self, stream: str, *lines: str, group: str = LOG_GROUP) -> None:
        """Write into a stream of a log group, a millisecond apart."""
        logs = self.client("logs")
        for make, names in (
            (logs.create_log_group, {"logGroupName": group}),
            (logs.create_log_stream, {"logGroupName": group, "logStreamName": stream}),
        ):
            with suppress(logs.exceptions.ResourceAlreadyExistsException):
                make(**names)
        now_ms = int(time.time() * 1000)
        events = [
            {"timestamp": now_ms + place, "message": text} for place, text in enumerate(lines)
        ]
        logs.put_log_events(logGroupName=group, logStreamName=stream, logEvents=events)

    def make_queue(self, name: str, *, max_vcpus: int = 4096, state: str = "ENABLED") -> None:
        """A queue on a compute environment of p4d.24xlarge."""
        ec2, iam, batch = (self.client(service) for service in ("ec2", "iam", "batch"))
        subnet = ec2.describe_subnets()["Subnets"][0]
        group = ec2.describe_security_groups()["SecurityGroups"][0]["GroupId"]
        role = iam.create_role(RoleName=f"role-of-{name}", AssumeRolePolicyDocument="{}")
        profile = iam.create_instance_profile(InstanceProfileName=f"profile-of-{name}")
        batch.create_compute_environment(
            computeEnvironmentName=f"{name}-environment",
            type="MANAGED",
            serviceRole=role["Role"]["Arn"],
            computeResources={
                "type": "EC2",
                "minvCpus": 0,
                "maxvCpus": max_vcpus,
                "instanceTypes": ["p4d.24xlarge"],
                "subnets": [subnet["SubnetId"]],
                "securityGroupIds": [group],
                "instanceRole": profile["InstanceProfile"]["Arn"],
            },
        )
        batch.create_job_queue(
            jobQueueName=name,
            state=state,
            priority=1,
            computeEnvironmentOrder=[{"order": 1, "computeEnvironment": f"{name}-environment"}],
        )

    def make_environment(self, recipe: Recipe) -> None:
        """What `shardyard cluster create kind=batch` makes for a recipe, as far as moto knows it.

        Of its stack the launch template, the environment and the queue, by calls. moto has no
        placement groups, asks for a service role where Batch has one of its own, and for security
        groups where they stand in the launch template.
        """
        self.make_role("arn:aws:iam::123456789012:role/batch", trusted="batch.amazonaws.com")
        given = self._description(recipe)
        place = location_in_spec(given)
        assert place is not None
        made = render_environment(given, "0" * 16, None, place)["Resources"]
        group = self.client("ec2").describe_security_groups()["SecurityGroups"][0]["GroupId"]
        template = made["Template"]["Properties"]
        data = template["LaunchTemplateData"]
        for interface in data.get("NetworkInterfaces", []):
            interface["Groups"] = [group]
        data["UserData"] = base64.b64encode(data["UserData"]["Fn::Base64"].encode()).decode()
        name = template["LaunchTemplateName"]
        self.client("ec2").create_launch_template(LaunchTemplateName=name, LaunchTemplateData=data)
        environment = as_of_calls(made["Environment"]["Properties"])
        environment["serviceRole"] = "arn:aws:iam::123456789012:role/batch"
        resources = environment["computeResources"]
        if "placementGroup" in resources:
            resources["placementGroup"] = "of-the-stack"
        resources |= {
            "securityGroupIds": [group], "instanceRole": "ecsInstanceRole",
            "launchTemplate": {"launchTemplateName": name, "version": "$Default"},
        }  # fmt: skip
        batch, queue = self.client("batch"), as_of_calls(made["Queue"]["Properties"])
        batch.create_compute_environment(**environment)
        order = {"order": 1, "computeEnvironment": environment["computeEnvironmentName"]}
        batch.create_job_queue(**{**queue, "computeEnvironmentOrder": [order]})

    def _description(self, recipe: Recipe) -> ClusterSpec:
        cluster, subnet = recipe.cluster, self.client("ec2").describe_subnets()["Subnets"][0]
        nodes = {
            "instance": cluster.instance, "max": cluster.nodes,
            "capacity": cluster.capacity or "on-demand",
            "stop_s": int(recipe.elastic.drain_timeout_s) + STOP_MARGIN_S,
        }  # fmt: skip
        zone = subnet["AvailabilityZone"]
        vpc = {"id": subnet["VpcId"], "subnets": {zone: subnet["SubnetId"]}}
        return read_cluster_spec(
            ["kind=batch", f"name={recipe.launch.aws_batch.queue}", f"region={REGION}",
             f"zone={zone}", f"nodes={json.dumps(nodes)}", f"vpc={json.dumps(vpc)}"]
        )  # fmt: skip

    def make_role(self, arn: str, *, trusted: str = "ecs-tasks.amazonaws.com") -> None:
        """A role that a service may assume."""
        statement = {"Effect": "Allow", "Action": "sts:AssumeRole"}
        policy = {"Statement": [{**statement, "Principal": {"Service": trusted}}]}
        self.client("iam").create_role(
            RoleName=arn.rpartition("/")[2], AssumeRolePolicyDocument=json.dumps(policy)
        )

    def make_instance_profile(self, name: str) -> None:
        """An instance profile with a role of its own."""
        iam = self.client("iam")
        self.make_role(f"of-{name}", trusted="ec2.amazonaws.com")
        iam.create_instance_profile(InstanceProfileName=name)
        iam.add_role_to_instance_profile(InstanceProfileName=name, RoleName=f"of-{name}")

    def push_manifest(self, repository: str, tag: str) -> None:
        """An image of one layer, as far as ECR knows it."""
        layer = {"mediaType": "application/vnd.docker.image.rootfs.diff.tar.gzip", "size": 1000}
        kind = "application/vnd.docker.distribution.manifest.v2+json"
        manifest = {
            "schemaVersion": 2, "mediaType": kind,
            "config": {"mediaType": "application/vnd.docker.container.image.v1+json", "size": 1,
                       "digest": "sha256:" + 64 * "1"},
            "layers": [{**layer, "digest": "sha256:" + 64 * "2"}],
        }  # fmt: skip
        self.client("ecr").put_image(
            repositoryName=repository, imageManifest=json.dumps(manifest), imageTag=tag
        )

    def definitions(self, name: str) -> list[str]:
        """ARNs of the active revisions of a job definition."""
        answer = self.client("batch").describe_job_definitions(
            jobDefinitionName=name, status="ACTIVE"
        )
        return [definition["jobDefinitionArn"] for definition in answer["jobDefinitions"]]

    def reset(self) -> None:
        """Forget everything; jobs succeed at once."""
        self._post("/moto-api/state-manager/unset-transition", {"model_name": "batch::job"})
        self._post("/moto-api/reset", {})
        self._post("/moto-api/config", {"batch": {"use_docker": False}})

    def _post(self, path: str, body: dict[str, Any]) -> None:
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
            method="POST",
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            answer.read()


def as_of_calls(properties: Any) -> Any:
    """CloudFormation's properties as Batch's calls name them: a small letter first, tags as given.

    minvCpus and maxvCpus differ in nothing else.
    """
    match properties:
        case dict():
            return {
                key[0].lower() + key[1:]: value if key == "Tags" else as_of_calls(value)
                for key, value in properties.items()
            }
        case list():
            return [as_of_calls(one) for one in properties]
        case _:
            return properties


@contextmanager
def batch_server(folder: Path, *, docker: DockerEngine | None = None) -> Iterator[BatchServer]:
    """Start the server, and end it whatever happens.

    Args:
        docker: Where it runs containers; then it is tests/launchers/batch_moto.py.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    environ = {
        "AWS_ENDPOINT_URL": url,
        **CREDENTIALS,
        "AWS_CONFIG_FILE": str(folder / "no-config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(folder / "no-credentials"),
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    multinode = str(Path(__file__).with_name("batch_moto.py"))
    program = ["-m", "moto.server"] if docker is None else [multinode]
    with (folder / "moto.log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, *program, "-H", "127.0.0.1", "-p", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **environ, **(docker.environ if docker else {})},
        )
    try:
        _wait_for(url, server)
        yield BatchServer(url=url, environ=environ)
    finally:
        server.kill()
        server.wait()


def _wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < end:
        if server.poll() is not None:
            raise RuntimeError(f"moto ended with exit code {server.returncode}")
        try:
            with urllib.request.urlopen(url + "/moto-api/data.json", timeout=5):
                return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError("moto did not answer")
