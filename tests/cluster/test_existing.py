"""A cluster that was there before: what it lacks is added, and that alone is removed again."""

import json
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shardyard.cli import main
from shardyard.cluster.clients import World, new_world, world_named
from shardyard.cluster.create import make, node_report, scale
from shardyard.cluster.delete import Removed, remove
from shardyard.cluster.existing import existing_adoption
from shardyard.cluster.part_order import parts_of
from shardyard.cluster.prices import hourly_costs
from shardyard.cluster.spec import AdoptedCluster, ClusterSpec
from shardyard.cluster.spec_file import read_cluster_spec
from shardyard.errors import AccessError, CapacityError, RecipeError, RequestError
from tests.cluster.clients import TOLD, client_of, playing_aws
from tests.cluster.stand_in import Killed, in_account
from tests.cluster.standing import (
    ARN,
    NAME,
    OFFERS,
    REGION,
    ZONE,
    Standing,
    adopted,
    play,
    surveyed,
)

PLACE = (f"name={NAME}", f"region={REGION}", f"zone={ZONE}")
ASKED = (*PLACE, "nodes.instance=p4d.24xlarge", "nodes.count=2", "nodes.max=4")
LUSTRE = (*ASKED, "storage.kind=fsx")
FAST = {"poll_s": 0.0, "limit_s": 0.05}
ALL = (
    "storage driver", "file system", "claim", "GPU device plugin", "accelerators nodes",
    "EFA device plugin",
)  # fmt: skip


@pytest.fixture(autouse=True)
def aws() -> Iterator[None]:
    with playing_aws():
        yield


@pytest.fixture
def account() -> Standing:
    made = Standing(offers=dict(OFFERS))
    made.build()
    made.plugin("their-log-collector", "fluent-bit")
    return made


def described(*settings: str) -> ClusterSpec:
    return read_cluster_spec(settings, is_adopted=True)


def yes(_question: str) -> None:
    return None


def gone(world: World) -> Removed:
    return remove(world, agree=yes, agree_to_lose=yes, **FAST)


def stack_names() -> list[str]:
    return [s["StackName"] for s in client_of("cloudformation").describe_stacks()["Stacks"]]


@pytest.mark.heavy
def test_all_that_is_lacking_is_added_and_that_alone_is_removed(
    tmp_path: Path, account: Standing
) -> None:
    before = account.picture()
    world = adopted(described(*LUSTRE), tmp_path, account)
    assert isinstance(world.spec, AdoptedCluster) and world.spec.adds == ALL
    assert account.picture() == before, "to look changes nothing"
    make(world, **FAST)
    assert [entry.kind for entry in world.ledger.live() if entry.is_confirmed] == list(ALL)
    assert sorted(stack_names()) == [
        f"eksctl-{NAME}-nodegroup-accelerators", f"shardyard-{NAME}-storage",
    ]  # fmt: skip
    daemons = {name for kind, name in account.inside if kind == "daemonset"}
    assert daemons == {
        "their-log-collector", "nvidia-device-plugin-daemonset", "aws-efa-k8s-device-plugin",
    }  # fmt: skip
    assert node_report(world).count("ready") == 2
    removed = gone(world)
    assert removed.is_clean, removed
    assert account.picture() == before
    assert [seen.part.split(" of ")[0] for seen in removed.seen][-1].startswith("storage driver")


@pytest.mark.system
@pytest.mark.parametrize("storage", ["fsx", "efs"])
@pytest.mark.parametrize("step", range(1, 11))
def test_an_adoption_killed_behind_any_step_goes_on_to_the_same_end(
    tmp_path: Path, account: Standing, storage: str, step: int
) -> None:
    asked = described(*ASKED, f"storage.kind={storage}")
    before = account.picture()
    first = adopted(asked, tmp_path, account)
    account.changes, account.dies_after = 0, step
    with suppress(Killed):
        make(first, **FAST)
    account.dies_after = None
    begun = existing_adoption(asked, tmp_path / "clusters")
    assert begun is not None and begun.spec == first.spec and begun.owner == first.owner
    again = in_account(begun, account)
    make(again, **FAST)
    created = [argv for argv in account.ran if argv[:2] == ["eksctl", "create"]]
    assert len(created) == 1, "nothing is made twice"
    assert {entry.kind for entry in again.ledger.live() if entry.is_confirmed} == set(ALL)
    assert gone(again).is_clean
    assert account.picture() == before


