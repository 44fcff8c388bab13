"""An EKS cluster that somebody else made and uses: in moto's AWS, with stand-ins of the programs.

moto's EKS tells neither VPC nor security group of a cluster and knows no add-ons, so these are told
here as EKS's API documents them.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from shardyard.cluster.clients import World, new_world
from shardyard.cluster.existing import Survey, survey
from shardyard.cluster.spec import ClusterSpec
from tests.cluster.clients import TOLD, client_of, real
from tests.cluster.stand_in import ROLE, Account, Killed, StandInWorld, in_account

NAME, REGION, ZONE = "theirs", "us-east-1", "us-east-1a"
ARN = f"arn:aws:eks:{REGION}:123456789012:cluster/{NAME}"
OFFERS = {"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "4"}


@dataclass
class Standing(Account):
    """An account with such a cluster, and what its owner has put into it."""

    addons: dict[str, dict[str, Any]] = field(default_factory=dict)
    vpc: str = ""
    subnet: str = ""
    node_group: str = ""
    """Security group that EKS made."""

    def build(self) -> None:
        """Make the network and the cluster."""
        ec2 = client_of("ec2")
        self.vpc = ec2.create_vpc(CidrBlock="10.8.0.0/16")["Vpc"]["VpcId"]
        subnets = [
            ec2.create_subnet(VpcId=self.vpc, CidrBlock=f"10.8.{n}.0/24", AvailabilityZone=zone)
            for n, zone in enumerate((ZONE, "us-east-1b"))
        ]
        self.subnet, other = (made["Subnet"]["SubnetId"] for made in subnets)
        self.node_group = ec2.create_security_group(
            VpcId=self.vpc, GroupName=f"eks-cluster-sg-{NAME}-1", Description="of EKS"
        )["GroupId"]
        client_of("eks").create_cluster(
            name=NAME, roleArn=ROLE, version="1.34",
            resourcesVpcConfig={"subnetIds": [self.subnet, other]},
        )  # fmt: skip
        TOLD["eks", "DescribeCluster"] = self._cluster
        TOLD["eks", "DescribeAddon"] = self._addon
        TOLD["eks", "CreateAddon"] = self._add
        TOLD["eks", "DeleteAddon"] = self._take_away

    def _cluster(self, params: dict[str, Any]) -> dict[str, Any] | None:
        if params["name"] != NAME or NAME not in client_of("eks").list_clusters()["clusters"]:
            return None
        answer = real("eks", "DescribeCluster", params)
        network = {"vpcId": self.vpc, "clusterSecurityGroupId": self.node_group}
        answer["cluster"]["resourcesVpcConfig"] |= network
        return answer

    def _addon(self, params: dict[str, Any]) -> dict[str, Any]:
        found = self.addons.get(params["addonName"])
        return {"addon": found} if found else {"Error": {"Code": "ResourceNotFoundException"}}

    def _add(self, params: dict[str, Any]) -> dict[str, Any]:
        name = params["addonName"]
        assert name not in self.addons, "nothing is made twice"
        self.addons[name] = {"addonName": name, "status": "ACTIVE", "tags": params["tags"]}
        self.inside["csidriver", "efs.csi.aws.com"] = {"metadata": {}}
        self.count()
        return {"addon": self.addons[name]}

    def _take_away(self, params: dict[str, Any]) -> dict[str, Any]:
        del self.addons[params["addonName"]]
        del self.inside["csidriver", "efs.csi.aws.com"]
        self.count()
        return {}

    def count(self) -> None:
        """A change; the process may end behind it."""
        self.changes += 1
        if self.changes == self.dies_after:
            raise Killed

    def plugin(self, name: str, image: str, namespace: str = "kube-system") -> None:
        """A device plugin that the owner installed."""
        self._daemonset(name, image, namespace)

    def group(self, instance: str, *, most: int, subnet: str = "") -> None:
        """A managed group of nodes of the owner's."""
        client_of("eks").create_nodegroup(
            clusterName=NAME, nodegroupName="gpus", nodeRole=ROLE, instanceTypes=[instance],
            subnets=[subnet or self.subnet], scalingConfig={"minSize": 0, "maxSize": most},
        )  # fmt: skip

    def claim(self, name: str, phase: str) -> None:
        """A claim of the owner's."""
        self.inside["persistentvolumeclaim", name] = {
            "metadata": {"name": name, "namespace": "default"}, "status": {"phase": phase},
        }  # fmt: skip

    def picture(self) -> dict[str, Any]:
        """All that is there: to be the same before an adoption and after its end."""
        stacks = client_of("cloudformation").describe_stacks()["Stacks"]
        return {
            "inside": {key: dict(value) for key, value in self.inside.items()},
            "addons": dict(self.addons),
            "stacks": sorted(stack["StackName"] for stack in stacks),
            "clusters": client_of("eks").list_clusters()["clusters"],
            "groups": client_of("eks").list_nodegroups(clusterName=NAME)["nodegroups"],
        }


def surveyed(asked: ClusterSpec, folder: Path, account: Account) -> Survey:
    """What is found, looked at from a folder that is thrown away."""
    place = folder / "look"
    place.mkdir(parents=True, exist_ok=True)
    return survey(in_account(World(folder=place, spec=asked, owner=""), account))


def adopted(asked: ClusterSpec, folder: Path, account: Account) -> World:
    """The world of an adoption that is about to be made."""
    found = surveyed(asked, folder, account)
    return in_account(new_world(found.cluster, folder / "clusters"), account)


def play(monkeypatch: pytest.MonkeyPatch, account: Account) -> None:
    """Let the command line itself act in this account."""

    plain = World.ask

    def ask(world: World, service: str, call: str, **params: Any) -> Any:
        if isinstance(world, StandInWorld):
            return plain(world, service, call, **params)
        return in_account(world, account).ask(service, call, **params)

    monkeypatch.setattr(World, "ask", ask)
    monkeypatch.setattr(World, "run", lambda world, argv: in_account(world, account).run(argv))
    monkeypatch.setattr(World, "client", lambda _, service: account.client(service))
