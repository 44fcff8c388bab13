"""AWS Batch that keeps its state: moto's, with what moto lacks played after Batch's documents.

moto's CloudFormation knows no tags of queues and no placement groups, so environment and queue of a
stack are made by Batch's own calls. Batch deletes neither while it is enabled: a stack that is
deleted before they are disabled fails the test. And it lies as the real one does, where asked.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from moto.cloudformation.models import cloudformation_backends

from shardyard.cluster.clients import World
from tests.cluster.clients import REGION, client_of
from tests.cluster.stand_in import Killed

ACCOUNT = "123456789012"
_NOT_IN_MOTO = frozenset(
    {"AWS::Batch::ComputeEnvironment", "AWS::Batch::JobQueue", "AWS::EC2::PlacementGroup",
     "AWS::EC2::SecurityGroupEgress", "AWS::EC2::LaunchTemplate"}
)  # fmt: skip


@dataclass
class Account:
    """One AWS account."""

    ran: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Calls that change something."""
    jobs: list[tuple[str, str]] = field(default_factory=list)
    """State and name of each."""
    come_when_closed: list[tuple[str, str]] = field(default_factory=list)
    """Jobs that come between the look and the closing of the queue."""
    invalid: str = ""
    """Why the compute environment is INVALID."""
    lies: set[str] = field(default_factory=set)
    after_delete: dict[str, Callable[[], None]] = field(default_factory=dict)
    """Stack -> what happens behind its deletion."""
    dies_after: int | None = None
    nodes: int = 0
    devices: int = 8
    reservations: list[dict[str, Any]] = field(default_factory=list)

    def client(self, service: str) -> Any:
        return client_of(service)

    def calls(self, name: str) -> list[dict[str, Any]]:
        return [params for call, params in self.ran if call == name]

    def change(self, call: str, params: dict[str, Any]) -> None:
        """What follows from a call beyond what moto does."""
        match call:
            case "update_job_queue" if params["state"] == "DISABLED":
                self.jobs += self.come_when_closed
            case "update_compute_environment" if "computeResources" in params:
                self.nodes = params["computeResources"]["minvCpus"] // 96

    def count(self, call: str, params: dict[str, Any]) -> None:
        """The process may end behind a change."""
        self.ran.append((call, params))
        if call == "delete_stack" and params["StackName"] in self.after_delete:
            self.after_delete[params["StackName"]]()
        if len(self.ran) == self.dies_after:
            raise Killed

    def create(self, params: dict[str, Any]) -> dict[str, Any]:
        """A stack with a queue in it."""
        template = json.loads(params["TemplateBody"])
        resources = template["Resources"]
        assert params["Capabilities"] == ["CAPABILITY_IAM"]
        template["Resources"] = {
            name: one for name, one in resources.items() if one["Type"] not in _NOT_IN_MOTO
        }
        formation = self.client("cloudformation")
        answer = formation.create_stack(**{**params, "TemplateBody": json.dumps(template)})
        for side in ("", "Side"):
            environment, queue = (
                resources[f"{side}{name}"]["Properties"] for name in ("Environment", "Queue")
            )
            self._make(environment, queue)
        self.nodes = resources["Environment"]["Properties"]["ComputeResources"]["MinvCpus"] // 96
        return dict(answer)

    def _make(self, environment: dict[str, Any], queue: dict[str, Any]) -> None:
        batch, given = self.client("batch"), environment["ComputeResources"]
        vpc = self.client("ec2").describe_subnets(SubnetIds=given["Subnets"])["Subnets"][0]["VpcId"]
        profiles = self.client("iam").list_instance_profiles()["InstanceProfiles"]
        batch.create_compute_environment(
            computeEnvironmentName=environment["ComputeEnvironmentName"],
            type=environment["Type"],
            state=environment["State"],
            serviceRole=self._service_role(),
            computeResources={
                "type": given["Type"], "minvCpus": 0, "maxvCpus": given["MaxvCpus"],
                "instanceTypes": given["InstanceTypes"], "subnets": given["Subnets"],
                "instanceRole": profiles[0]["Arn"], "securityGroupIds": [self._group(vpc)],
            },
            tags=environment["Tags"],
        )  # fmt: skip
        batch.create_job_queue(
            jobQueueName=queue["JobQueueName"],
            state=queue["State"],
            priority=queue["Priority"],
            computeEnvironmentOrder=[
                {"order": 1, "computeEnvironment": environment["ComputeEnvironmentName"]}
            ],
            tags=queue["Tags"],
        )

    def _group(self, vpc: str) -> str:
        only = [{"Name": "vpc-id", "Values": [vpc]}]
        groups = self.client("ec2").describe_security_groups(Filters=only)["SecurityGroups"]
        return str(groups[0]["GroupId"])

    def _service_role(self) -> str:
        iam = self.client("iam")
        roles = {role["RoleName"]: role["Arn"] for role in iam.list_roles()["Roles"]}
        if "batch" not in roles:
            iam.create_role(RoleName="batch", AssumeRolePolicyDocument="{}")
        return str(iam.get_role(RoleName="batch")["Role"]["Arn"])

    def delete(self, name: str) -> None:
        """A stack with a queue in it."""
        if "DELETE_FAILED" in self.lies:
            stack = cloudformation_backends[ACCOUNT][REGION].get_stack(name)
            stack.status = "DELETE_FAILED"
            return
        batch = self.client("batch")
        for queue in batch.describe_job_queues()["jobQueues"]:
            assert queue["state"] == "DISABLED", "Batch deletes no queue that is enabled"
            if "queue stays" not in self.lies:
                batch.delete_job_queue(jobQueue=queue["jobQueueName"])
        for one in batch.describe_compute_environments()["computeEnvironments"]:
            assert one["state"] == "DISABLED", "Batch deletes no environment that is enabled"
            batch.delete_compute_environment(computeEnvironment=one["computeEnvironmentName"])
        self.client("cloudformation").delete_stack(StackName=name)

    def delete_network(self, name: str) -> None:
        """A stack with a VPC, whose parts moto's CloudFormation deletes in a wrong order."""
        ec2, formation = self.client("ec2"), self.client("cloudformation")
        listed = formation.list_stack_resources(StackName=name)["StackResourceSummaries"]
        ids = {one["LogicalResourceId"]: one["PhysicalResourceId"] for one in listed}
        ec2.delete_vpc_endpoints(VpcEndpointIds=[ids["S3"]])
        ec2.delete_nat_gateway(NatGatewayId=ids["Nat"])
        only = [{"Name": "vpc-id", "Values": [ids["Vpc"]]}]
        for one in ec2.describe_network_interfaces(Filters=only)["NetworkInterfaces"]:
            ec2.delete_network_interface(NetworkInterfaceId=one["NetworkInterfaceId"])
        for table in ("PublicTable", "PrivateTable"):
            ec2.delete_route_table(RouteTableId=ids[table])
        for subnet in ("PublicSubnet", "PrivateSubnet"):
            ec2.delete_subnet(SubnetId=ids[subnet])
        (address,) = ec2.describe_addresses()["Addresses"]
        ec2.release_address(AllocationId=address["AllocationId"])
        ec2.detach_internet_gateway(InternetGatewayId=ids["Gateway"], VpcId=ids["Vpc"])
        ec2.delete_internet_gateway(InternetGatewayId=ids["Gateway"])
        ec2.delete_vpc(VpcId=ids["Vpc"])
        backend = cloudformation_backends[ACCOUNT][REGION]
        backend.stacks.pop(backend.get_stack(name).stack_id)

    def instances(self) -> dict[str, Any]:
        """What ECS says of those that stand."""
        gpus = {"name": "GPU", "stringSetValue": [f"GPU-{n}" for n in range(self.devices)]}
        return {
            "containerInstances": [
                {"ec2InstanceId": f"i-{n}", "agentConnected": True, "registeredResources": [gpus]}
                for n in range(self.nodes)
            ]
        }


