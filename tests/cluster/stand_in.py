"""eksctl, kubectl and helm that keep their state: in moto's AWS, and in a dict for the cluster.

They do what the real programs are documented to do, as far as their caller can tell; and they lie
as real ones do, where a test asks for it.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from shardyard.cluster.clients import World
from tests.cluster.clients import client_of

ROLE = "arn:aws:iam::123456789012:role/eks"


class Killed(BaseException):
    """Stands for the end of our process between two programs."""


@dataclass
class Account:
    """One AWS account with the programs that act in it."""

    region: str = "us-east-1"
    inside: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    """(kind, name) -> object of the cluster."""
    ran: list[list[str]] = field(default_factory=list)
    lies: set[tuple[str, ...]] = field(default_factory=set)
    """First words of commands that say that they are done and do nothing."""
    after: dict[tuple[str, ...], Callable[[], None]] = field(default_factory=dict)
    """First words of commands -> what happens behind them."""
    dies_after: int | None = None
    """Our process ends behind so many commands and calls that change something."""
    changes: int = 0
    nodes: int = 0
    offers: dict[str, str] = field(default_factory=dict)

    def client(self, service: str) -> Any:
        return client_of(service, self.region)

    def run(self, argv: list[str]) -> str:
        words = tuple(word for word in argv if not word.startswith("-"))
        self.ran.append(argv)
        if words[:2] == ("kubectl", "get"):
            return self._get(argv)
        if not any(words[: len(lie)] == lie for lie in self.lies):
            self._change(argv, words)
        for first, happens in self.after.items():
            if words[: len(first)] == first:
                happens()
        self.count()
        return ""

    def count(self) -> None:
        """Our process may end behind a change."""
        self.changes += 1
        if self.changes == self.dies_after:
            raise Killed

    def _change(self, argv: list[str], words: tuple[str, ...]) -> None:
        match words[:3]:
            case ("eksctl", "create", "cluster"):
                self._create_cluster(_file(argv))
            case ("eksctl", "create", "nodegroup"):
                self._create_group(_file(argv), _after(argv, "--include"))
                is_asked = "--install-nvidia-plugin=false" not in argv
                if is_asked and _after(argv, "--include") == "accelerators":
                    self._daemonset("nvidia-device-plugin-daemonset", "nvidia/k8s-device-plugin")
            case ("eksctl", "create", "addon") | ("eksctl", "utils", _):
                pass
            case ("eksctl", "scale", "nodegroup"):
                self.nodes = int(_after(argv, "--nodes"))
            case ("eksctl", "delete", "nodegroup"):
                name = f"eksctl-{_after(argv, '--cluster')}-nodegroup-{_after(argv, '--name')}"
                self.client("cloudformation").delete_stack(StackName=name)
                self.nodes = 0
            case ("eksctl", "delete", "cluster"):
                self._delete_cluster(_after(argv, "--name"))
            case ("kubectl", "apply", _):
                self._apply(argv)
            case ("kubectl", "wait", _):
                pass  # a job is done at once
            case ("kubectl", "delete", _):
                self._kubectl_delete(argv)
            case ("kubectl", "label", kind):
                labels = dict(word.split("=") for word in argv if "=" in word)
                self.inside[kind, argv[3]]["metadata"].setdefault("labels", {}).update(labels)
            case ("helm", "upgrade", name):
                self._daemonset(name, f"eks/{name}")
            case ("helm", "uninstall", name):
                self.inside.pop(("daemonset", name), None)
            case _:
                raise AssertionError(f"no stand-in for {argv}")

    def _create_cluster(self, config: dict[str, Any]) -> None:
        name, tags = config["metadata"]["name"], config["metadata"]["tags"]
        stack = f"eksctl-{name}-cluster"
        self._stack(stack, _network(config), tags)
        outputs = {
            output["OutputKey"]: output["OutputValue"]
            for output in self.client("cloudformation").describe_stacks(StackName=stack)["Stacks"][
                0
            ]["Outputs"]
        }
        self.client("eks").create_cluster(
            name=name,
            roleArn=ROLE,
            tags=tags,
            resourcesVpcConfig={"subnetIds": outputs["SubnetsPrivate"].split(",")},
        )

    def _create_group(self, config: dict[str, Any], group: str) -> None:
        name = config["metadata"]["name"]
        template = {"Resources": {"Topic": {"Type": "AWS::SNS::Topic"}}}
        self._stack(f"eksctl-{name}-nodegroup-{group}", template, config["metadata"]["tags"])
        if group == "accelerators":
            if config.get("managedNodeGroups", [{}])[0].get("efaEnabled"):
                name = "aws-efa-k8s-device-plugin"
                self._daemonset(f"{name}-daemonset", f"eks/{name}:v0.5.4")
            (found,) = config.get("managedNodeGroups", []) + config.get("nodeGroups", [])
            self.nodes = found["desiredCapacity"]

    def _stack(self, name: str, template: dict[str, Any], tags: dict[str, str]) -> None:
        self.client("cloudformation").create_stack(
            StackName=name,
            TemplateBody=json.dumps(template),
            Tags=[{"Key": key, "Value": value} for key, value in tags.items()],
        )

    def _delete_cluster(self, name: str) -> None:
        self.client("eks").delete_cluster(name=name)
        self.client("cloudformation").delete_stack(StackName=f"eksctl-{name}-cluster")
        self.inside.clear()

    def _daemonset(self, name: str, image: str, namespace: str = "kube-system") -> None:
        pod = {"spec": {"containers": [{"image": image}]}}
        metadata = {"name": name, "namespace": namespace}
        before = self.inside.get(("daemonset", name), {}).get("metadata", {})
        self.inside["daemonset", name] = {
            "metadata": {**before, **metadata}, "spec": {"template": pod},
        }  # fmt: skip

    def _apply(self, argv: list[str]) -> None:
        if "-k" in argv:
            self.inside.setdefault(("csidriver", "fsx.csi.aws.com"), {"metadata": {}})
            return
        if _after(argv, "-f").startswith("https://"):
            self._daemonset("nvidia-device-plugin-daemonset", "nvidia/k8s-device-plugin")
            return
        for item in _documents(_after(argv, "-f")):
            key = (item["kind"].lower(), item["metadata"]["name"])
            self.inside[key] = item

    def _kubectl_delete(self, argv: list[str]) -> None:
        if "-k" in argv:
            self.inside.pop(("csidriver", "fsx.csi.aws.com"), None)
            return
        if "-f" not in argv:
            pairs = [word.partition("/") for word in argv[2:] if "/" in word and word[0] != "/"]
            for kind, _, name in pairs or [(argv[2], "", argv[3])]:
                self.inside.pop((kind, name), None)
            return
        if _after(argv, "-f").startswith("https://"):
            self.inside.pop(("daemonset", "nvidia-device-plugin-daemonset"), None)
            return
        for item in _documents(_after(argv, "-f")):
            self.inside.pop((item["kind"].lower(), item["metadata"]["name"]), None)

    def _get(self, argv: list[str]) -> str:
        kind = argv[2]
        if kind == "nodes":
            conditions = [{"type": "Ready", "status": "True"}]
            status = {"conditions": conditions, "allocatable": self.offers}
            items = [
                {"metadata": {"name": f"node-{number}"}, "status": status}
                for number in range(self.nodes)
            ]
            return json.dumps({"items": items})
        if kind == "pods":
            pods = [item for (kind, _), item in self.inside.items() if kind == "pod"]
            return json.dumps({"items": pods})
        if argv[3] == "--all-namespaces":
            of_kind = [item for (one, _), item in self.inside.items() if one == kind]
            return json.dumps({"items": of_kind})
        found = self.inside.get((kind, argv[3]))
        return "" if found is None else json.dumps(found)


class StandInWorld(World):
    """A world whose programs are the account's."""

    account: Account

    def client(self, service: str) -> Any:
        return self.account.client(service)

    def ask(self, service: str, call: str, **params: Any) -> dict[str, Any] | None:
        if call == "create_stack" and "AWS::FSx::FileSystem" in params["TemplateBody"]:
            params |= {"TemplateBody": json.dumps(_LUSTRE)}  # moto has none in CloudFormation
            del params["Parameters"]
        answer = super().ask(service, call, **params)
        if not call.startswith(("describe_", "list_", "get_")):
            self.account.count()
        return answer

    def run(self, argv: list[str]) -> str:
        assert "--kubeconfig" in argv or argv[0] == "eksctl", f"{argv} names no cluster"
        try:
            return self.account.run(argv)
        finally:
            if argv[:3] in (
                ["eksctl", "create", "cluster"],
                ["eksctl", "utils", "write-kubeconfig"],
            ):
                write_kubeconfig(self, self.account)


