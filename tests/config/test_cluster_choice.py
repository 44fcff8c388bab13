"""A recipe names its machines by an EC2 type or a file; the check says what is wrong with it."""

from pathlib import Path

import pytest

from shardyard.config.auto import ResolveContext
from shardyard.config.cluster_choice import chosen_cluster
from shardyard.config.load import load_recipe
from shardyard.config.resolve import resolve_partial
from shardyard.config.rules.check import check
from shardyard.config.schema.recipe import Recipe
from shardyard.errors import RecipeError, RequestError

OURS = "{accelerator: Gaudi2, devices_per_node: 8, network_gbps: 2400}"


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    path = tmp_path / "ours.yaml"
    path.write_text(OURS)
    return path


def recipe(*overrides: str) -> Recipe:
    return load_recipe([], ["model.preset=llama-tiny", *overrides])


def test_no_name_is_this_machine() -> None:
    assert chosen_cluster(recipe().cluster) is None


def test_a_file_says_device_and_number(ours: Path) -> None:
    asked = recipe(f"cluster.file={ours}", "cluster.nodes=2")
    cluster = chosen_cluster(asked.cluster)
    assert cluster is not None
    assert (cluster.devices, cluster.between.bytes_per_s) == (16, 37.5e9)
    known = resolve_partial(asked, ResolveContext()).recipe.cluster
    assert (known.device, known.devices) == ("hpu", 8)


def test_fewer_devices_than_a_node_has_leave_the_others_idle() -> None:
    cluster = chosen_cluster(recipe("cluster.instance=p5.48xlarge", "cluster.devices=4").cluster)
    assert cluster is not None
    assert cluster.devices == 4
    assert cluster.between.bytes_per_s == 50e9


def test_more_devices_than_a_node_has_are_refused() -> None:
    asked = recipe("cluster.instance=p5.48xlarge", "cluster.devices=16")
    with pytest.raises(RequestError, match=r"devices=16 but a node of p5\.48xlarge has 8 x H100"):
        chosen_cluster(asked.cluster)
    with pytest.raises(RecipeError, match=r"cluster\.devices=16 but .* Use at most 8, or more clu"):
        check(asked)


def test_cpu_processes_are_a_choice_whatever_the_instance() -> None:
    check(recipe("cluster.instance=p5.48xlarge", "cluster.device=cpu", "cluster.devices=16"))


def test_instance_and_file_contradict_each_other(ours: Path) -> None:
    with pytest.raises(RecipeError, match=r"cluster\.file=.*and cluster\.instance=p5\.48xlarge ea"):
        check(recipe(f"cluster.file={ours}", "cluster.instance=p5.48xlarge"))


def test_a_wrong_file_is_a_problem_of_the_recipe(ours: Path, tmp_path: Path) -> None:
    ours.write_text("{accelerator: Gaudi2, devices_per_node: 0}")
    with pytest.raises(RecipeError) as refused:
        check(recipe(f"cluster.file={ours}", "cluster.nodes=2"))
    assert f"cluster.file={ours}: devices_per_node=0 cannot be." in str(refused.value)
    assert f"cluster.file={ours}: network_gbps: is missing" in str(refused.value)
    with pytest.raises(
        RecipeError, match=r"cluster\.file: cluster file .*none\.yaml cannot be read"
    ):
        check(recipe(f"cluster.file={tmp_path}/none.yaml"))


def test_the_price_is_that_of_how_the_machines_are_rented() -> None:
    def usd(*more: str) -> float | None:
        cluster = chosen_cluster(
            recipe("cluster.instance=p5en.48xlarge", "cluster.nodes=2", *more).cluster
        )
        assert cluster is not None
        return cluster.usd_per_hour

    block = ("cluster.capacity=block:cr-0123456789abcdef0",)
    assert usd() == pytest.approx(2 * 63.296)
    assert usd(*block) == pytest.approx(2 * 54.92)
    assert usd(*block, "cluster.usd_per_node_hour=30") == 60


def test_what_a_node_of_ones_own_costs_can_be_said(ours: Path) -> None:
    cluster = chosen_cluster(
        recipe(f"cluster.file={ours}", "cluster.usd_per_node_hour=12.5", "cluster.nodes=2").cluster
    )
    assert cluster is not None
    assert (cluster.usd_per_hour, cluster.price_source) == (25, "cluster.usd_per_node_hour")


def test_a_price_of_machines_that_nobody_names_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"usd_per_node_hour=5, and neither .*Name them, or"):
        check(recipe("cluster.usd_per_node_hour=5"))
    with pytest.raises(RecipeError, match=r"cluster\.usd_per_node_hour=-1"):
        recipe("cluster.instance=p5.48xlarge", "cluster.usd_per_node_hour=-1")
