"""kubectl and helm speak to the very cluster, previews say what is done, names are told apart."""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardyard.cli import main
from shardyard.cluster.clients import World, in_cluster, kubectl_json, new_world, world_named
from shardyard.cluster.create import make
from shardyard.cluster.delete import Removed, preview_removal, remove
from shardyard.cluster.spec_file import read_cluster_spec
from shardyard.errors import AccessError, RequestError, ShardyardError
from shardyard.launchers.ledger import Ledger
from tests.cluster.clients import client_of, playing_aws
from tests.cluster.stand_in import Account, in_account, write_kubeconfig
from tests.cluster.standing import play

DESCRIBED = (
    "name=trainers", "region=us-east-1", "zone=us-east-1a", "other_zone=us-east-1b",
    "nodes.instance=p4d.24xlarge", "nodes.count=2", "storage.kind=efs",
)  # fmt: skip
OFFERS = {"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "4"}
FAST = {"poll_s": 0.0, "limit_s": 0.05}


@pytest.fixture(autouse=True)
def aws() -> Iterator[None]:
    with playing_aws():
        yield


@pytest.fixture
def account() -> Account:
    return Account(offers=dict(OFFERS))


@pytest.fixture
def world(tmp_path: Path, account: Account) -> World:
    made = in_account(new_world(read_cluster_spec(DESCRIBED), tmp_path), account)
    make(made, **FAST)
    account.ran.clear()
    return made


def yes(_question: str) -> None:
    return None


def gone(world: World) -> Removed:
    return remove(world, agree=yes, agree_to_lose=yes, **FAST)


def stacks() -> list[str]:
    listed = client_of("cloudformation").describe_stacks()["Stacks"]
    return sorted(stack["StackName"] for stack in listed)


def training(name: str = "bert-0") -> dict[str, Any]:
    return {
        "metadata": {"namespace": "team", "name": name},
        "status": {"phase": "Running"},
        "spec": {"containers": [{"resources": {"limits": {"nvidia.com/gpu": "8"}}}]},
    }


@pytest.mark.parametrize("text", ["", "{}", "- 1", "current-context: [", "{contexts: [{}]}"])
def test_a_kubeconfig_of_no_cluster_is_refused(world: World, account: Account, text: str) -> None:
    world.kubeconfig.write_text(text)
    with pytest.raises(RequestError, match="names no cluster, but trainers of account 123456"):
        kubectl_json(world, "nodes")
    assert account.ran == []


def test_a_kubeconfig_of_another_cluster_is_refused(world: World, account: Account) -> None:
    before = stacks()
    write_kubeconfig(world, account, "https://B0.gr7.us-east-1.eks.amazonaws.com")
    with pytest.raises(RequestError, match=r"names https://B0\..*Move the file away and run"):
        gone(world)
    assert account.ran == [] and stacks() == before


@pytest.mark.parametrize("what", ["lost", "stack"])
def test_running_pods_are_seen_whatever_else_is_wrong(
    world: World, account: Account, what: str
) -> None:
    """A lost kubeconfig, or a stack that is gone while the cluster runs, hides nobody's run."""
    account.inside["pod", "bert-0"] = training()
    if what == "lost":
        world.kubeconfig.unlink()
    else:
        client_of("cloudformation").delete_stack(StackName="eksctl-trainers-cluster")
    with pytest.raises(
        RequestError, match=r"1 pods use its accelerators .team/bert-0.*All of it was kept"
    ):
        gone(world)
    assert world.kubeconfig.exists()


@pytest.mark.heavy
def test_helm_is_told_of_no_other_cluster_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HELM_KUBEAPISERVER", "https://other")
    monkeypatch.setenv("HELM_KUBECONTEXT", "other")
    plain = new_world(read_cluster_spec(DESCRIBED), tmp_path)
    said = plain.run(["env"])
    assert "HELM_KUBE" not in said and f"KUBECONFIG={plain.kubeconfig}" in said


def test_credentials_of_another_account_do_not_make_a_cluster_gone(world: World) -> None:
    text = world.ledger.path.read_text()
    assert "123456789012" in text
    world.ledger.path.write_text(text.replace("123456789012", "999999999999"))
    before = stacks()
    other = in_account(world, world.account)  # type: ignore[attr-defined]
    for act in (gone, lambda one: make(one, **FAST)):
        with pytest.raises(AccessError, match=r"was made in account 999999999999.*AWS_PROFILE"):
            act(other)
    assert stacks() == before and Ledger(world.ledger.path).live()


def test_nothing_is_run_inside_a_cluster_that_is_not_there(
    tmp_path: Path, account: Account
) -> None:
    unmade = in_account(new_world(read_cluster_spec(DESCRIBED), tmp_path), account)
    assert kubectl_json(unmade, "nodes") is None
    with pytest.raises(ShardyardError, match=r"EKS finds no active cluster trainers in us-east-1"):
        in_cluster(unmade, ("kubectl", "apply", "-f", "x"))
    assert account.ran == []


def files_of(world: World) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in world.folder.iterdir()}