@pytest.mark.system
@pytest.mark.parametrize("step", range(1, 9))
def test_a_removal_killed_behind_any_step_leaves_the_cluster_as_it_was(
    tmp_path: Path, account: Standing, step: int
) -> None:
    before = account.picture()
    world = adopted(described(*LUSTRE), tmp_path, account)
    make(world, **FAST)
    account.changes, account.dies_after = 0, step
    with suppress(Killed):
        gone(world)
    account.dies_after = None
    again = in_account(world_named(NAME, tmp_path / "clusters"), account)
    assert gone(again).is_clean
    assert account.picture() == before


@pytest.mark.system
def test_an_adoption_killed_half_way_is_removed_whole(tmp_path: Path, account: Standing) -> None:
    """Behind the group, with which eksctl brings its own EFA plugin, and before ours."""
    before = account.picture()
    world = adopted(described(*ASKED), tmp_path, account)
    account.changes, account.dies_after = 0, 4
    with pytest.raises(Killed):
        make(world, **FAST)
    account.dies_after = None
    assert ("daemonset", "aws-efa-k8s-device-plugin-daemonset") in account.inside
    assert gone(world).is_clean
    assert account.picture() == before


@pytest.mark.system
def test_what_is_there_is_used_and_never_touched(tmp_path: Path, account: Standing) -> None:
    account.plugin("gpus", "nvcr.io/nvidia/k8s-device-plugin:v0.17.4", "gpu-operator")
    account.plugin("aws-efa-k8s-device-plugin-daemonset", "eks/aws-efa-k8s-device-plugin:v0.5.4")
    account.claim("shared", "Bound")
    before = account.picture()
    found = surveyed(described(*LUSTRE), tmp_path, account)
    assert found.cluster.adds == ("accelerators nodes",)
    said = {need.what: need.found for need in found.needs}
    assert said["what offers nvidia.com/gpu"] == "daemon set gpu-operator/gpus"
    assert said["claim default/shared"] == "it is there, Bound"
    world = adopted(described(*LUSTRE), tmp_path, account)
    make(world, **FAST)
    assert gone(world).is_clean
    assert account.picture()["inside"].keys() == before["inside"].keys()


@pytest.mark.parametrize(
    ("most", "offers", "said"),
    [
        (4, OFFERS, ""),
        (2, OFFERS, "group gpus, at most 2"),
        (8, {"nvidia.com/gpu": "8"}, "no node of which is seen to offer 4 EFA interfaces"),
    ],
)
def test_a_group_that_is_there_does_if_it_is_large_enough_and_has_efa(
    tmp_path: Path, account: Standing, most: int, offers: dict[str, str], said: str
) -> None:
    account.group("p4d.24xlarge", most=most)
    account.nodes, account.offers = 1, dict(offers)
    found = surveyed(described(*ASKED), tmp_path, account)
    (nodes,) = [need for need in found.needs if "p4d" in need.what]
    assert said in nodes.found
    assert bool(nodes.adds) == bool(said)


def test_nodes_that_were_there_are_not_scaled_from_here(tmp_path: Path, account: Standing) -> None:
    account.group("p4d.24xlarge", most=4)
    account.nodes = 1
    world = adopted(described(*ASKED), tmp_path, account)
    make(world, **FAST)
    with pytest.raises(RequestError, match=r"existed when it was adopted.*eksctl scale"):
        scale(world, 3, agree=yes, **FAST)


def test_scaling_has_another_number_of_the_added_nodes(tmp_path: Path, account: Standing) -> None:
    world = adopted(described(*ASKED), tmp_path, account)
    make(world, **FAST)
    scale(world, 3, agree=yes, **FAST)
    assert account.nodes == 3
    assert {cost.part for cost in hourly_costs(world.spec, nodes=3)} == {"accelerators nodes"}


