"""A cluster made and removed in moto's AWS: killed anywhere, lied to, beside others' clusters."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from shardyard.cluster.clients import World, new_world, world_named
from shardyard.cluster.create import make, scale
from shardyard.cluster.delete import Removed, check_confirmed_name, remove
from shardyard.cluster.part_order import parts_of
from shardyard.cluster.spec_file import read_cluster_spec
from shardyard.errors import AccessError, CapacityError, RequestError, ShardyardError
from tests.cluster.clients import client_of, playing_aws
from tests.cluster.stand_in import Account, Killed, in_account

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
    return in_account(new_world(read_cluster_spec(DESCRIBED), tmp_path), account)


def yes(_question: str) -> None:
    return None


def gone(world: World, **lies: Any) -> Removed:
    return remove(world, agree=yes, agree_to_lose=yes, **FAST, **lies)


def stacks() -> list[str]:
    listed = client_of("cloudformation").describe_stacks()["Stacks"]
    return sorted(stack["StackName"] for stack in listed)


MADE = [
    "eksctl-trainers-cluster", "eksctl-trainers-nodegroup-accelerators",
    "eksctl-trainers-nodegroup-system", "shardyard-trainers-storage",
]  # fmt: skip


def test_accelerators_are_made_last_and_removed_first(world: World, account: Account) -> None:
    make(world, **FAST)
    assert stacks() == MADE
    words = [" ".join(argv[:3]) for argv in account.ran if argv[1] != "get"]
    assert words[0] == "eksctl create cluster"
    groups = [argv[-1] for argv in account.ran if argv[:3] == ["eksctl", "create", "nodegroup"]]
    assert groups == ["system", "accelerators"]
    assert words[-1].startswith("helm upgrade"), "eksctl puts its plugin there with the group"
    account.ran.clear()
    removed = gone(world)
    assert removed.is_clean, removed
    words = [" ".join(argv[:3]) for argv in account.ran if argv[1] != "get"]
    assert words[0] == "eksctl delete nodegroup" and words[-1] == "eksctl delete cluster"
    assert stacks() == []


def test_each_part_is_seen_to_be_gone(world: World) -> None:
    make(world, **FAST)
    removed = gone(world)
    assert {seen.word for seen in removed.seen} == {"absent"}
    asked = " ".join(seen.asked for seen in removed.seen)
    assert "describe-stacks eksctl-trainers-cluster" in asked
    assert "describe-cluster trainers" in asked
    (plugin,) = (seen for seen in removed.seen if seen.part.startswith("EFA device plugin"))
    assert "describe-cluster trainers" in plugin.asked, "it goes with the control plane"


def test_a_making_that_was_killed_goes_on_to_the_same_end(
    tmp_path: Path, account: Account, world: World
) -> None:
    account.dies_after = 3
    with pytest.raises(Killed):
        make(world, **FAST)
    account.dies_after = None
    again = in_account(world_named("trainers", tmp_path), account)
    assert again.owner == world.owner
    make(again, **FAST)
    assert stacks() == MADE
    assert made_once(account)


def made_once(account: Account) -> bool:
    """What eksctl was told to create; add-ons are looked at again by it."""
    created = [argv for argv in account.ran if argv[:2] == ["eksctl", "create"]]
    kinds = [" ".join(argv[2:3] + argv[-1:]) for argv in created if argv[2] != "addon"]
    return len(kinds) == len(set(kinds))


STEPS_UP, STEPS = 8, 13
"""Commands and calls that change something: until it is made and scaled, and in all its life."""


@pytest.mark.system
@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_a_life_that_is_killed_behind_any_step_ends_beside_others_as_if_it_was_not(
    tmp_path: Path, account: Account, world: World, step: int
) -> None:
    """Of two users; one has two clusters of one name, in two regions."""
    west = ("region=us-west-2", "zone=us-west-2a", "other_zone=us-west-2b")
    there = Account(region="us-west-2", offers=dict(OFFERS))
    second = Account(offers=dict(OFFERS))
    others = [
        in_account(new_world(read_cluster_spec([*DESCRIBED, *west]), tmp_path), there),
        in_account(
            new_world(read_cluster_spec([*DESCRIBED, "name=berts"]), tmp_path / "b"), second
        ),
    ]
    for other in others:
        make(other, **FAST)
    account.dies_after = step
    acts: tuple[Callable[..., None], ...] = (make, scale_to_3, remove_all)
    for act in acts:
        for _ in range(2):
            with suppress(Killed):
                act(in_account(world_named("trainers.us-east-1", tmp_path), account), **FAST)
                break
    assert world_named("trainers.us-east-1", tmp_path).owner == world.owner
    assert account.changes >= STEPS, "it was killed and went on, and left nothing out"
    assert made_once(account)
    assert gone(in_account(world_named("trainers.us-east-1", tmp_path), account)).is_clean
    assert stacks() == [name.replace("trainers", "berts") for name in MADE]
    for other in others:
        parts = parts_of(other.spec)
        assert {part.state(other).word for part in parts} == {"there"}
        assert gone(other).is_clean
    assert stacks() == []


def scale_to_3(world: World, **fast: float) -> None:
    scale(world, 3, agree=yes, **fast)


def remove_all(world: World, **fast: float) -> None:
    assert remove(world, agree=yes, agree_to_lose=yes, **fast).is_clean


@pytest.mark.system
def test_a_life_has_so_many_steps(account: Account, world: World) -> None:
    make(world, **FAST)
    scale(world, 3, agree=yes, **FAST)
    assert account.changes == STEPS_UP
    assert gone(world).is_clean
    assert account.changes == STEPS


def test_a_removal_that_was_killed_goes_on_to_the_same_end(
    tmp_path: Path, account: Account, world: World
) -> None:
    make(world, **FAST)
    account.dies_after = account.changes + 3
    with pytest.raises(Killed):
        gone(world)
    account.dies_after = None
    assert gone(in_account(world_named("trainers", tmp_path), account)).is_clean
    assert stacks() == []


def test_a_deletion_that_says_done_and_is_not_is_named(world: World, account: Account) -> None:
    make(world, **FAST)
    account.lies.add(("eksctl", "delete", "nodegroup"))
    removed = gone(world)
    assert not removed.is_clean
    assert any("accelerators" in problem for problem in removed.problems)
    assert "eksctl-trainers-cluster" in stacks(), "what stands under it is not touched"


def test_what_others_left_of_the_cluster_is_named_and_the_removal_is_not_clean(
    world: World,
) -> None:
    """Other kinds are in the table of lies."""
    make(world, **FAST)
    client_of("ec2").create_launch_template(
        LaunchTemplateName="eksctl-trainers-nodegroup-x", LaunchTemplateData={"ImageId": "ami-1"}
    )
    removed = gone(world)
    assert not removed.is_clean
    assert "launch template" in {left.kind for left in removed.left}
    assert stacks() == []


def test_a_cluster_of_the_name_that_somebody_else_made_is_never_touched(
    tmp_path: Path, account: Account, world: World
) -> None:
    make(world, **FAST)
    other = in_account(new_world(read_cluster_spec(DESCRIBED), tmp_path / "other"), account)
    with pytest.raises(AccessError, match=r"was not made from .*It was not changed"):
        make(other, **FAST)
    with pytest.raises(AccessError, match="It was not changed"):
        gone(other)
    assert stacks() == MADE


@pytest.mark.system
def test_clusters_of_one_name_in_two_regions_do_not_meet(tmp_path: Path, world: World) -> None:
    make(world, **FAST)
    west = (*DESCRIBED, "region=us-west-2", "zone=us-west-2a", "other_zone=us-west-2b")
    there = Account(region="us-west-2", offers=dict(OFFERS))
    other = in_account(new_world(read_cluster_spec(west), tmp_path), there)
    make(other, **FAST)
    with pytest.raises(RequestError, match=r"trainers\.us-east-1, trainers\.us-west-2"):
        world_named("trainers", tmp_path)
    assert gone(other).is_clean
    assert stacks() == MADE
    assert world_named("trainers.us-east-1", tmp_path).spec == world.spec


def test_nothing_is_removed_while_pods_use_the_accelerators(world: World, account: Account) -> None:
    make(world, **FAST)
    account.inside["pod", "bert-0"] = {
        "metadata": {"namespace": "team", "name": "bert-0"},
        "status": {"phase": "Running"},
        "spec": {"containers": [{"resources": {"limits": {"nvidia.com/gpu": "8"}}}]},
    }
    with pytest.raises(
        RequestError, match=r"1 pods use its accelerators .team/bert-0.*All of it was kept"
    ):
        gone(world)
    assert stacks() == MADE


def test_data_is_removed_by_its_name_alone(world: World) -> None:
    make(world, **FAST)
    with pytest.raises(RequestError, match=r"holds data.*--delete-data shardyard-trainers-storage"):
        remove(world, agree=yes, agree_to_lose=lambda n: check_confirmed_name(n, "yes"), **FAST)
    assert stacks() == MADE
    remove(world, agree=yes, agree_to_lose=lambda n: check_confirmed_name(n, n), **FAST)
    assert stacks() == []


def test_nodes_that_lack_devices_are_not_ready(world: World, account: Account) -> None:
    account.offers["vpc.amazonaws.com/efa"] = "1"
    with pytest.raises(CapacityError, match=r"1 of 4 vpc.amazonaws.com/efa.*device plugins"):
        make(world, **FAST)


def test_scaling_waits_for_nodes_and_refuses_more_than_the_group_takes(
    world: World, account: Account
) -> None:
    make(world, **FAST)
    scale(world, 5, agree=yes, **FAST)
    assert account.nodes == 5
    with pytest.raises(RequestError, match=r"takes 0 to 64 accelerator nodes .*not 65"):
        scale(world, 65, agree=yes, **FAST)


def test_another_description_under_the_same_name_is_refused(tmp_path: Path, world: World) -> None:
    other = read_cluster_spec([*DESCRIBED, "system.nodes=3"])
    make(world, **FAST)
    with pytest.raises(RequestError, match=r"belongs to a cluster with another description.*scale"):
        new_world(other, tmp_path)
    assert world_named("trainers", tmp_path).spec.system.nodes == 2
    assert gone(world).is_clean
    assert new_world(other, tmp_path).owner == world.owner, "nothing of it is there any more"
    assert world_named("trainers", tmp_path).spec.system.nodes == 3


def test_a_description_that_was_changed_by_hand_is_refused(tmp_path: Path, world: World) -> None:
    path = world.folder / "cluster.json"
    path.write_text(path.read_text().replace('"name": "trainers"', '"name": "others"'))
    with pytest.raises(RequestError, match="not a description of a cluster: it describes others"):
        world_named("trainers", tmp_path)


def test_programs_are_told_where_they_failed(tmp_path: Path) -> None:
    plain = new_world(read_cluster_spec(DESCRIBED), tmp_path / "plain")
    with pytest.raises(RequestError, match="no-such-program is not installed here"):
        plain.run(["no-such-program"])


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("said", "error"),
    [
        ("AccessDenied: not yours", AccessError),
        ("InsufficientInstanceCapacity", CapacityError),
        ("something else", ShardyardError),
    ],
)
def test_a_failed_program_says_what_to_do(
    tmp_path: Path, said: str, error: type[ShardyardError]
) -> None:
    plain = new_world(read_cluster_spec(DESCRIBED), tmp_path)
    with pytest.raises(error, match=said) as caught:
        plain.run(["sh", "-c", f"echo {said!r} >&2; exit 1"])
    assert type(caught.value) is error
    assert said in plain.log.read_text()


def test_a_cluster_that_was_not_made_from_here_is_told(tmp_path: Path, world: World) -> None:
    with pytest.raises(RequestError, match=r"no cluster bert was made .*There are trainers\."):
        world_named("bert", world.folder.parent)
    with pytest.raises(RequestError, match=r"None exists\. Give another folder with --dir"):
        world_named("bert", tmp_path / "elsewhere")