def write_kubeconfig(world: World, account: Account, server: str = "") -> None:
    """As eksctl does, of the cluster or of another server."""
    if not server:
        cluster = account.client("eks").describe_cluster(name=world.spec.name)["cluster"]
        server = cluster["endpoint"]
    content = {
        "current-context": "me",
        "contexts": [{"name": "me", "context": {"cluster": "it", "user": "me"}}],
        "clusters": [{"name": "it", "cluster": {"server": server}}],
    }
    world.kubeconfig.write_text(json.dumps(content))


def in_account(world: World, account: Account) -> World:
    found = StandInWorld(folder=world.folder, spec=world.spec, owner=world.owner)
    object.__setattr__(found, "account", account)
    return found


_LUSTRE = {
    "Resources": {"Topic": {"Type": "AWS::SNS::Topic"}},
    "Outputs": {"FileSystem": {"Value": "fs-0123"}, "MountName": {"Value": "abcd"}},
}


def _network(config: dict[str, Any]) -> dict[str, Any]:
    """Of the stack of the control plane, in a network of its own or in one that is there."""
    if "vpc" in config:
        vpc, resources = config["vpc"]["id"], {}
        subnets: Any = ",".join(s["id"] for s in config["vpc"]["subnets"]["private"].values())
    else:
        vpc, zones = {"Ref": "VPC"}, config["availabilityZones"]
        resources = _subnets(zones)
        subnets = {"Fn::Join": [",", [{"Ref": f"Subnet{n}"} for n in range(len(zones))]]}
    for name in ("Cluster", "Shared"):
        resources[name] = {
            "Type": "AWS::EC2::SecurityGroup",
            "Properties": {"GroupDescription": name, "VpcId": vpc},
        }
    outputs = {
        "VPC": vpc,
        "SubnetsPrivate": subnets,
        "ClusterSecurityGroupId": {"Fn::GetAtt": ["Cluster", "GroupId"]},
        "SharedNodeSecurityGroup": {"Fn::GetAtt": ["Shared", "GroupId"]},
    }
    return {
        "Resources": resources,
        "Outputs": {key: {"Value": value} for key, value in outputs.items()},
    }


def _subnets(zones: list[str]) -> dict[str, Any]:
    resources: dict[str, Any] = {
        "VPC": {"Type": "AWS::EC2::VPC", "Properties": {"CidrBlock": "10.9.0.0/16"}},
    }
    for number, zone in enumerate(zones):
        resources[f"Subnet{number}"] = {
            "Type": "AWS::EC2::Subnet",
            "Properties": {
                "VpcId": {"Ref": "VPC"},
                "CidrBlock": f"10.9.{number}.0/24",
                "AvailabilityZone": zone,
            },
        }
    return resources


def _after(argv: list[str], option: str) -> str:
    return argv[argv.index(option) + 1]


def _documents(path: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(Path(path).read_text(encoding="utf-8")))


def _file(argv: list[str]) -> dict[str, Any]:
    (config,) = _documents(_after(argv, "-f"))
    return config