class StandInWorld(World):
    """A world whose AWS is the account's."""

    account: Account

    def client(self, service: str) -> Any:
        return self.account.client(service)

    def pages(self, service: str, call: str, **params: Any) -> Iterator[dict[str, Any]]:
        if call == "list_jobs":
            yield self._look(service, call, params) or {}
        else:
            yield from super().pages(service, call, **params)

    def ask(self, service: str, call: str, **params: Any) -> dict[str, Any] | None:
        account = self.account
        if call.startswith(("describe_", "list_", "get_")):
            return self._look(service, call, params)
        answer: dict[str, Any] | None = None
        match call, str(params.get("StackName", "")).rpartition("-")[2]:
            case "create_stack", "batch":
                answer = account.create(params)
            case "delete_stack", "batch":
                account.delete(params["StackName"])
            case "delete_stack", "network":
                account.delete_network(params["StackName"])
            case _:
                answer = super().ask(service, call, **params)
        account.change(call, params)
        account.count(call, params)
        return answer

    def _look(self, service: str, call: str, params: dict[str, Any]) -> dict[str, Any] | None:
        account = self.account
        match service, call:
            case "batch", "list_jobs":
                names = [
                    name
                    for state, name in account.jobs
                    if state == params["jobStatus"] and params["jobQueue"] == "trainers"
                ]
                return {"jobSummaryList": [{"jobName": name} for name in names]}
            case "ec2", "describe_capacity_reservations":
                return {"CapacityReservations": account.reservations}
            case "ecs", "list_container_instances":
                return {"containerInstanceArns": [f"arn:{n}" for n in range(account.nodes)]}
            case "ecs", "describe_container_instances":
                return account.instances()
        answer = super().ask(service, call, **params)
        if call == "describe_compute_environments" and account.invalid and answer:
            for one in answer["computeEnvironments"]:
                one |= {"status": "INVALID", "statusReason": account.invalid}
        if call == "describe_stacks":
            self._name_access_points(answer)
        return answer

    def _name_access_points(self, answer: dict[str, Any] | None) -> None:
        """moto's stacks say an object of Python in place of an access point's id."""
        for stack in (answer or {}).get("Stacks", []):
            for output in stack.get("Outputs", []):
                if output["OutputKey"] == "AccessPoint":
                    (point,) = self.account.client("efs").describe_access_points()["AccessPoints"]
                    output["OutputValue"] = point["AccessPointId"]

    def run(self, argv: list[str]) -> str:
        raise AssertionError(f"a queue of Batch needs no program: {argv}")


def in_account(world: World, account: Account) -> StandInWorld:
    found = StandInWorld(folder=world.folder, spec=world.spec, owner=world.owner)
    object.__setattr__(found, "account", account)
    return found
