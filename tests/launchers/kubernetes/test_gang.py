"""All pods of a job are placed together, by Kueue or Volcano; where by nobody, that is told."""

import pytest

from shardyard.config.load import load_recipe
from shardyard.config.rules.check import check
from shardyard.errors import RecipeError, RequestError
from shardyard.launchers.kubernetes.launcher import KubernetesLauncher
from shardyard.launchers.kubernetes.objects import render_objects
from tests.launchers.kubernetes.requests import RUN_ID, request_for
from tests.launchers.kubernetes.schemas import check_object, pod_of
from tests.launchers.kubernetes.test_launcher import World, world

__all__ = ["world"]

VOLCANO = "launch.kubernetes.scheduler=volcano"


@pytest.mark.parametrize(
    ("overrides", "is_told"),
    [
        ((), True),
        (("cluster.nodes=1",), False),
        (("launch.kubernetes.queue=team",), False),
        ((VOLCANO,), False),
    ],
)
def test_without_gang_scheduling_a_launch_of_several_nodes_warns(
    overrides: tuple[str, ...], is_told: bool
) -> None:
    warnings = " ".join(KubernetesLauncher().render(request_for(*overrides)).warnings)
    assert ("the 2 pods are placed one by one" in warnings) is is_told


@pytest.mark.parametrize("target", ["jobset", "pytorchjob"])
def test_volcano_gets_a_group_of_all_pods_and_pods_that_name_it(target: str) -> None:
    words = (VOLCANO, f"launch.kubernetes.target={target}", "launch.kubernetes.queue=team")
    _, _, group, job = objects = render_objects(request_for(*words, "cluster.nodes=3"))
    assert group["kind"] == "PodGroup" and group["metadata"]["name"] == RUN_ID
    assert group["spec"] == {"minMember": 3, "queue": "team"}
    template = pod_of(objects)
    assert template["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == RUN_ID
    assert template["spec"]["schedulerName"] == "volcano"
    assert "kueue.x-k8s.io/queue-name" not in job["metadata"]["labels"]
    check_object(job)


def test_a_job_that_may_shrink_starts_with_as_few_as_it_may_have() -> None:
    words = ("launch.kubernetes.target=pytorchjob", "elastic.min_nodes=1", "elastic.max_nodes=4")
    _, _, group, _ = render_objects(request_for(VOLCANO, *words))
    assert group["spec"] == {"minMember": 1}


@pytest.mark.parametrize(
    ("words", "setting"),
    [
        (
            ("launch.kubernetes.target=trainjob",),
            "launch.kubernetes.scheduler=volcano is not built",
        ),
        (
            ("launch.kubernetes.queue=q", "launch.kubernetes.topology=required"),
            "launch.kubernetes.topology=required is a request to Kueue",
        ),
    ],
)
def test_what_volcano_is_not_asked_for_is_refused_by_name(
    words: tuple[str, ...], setting: str
) -> None:
    with pytest.raises(RecipeError, match=setting):
        check(load_recipe([], ["model.preset=llama-tiny", VOLCANO, *words]))


def test_the_group_is_made_before_the_job_and_removed_with_it(world: World) -> None:
    job = world.submit(VOLCANO)
    posts = [path.rpartition("/")[2] for method, path in world.server.requests if method == "POST"]
    assert posts == ["configmaps", "networkpolicies", "podgroups", "jobsets"]
    kinds = ["ConfigMap", "NetworkPolicy", "PodGroup", "JobSet"]
    assert [kind for kind, _ in world.live()] == kinds
    removal = world.launcher.remove(job, world.ledger)
    assert f"PodGroup {RUN_ID}" in removal.removed
    assert world.server.objects == {} and world.live() == []


@pytest.mark.parametrize("plural", ["jobsets", "podgroups"])
def test_of_a_refused_job_no_group_is_left(world: World, plural: str) -> None:
    world.server.refusals["POST", f"/{plural}"] = (422, "no")
    with pytest.raises(RequestError):
        world.submit(VOLCANO)
    assert world.server.objects == {} and world.live() == []
