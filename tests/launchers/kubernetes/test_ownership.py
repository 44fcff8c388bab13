"""What the run did not make is left alone, whatever its ledger says and whoever has its name."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardyard.errors import AccessError, CapacityError, RequestError
from shardyard.launchers.base import JobState, Removal
from shardyard.launchers.ledger import Ledger, Submission
from tests.launchers.kubernetes.api_server import running_server
from tests.launchers.kubernetes.requests import RUN_ID
from tests.launchers.kubernetes.test_launcher import World

pytest.importorskip("kubernetes", reason="the Kubernetes client is an extra")

JOBSETS = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/{}/jobsets/{}"
RUNTIMES = "/apis/trainer.kubeflow.org/v1alpha1/clustertrainingruntimes/{}"
TRAINJOBS = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/{}/trainjobs/{}"
UID = "11111111-2222-3333-4444-555555555555"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with running_server(tmp_path) as (server, kubeconfig):
        yield World(server, kubeconfig, tmp_path)


def bob(world: World, tmp_path: Path) -> World:
    """Another user of the cluster, with a ledger of his own."""
    folder = tmp_path / "bob"
    folder.mkdir()
    return World(world.server, world.kubeconfig, folder)


def forged(
    world: World, name: str, *, kind: str = "JobSet", uid: str = UID, **place: str
) -> Submission:
    """The run's job, after somebody put another object into its ledger."""
    details = {"context": "test", "namespace": "default", **place}
    intended = world.ledger.intend(kind, name, launcher="kubernetes", **details)
    world.ledger.confirm(intended, uid)
    job_details = {**details, "kind": "JobSet", "config": "c"}
    return Submission(launcher="kubernetes", run_id=RUN_ID, id=uid, name=name, details=job_details)


def deleted(world: World) -> list[str]:
    return [path for method, path in world.server.requests if method == "DELETE"]


@pytest.mark.parametrize(
    "place", [{}, {"namespace": "team"}, {"context": "production", "namespace": "team"}]
)
def test_an_object_that_a_forged_line_names_by_its_uid_lives_on(
    world: World, place: dict[str, str]
) -> None:
    path = JOBSETS.format(place.get("namespace", "default"), "theirs")
    world.server.add(path, metadata={"uid": UID, "annotations": {"shardyard/run-id": "theirs"}})
    job = forged(world, "theirs", **place)
    for end in (lambda: world.launcher.cancel(job), lambda: remove(world, job)):
        with pytest.raises(AccessError, match=r"annotation shardyard/run-id is 'theirs', not "):
            end()
    assert path in world.server.objects and deleted(world) == []
    assert [entry.name for entry in world.ledger.live()] == ["theirs"]


def remove(world: World, job: Submission) -> Removal:
    return world.launcher.remove(job, world.ledger)


def test_a_second_user_s_job_of_the_same_name_lives_on(world: World, tmp_path: Path) -> None:
    """Bob's run has the id of ours; his submission was refused, or its answer was lost."""
    theirs = world.submit(nonce="ours")
    other = bob(world, tmp_path)
    with pytest.raises(RequestError, match="exists already"):
        other.submit(nonce="his")
    other.ledger.path.unlink()
    world.server.refusals["POST", "s"] = (504, "gateway timeout")
    with pytest.raises(CapacityError):
        other.submit(nonce="his")
    world.server.refusals.clear()
    (intended,) = other.ledger.live()
    assert intended.kind == "ConfigMap" and intended.name == theirs.details["config"]
    other.ledger.intend("JobSet", theirs.name, launcher="kubernetes", **intended.details)
    before = dict(world.server.objects)
    place = {key: theirs.details[key] for key in ("context", "namespace", "config")}
    his = Submission(launcher="kubernetes", run_id=RUN_ID, id="", name=theirs.name, details=place)
    found = other.launcher.remove(his, other.ledger)
    assert found.removed == [] and other.ledger.live() == []
    assert found.not_owned == [f"JobSet {theirs.name}", f"ConfigMap {theirs.details['config']}"]
    assert world.server.objects == before and deleted(world) == []
    assert world.launcher.status(theirs).state is JobState.WAITING