def test_the_group_is_rendered_for_a_cluster_that_eksctl_has_no_stack_of(
    tmp_path: Path, account: Standing
) -> None:
    world = adopted(described(*ASKED), tmp_path, account)
    (part,) = [part for part in parts_of(world.spec) if part.kind == "accelerators nodes"]
    text = part.text(world.spec, "OWNER")
    assert "--install-nvidia-plugin=false" in text
    for word in (
        account.vpc,
        account.subnet,
        f"securityGroup: {account.node_group}",
        "version: '1.34'",
    ):
        assert word in text
    assert "availabilityZones" not in text


def test_a_name_that_somebody_has_is_refused_before_anything_is_made(
    tmp_path: Path, account: Standing
) -> None:
    client_of("cloudformation").create_stack(
        StackName=f"eksctl-{NAME}-nodegroup-accelerators",
        TemplateBody=json.dumps({"Resources": {"Topic": {"Type": "AWS::SNS::Topic"}}}),
        Tags=[{"Key": "shardyard-cluster", "Value": NAME}],
    )
    before = account.picture()
    with pytest.raises(AccessError, match="It was not changed"):
        surveyed(described(*LUSTRE), tmp_path, account)
    assert account.picture() == before


def test_a_volume_of_the_name_is_refused(tmp_path: Path, account: Standing) -> None:
    account.inside["persistentvolume", f"shardyard-{NAME}-shared"] = {"metadata": {"labels": {}}}
    with pytest.raises(AccessError, match=r"volume shardyard-theirs-shared .*It was not changed"):
        surveyed(described(*LUSTRE), tmp_path, account)


@pytest.mark.system
def test_a_plugin_that_its_owner_put_in_place_of_ours_stays(
    tmp_path: Path, account: Standing
) -> None:
    world = adopted(described(*ASKED), tmp_path, account)
    make(world, **FAST)
    name = "nvidia-device-plugin-daemonset"
    theirs: dict[str, Any] = {"metadata": {"name": name, "namespace": "kube-system"}}
    account.inside["daemonset", name] = theirs
    removed = gone(world)
    assert not removed.is_clean
    assert any("It was not changed" in problem for problem in removed.problems)
    assert account.inside["daemonset", name] is theirs
    assert not stack_names(), "what is ours is gone"


def pod(name: str, *, node: str = "", claim: str = "", gpus: int = 8) -> dict[str, Any]:
    volumes = [{"persistentVolumeClaim": {"claimName": claim}}] if claim else []
    limits = {"nvidia.com/gpu": str(gpus)} if gpus else {}
    spec = {"containers": [{"resources": {"limits": limits}}], "volumes": volumes}
    return {
        "metadata": {"namespace": "default", "name": name},
        "status": {"phase": "Running"},
        "spec": {**spec, **({"nodeName": node} if node else {})},
    }


@pytest.mark.system
def test_pods_of_others_elsewhere_in_the_cluster_do_not_hold_it(
    tmp_path: Path, account: Standing
) -> None:
    world = adopted(described(*LUSTRE), tmp_path, account)
    make(world, **FAST)
    account.inside["pod", "a"] = pod("a", node="a-node-of-theirs")
    account.inside["pod", "b"] = pod("b", claim="another")
    assert gone(world).is_clean
    assert ("pod", "a") in account.inside


@pytest.mark.parametrize("using", [{"node": "node-0"}, {"claim": "shared", "gpus": 0}])
def test_pods_on_what_was_added_hold_it(
    tmp_path: Path, account: Standing, using: dict[str, Any]
) -> None:
    world = adopted(described(*LUSTRE), tmp_path, account)
    make(world, **FAST)
    before = account.picture()
    account.inside["pod", "bert"] = pod("bert", **using)
    with pytest.raises(RequestError, match=r"default/bert.*All of it was kept"):
        gone(world)
    del account.inside["pod", "bert"]
    assert account.picture() == before


@pytest.mark.system
def test_a_cluster_that_its_owner_removed_meanwhile_keeps_nothing_of_ours(
    tmp_path: Path, account: Standing
) -> None:
    world = adopted(described(*ASKED), tmp_path, account)
    make(world, **FAST)
    client_of("eks").delete_cluster(name=NAME)
    account.inside.clear()
    removed = gone(world)
    assert removed.is_clean, removed
    assert stack_names() == []