def changes_of(account: Account) -> list[str]:
    return [shlex.join(argv) for argv in account.ran if argv[:2] != ["kubectl", "get"]]


@pytest.mark.heavy
def test_the_dry_run_of_delete_is_what_delete_then_does(
    world: World,
    account: Account,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before, files = stacks(), files_of(world)
    preview = preview_removal(world)
    play(monkeypatch, account)
    words = ["cluster", "delete", "trainers", "--dir", str(world.folder.parent), "--dry-run"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert (stacks(), files_of(world), changes_of(account)) == (before, files, [])
    commands = [line for step in preview.steps for line in step.commands]
    assert [line for line in said.splitlines() if not line.startswith("#")] == commands
    assert [line for step in content["steps"] for line in step["commands"]] == commands
    assert "needs --delete-data shardyard-trainers-storage" in said
    assert "ends $44.75 an hour and what is not known" in said
    assert gone(world).is_clean
    programs = [line for line in commands if not line.startswith("aws ")]
    assert changes_of(account) == programs
    assert [line for line in commands if line.startswith("aws ")] == [
        "aws cloudformation delete-stack --region us-east-1 --stack-name shardyard-trainers-storage"
    ]


def test_the_dry_run_of_delete_says_why_it_would_be_refused(world: World, account: Account) -> None:
    account.inside["pod", "bert-0"] = training()
    assert "team/bert-0" in preview_removal(world).refused


def test_the_dry_run_of_scale_says_the_command_and_the_price(
    world: World,
    account: Account,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = files_of(world)
    play(monkeypatch, account)
    words = ["cluster", "scale", "trainers", "5", "--dir", str(world.folder.parent)]
    assert main([*words, "--dry-run"]) == 0
    said = capsys.readouterr().out
    command = "eksctl scale nodegroup --cluster trainers --region us-east-1 --name accelerators"
    assert said.startswith(f"{command} --nodes 5\n2 nodes become 5, $+65.87 an hour")
    assert main([*words, "--dry-run", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["commands"] == [f"{command} --nodes 5"]
    assert content["usd_per_hour_more"] == pytest.approx(3 * 21.957642)
    assert account.nodes == 2 and files_of(world) == files and changes_of(account) == []
    assert main(["cluster", "scale", "trainers", "65", *words[4:], "--dry-run"]) == 2


def test_fewer_nodes_are_said_to_end_the_pods_on_them(
    world: World,
    account: Account,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    account.inside["pod", "bert-0"] = training()
    play(monkeypatch, account)
    words = ["--dir", str(world.folder.parent), "--dry-run"]
    for nodes, is_said in (("1", True), ("3", False)):
        assert main(["cluster", "scale", "trainers", nodes, *words]) == 0
        said = capsys.readouterr().err
        assert ("team/bert-0); those on nodes that go are ended" in said) is is_said


def test_the_json_of_create_is_one_document(
    tmp_path: Path,
    account: Account,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    play(monkeypatch, account)
    words = ["cluster", "create", *DESCRIBED, "--dir", str(tmp_path), "--yes", "--json"]
    assert main(words) == 0
    said = capsys.readouterr()
    content = json.loads(said.out)
    assert content["name"] == "trainers"
    assert content["predicted"]["usd"] > 0
    assert "in 24 h: $" in said.err, "whoever is asked has seen the price"


@pytest.mark.system
def test_clusters_whose_names_begin_alike_are_told_apart(
    tmp_path: Path, world: World, account: Account
) -> None:
    """trainers and trainers-b, made by two people in one account and region."""
    beside = Account(offers=dict(OFFERS))
    longer = read_cluster_spec([*DESCRIBED, "name=trainers-b"])
    other = in_account(new_world(longer, tmp_path), beside)
    make(other, **FAST)
    named = [{"Key": "alpha.eksctl.io/cluster-name", "Value": "trainers-b"}]
    client_of("iam").create_role(
        RoleName="eksctl-trainers-b-cluster-ServiceRole-1", AssumeRolePolicyDocument="{}",
        Tags=named,
    )  # fmt: skip
    client_of("ec2").create_launch_template(
        LaunchTemplateName="eksctl-trainers-b-nodegroup-accelerators",
        LaunchTemplateData={"ImageId": "ami-1"},
        TagSpecifications=[{"ResourceType": "launch-template", "Tags": named}],
    )
    removed = gone(world)
    assert removed.is_clean, removed
    assert stacks() == [
        "eksctl-trainers-b-cluster", "eksctl-trainers-b-nodegroup-accelerators",
        "eksctl-trainers-b-nodegroup-system", "shardyard-trainers-b-storage",
    ]  # fmt: skip
    assert world_named("trainers", tmp_path).spec.name == "trainers"
    assert world_named("trainers-b", tmp_path).owner == other.owner
    assert other.ledger.live() and not world.ledger.live()
    assert account.nodes == 0 and beside.nodes == 2