def test_an_object_that_was_made_again_by_another_user_lives_on(world: World) -> None:
    job = world.submit(nonce="ours")
    config = world.server.only("configmaps")["metadata"]
    for path, item in world.server.objects.items():
        assert path and item["metadata"].pop("uid")
        item["metadata"]["uid"] = UID
    found = world.launcher.remove(job, world.ledger)
    name = job.details["config"]
    kinds = ("ConfigMap", "NetworkPolicy")
    assert found == Removal(not_owned=[f"JobSet {job.name}", *(f"{kind} {name}" for kind in kinds)])
    world.launcher.cancel(job)
    assert deleted(world) == [] and world.live() == []
    assert "shardyard/cancelled" not in config["annotations"]


def test_the_uid_is_a_precondition_of_the_delete(world: World, tmp_path: Path) -> None:
    """It may be made again between the question and the delete."""
    world.submit()
    api = world.launcher._api(forged(bob(world, tmp_path), RUN_ID))
    assert api.delete("JobSet", RUN_ID, uid=UID) is False
    assert world.server.names("jobsets") == [RUN_ID]


def test_whether_an_older_unanswered_creation_is_ours_is_not_guessed(world: World) -> None:
    job = world.submit()
    interrupted = Ledger(world.ledger.path.with_name("interrupted.jsonl"))
    place = {"context": "test", "namespace": "default"}
    interrupted.intend("JobSet", RUN_ID, launcher="kubernetes", **place)
    with pytest.raises(AccessError, match=r"never known, .* -n default delete jobsets demo"):
        world.launcher.remove(job, interrupted)
    assert world.server.names("jobsets") == [RUN_ID] and len(interrupted.live()) == 1


def test_a_runtime_stays_while_a_job_of_the_same_name_elsewhere_uses_it(world: World) -> None:
    job = world.submit("launch.kubernetes.target=trainjob")
    (runtime,) = world.server.names("clustertrainingruntimes")
    world.server.add(
        TRAINJOBS.format("team", RUN_ID),
        metadata={"uid": UID, "namespace": "team"},
        spec={"runtimeRef": {"name": runtime}},
    )
    removed = world.launcher.remove(job, world.ledger).removed
    assert [name.partition(" ")[0] for name in removed] == [
        "TrainJob",
        "ConfigMap",
        "NetworkPolicy",
    ]
    assert world.server.names("clustertrainingruntimes") == [runtime]


def test_a_runtime_that_we_did_not_make_stays(world: World) -> None:
    path = RUNTIMES.format("torch-distributed")
    world.server.add(path, metadata={"uid": UID, "labels": {}})
    job = forged(world, "torch-distributed", kind="ClusterTrainingRuntime")
    with pytest.raises(AccessError, match=r"label app\.kubernetes\.io/managed-by is None"):
        world.launcher.remove(job, world.ledger)
    assert path in world.server.objects


def test_a_config_map_of_another_user_is_not_taken_for_ours(world: World, tmp_path: Path) -> None:
    world.submit(nonce="ours")
    world.server.objects.pop(JOBSETS.format("default", RUN_ID))
    with pytest.raises(RequestError, match=r"ConfigMap .* exists already"):
        bob(world, tmp_path).submit(nonce="his")


def test_a_job_that_is_not_ours_is_not_resized(world: World) -> None:
    job = world.submit("launch.kubernetes.target=pytorchjob", "elastic.max_nodes=8")
    world.server.only("pytorchjobs")["metadata"]["uid"] = UID
    with pytest.raises(RequestError, match="Only a job that is there can be scaled"):
        world.launcher.resize(job, 3)
    assert not any(method == "PATCH" for method, _ in world.server.requests)


def test_what_a_submission_makes_is_marked_with_it_and_the_ledger_knows_the_mark(
    world: World,
) -> None:
    world.submit("launch.kubernetes.target=trainjob", nonce="n")
    marks = {
        item["metadata"]["annotations"]["shardyard/origin"]
        for item in world.server.objects.values()
    }
    lines = [json.loads(line) for line in world.ledger.path.read_text().splitlines()]
    assert marks == {line["details"]["origin"] for line in lines} and len(marks) == 1
    assert "n" not in marks