def test_a_cluster_of_the_name_in_another_account_is_not_taken_for_it(
    tmp_path: Path, account: Standing
) -> None:
    world = adopted(described(*ASKED), tmp_path, account)
    make(world, **FAST)
    told = TOLD["eks", "DescribeCluster"]

    def elsewhere(params: dict[str, Any]) -> dict[str, Any] | None:
        answer = told(params)
        if answer is not None:
            answer["cluster"]["arn"] = ARN.replace("123456789012", "999999999999")
        return answer

    TOLD["eks", "DescribeCluster"] = elsewhere
    with pytest.raises(
        AccessError, match=r"account 999999999999.*Use credentials of account 1234567"
    ):
        gone(world)


def test_a_claim_that_nothing_can_mount_is_refused(tmp_path: Path, account: Standing) -> None:
    account.claim("shared", "Pending")
    with pytest.raises(RequestError, match=r"exists and is Pending.*storage\.claim"):
        surveyed(described(*LUSTRE), tmp_path, account)


def recipe_in(folder: Path, text: str) -> str:
    path = folder / "train.yaml"
    path.write_text(text)
    return str(path)


RECIPE = f"""
cluster: {{nodes: 4, instance: p4d.24xlarge}}
launch:
  kubernetes: {{context: "{ARN}"}}
  volumes: [{{path: /shared, claim: text}}]
"""


def test_the_recipe_alone_says_cluster_nodes_and_claims(tmp_path: Path, account: Standing) -> None:
    recipe = recipe_in(tmp_path, RECIPE)
    asked = described(recipe, f"zone={ZONE}")
    assert (asked.name, asked.region, asked.nodes.max) == (NAME, REGION, 4)
    with pytest.raises(RequestError, match=r"mounts claim default/text .*storage\.claim=text"):
        surveyed(asked, tmp_path, account)
    whole = described(recipe, f"zone={ZONE}", "storage={kind: efs, claim: text}")
    assert "file system" in surveyed(whole, tmp_path, account).cluster.adds
    account.claim("text", "Bound")
    assert "file system" not in surveyed(asked, tmp_path, account).cluster.adds


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("other_zone=us-east-1b", "other_zone: is read off the cluster"),
        ("system.nodes=3", "system: is read off the cluster"),
        ('version="1.33"', "version: is read off the cluster"),
        ("kind=batch", "only an EKS cluster is adopted"),
    ],
)
def test_settings_of_a_cluster_that_is_made_are_refused(setting: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        described(*ASKED, setting)


def test_a_cluster_that_is_not_there_is_told(tmp_path: Path, account: Standing) -> None:
    with pytest.raises(RequestError, match=r"no EKS cluster others .*eks list-clusters"):
        surveyed(described(*ASKED, "name=others"), tmp_path, account)


def test_a_cluster_that_is_not_ready_is_told(tmp_path: Path, account: Standing) -> None:
    told = TOLD["eks", "DescribeCluster"]

    def failing(params: dict[str, Any]) -> dict[str, Any] | None:
        answer = told(params)
        if answer is not None:
            answer["cluster"]["status"] = "FAILED"
        return answer

    TOLD["eks", "DescribeCluster"] = failing
    with pytest.raises(CapacityError, match=r"theirs is FAILED.*once it is ACTIVE"):
        surveyed(described(*ASKED), tmp_path, account)


def test_a_zone_without_a_private_subnet_is_told(tmp_path: Path, account: Standing) -> None:
    with pytest.raises(RequestError, match=r"no private subnet in us-east-1c.*name the subnet"):
        surveyed(described(*ASKED, "zone=us-east-1c"), tmp_path, account)


def test_the_subnet_may_be_named(tmp_path: Path, account: Standing) -> None:
    ec2 = client_of("ec2")
    made = ec2.create_subnet(VpcId=account.vpc, CidrBlock="10.8.9.0/28", AvailabilityZone=ZONE)
    name = made["Subnet"]["SubnetId"]
    given = surveyed(described(*ASKED), tmp_path, account).cluster
    assert given.vpc.subnets == {ZONE: account.subnet}
    asked = described(*ASKED, f"vpc.subnets={{{ZONE}: {name}}}")
    assert surveyed(asked, tmp_path, account).cluster.vpc.subnets == {ZONE: name}


def test_what_a_vendor_installs_is_named_and_not_added(tmp_path: Path, account: Standing) -> None:
    dl1 = (*PLACE, "nodes={instance: dl1.24xlarge, max: 2, ami: ami-0123456789abcdef0}")
    found = surveyed(described(*dl1), tmp_path, account)
    (gaudi,) = [need for need in found.needs if "gaudi" in need.what]
    assert (gaudi.adds, gaudi.found) == ((), "")
    assert gaudi.by_hand == "install the Gaudi device plugin as its vendor says"


def test_a_cluster_that_was_made_from_here_is_not_adopted(tmp_path: Path) -> None:
    mine = read_cluster_spec([*ASKED, "other_zone=us-east-1b"])
    new_world(mine, tmp_path)
    with pytest.raises(RequestError, match=r"was made from here.*shardyard cluster create"):
        existing_adoption(described(*ASKED), tmp_path)


def test_a_cluster_made_by_this_program_elsewhere_is_not_adopted(
    tmp_path: Path, account: Standing
) -> None:
    arn = client_of("eks").describe_cluster(name=NAME)["cluster"]["arn"]
    client_of("eks").tag_resource(resourceArn=arn, tags={"shardyard-cluster-id": "00" * 8})
    with pytest.raises(AccessError, match=r"made by `shardyard cluster create`.*Work in the folde"):
        surveyed(described(*ASKED), tmp_path, account)


@pytest.mark.system
def test_an_adoption_by_another_description_is_refused(tmp_path: Path, account: Standing) -> None:
    world = adopted(described(*ASKED), tmp_path, account)
    make(world, **FAST)
    with pytest.raises(RequestError, match=r"adopted by another description.*the cluster stays"):
        existing_adoption(described(*LUSTRE), tmp_path / "clusters")
    assert gone(world).is_clean
    assert existing_adoption(described(*LUSTRE), tmp_path / "clusters") is None


def test_the_command_shows_what_is_there_what_it_would_add_and_its_price(
    tmp_path: Path,
    account: Standing,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    play(monkeypatch, account)
    words = ["cluster", "adopt", *ASKED, "--dir", str(tmp_path)]
    before = account.picture()
    assert main([*words, "--dry-run"]) == 0
    printed = capsys.readouterr()
    told, said = (" ".join(text.split()) for text in (printed.err, printed.out))
    assert "4 x p4d.24xlarge in us-east-1a: there: no; added: accelerators nodes" in told
    assert "eksctl create nodegroup -f accelerators.yaml" in said
    assert main(words) == 2, "there is nobody to ask"
    said = " ".join(capsys.readouterr().out.split())
    assert "2 x p4d.24xlarge, on-demand $43.92 an hour" in said
    assert "EKS control plane" not in said, "it costs without us, too"
    assert account.picture() == before and list(tmp_path.iterdir()) == []


@pytest.mark.system
def test_json_is_one_document_and_the_adoption_is_followed_to_its_end(
    tmp_path: Path,
    account: Standing,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    play(monkeypatch, account)
    place = ["--dir", str(tmp_path)]
    before = account.picture()
    assert main(["cluster", "adopt", *ASKED, *place, "--yes", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["adds"] == ["GPU device plugin", "accelerators nodes", "EFA device plugin"]
    assert main(["cluster", "show", NAME, *place]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "cluster, which was there before there" in said
    monkeypatch.setattr("shardyard.cli.cluster.remove", partial(remove, poll_s=0.0, limit_s=0.05))
    assert main(["cluster", "delete", NAME, *place, "--yes"]) == 0
    assert "is removed; the cluster stays" in capsys.readouterr().out
    assert account.picture() == before


def test_a_cluster_that_lacks_nothing_is_told_so(
    tmp_path: Path,
    account: Standing,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    play(monkeypatch, account)
    account.group("g5.xlarge", most=2)
    account.plugin("gpus", "nvcr.io/nvidia/k8s-device-plugin:v0.17.4")
    asked = [*PLACE, "nodes.instance=g5.xlarge", "nodes.max=2"]
    assert main(["cluster", "adopt", *asked, "--dir", str(tmp_path)]) == 0
    assert "theirs already has all of it" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
