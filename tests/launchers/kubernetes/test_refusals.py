"""What an API server refuses, as a user reads it: which right, which part, which node.

The answers are those of Kubernetes' own servers (tests/kubernetes compares them).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardyard.control.runs import ask_all
from shardyard.doctor.finding import Finding
from shardyard.errors import AccessError, CapacityError, RequestError
from shardyard.launchers.base import JobState
from shardyard.launchers.kubernetes.checks import kubernetes_checks
from shardyard.launchers.kubernetes.launcher import KubernetesLauncher
from shardyard.launchers.kubernetes.logs import follow_logs, logs_so_far
from shardyard.launchers.kubernetes.refusals import NodeSilentError
from shardyard.launchers.ledger import Ledger, LedgerEntry, Submission
from shardyard.rundir.layout import RunDir
from tests.launchers.kubernetes.api_server import RUNNING, ApiServer, running_server
from tests.launchers.kubernetes.requests import request_for

pytest.importorskip("kubernetes", reason="the Kubernetes client is an extra")

PAGE = Path(__file__).parents[3] / "docs/launch-kubernetes.md"
FORBIDDEN = 'clustertrainingruntimes "shardyard" is forbidden: User "alice" cannot get resource'
TRAINJOB = "launch.kubernetes.target=trainjob"


class World:
    """A server, a launcher that knows it, a ledger."""

    def __init__(self, server: ApiServer, kubeconfig: Path, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.launcher = KubernetesLauncher(kubeconfig=kubeconfig, poll_s=0.02)
        self.ledger = Ledger(folder / "ledger.jsonl")

    def submit(self, *overrides: str, **changes: Any) -> Submission:
        rendered = self.launcher.render(request_for(*overrides, **changes))
        return self.launcher.submit(rendered, self.ledger)

    def findings(self, *overrides: str) -> dict[str, Finding]:
        request = request_for(*overrides)
        api = self.launcher._api_of(request)
        return {found.name: found for found in kubernetes_checks(request, api)}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with running_server(tmp_path) as (server, kubeconfig):
        yield World(server, kubeconfig, tmp_path)


def test_jobs_are_told_of_when_no_config_map_is_left(world: World) -> None:
    """A list of metadata without a match is null in the answer of Kubernetes."""
    removed, running = world.submit(run_id="removed"), world.submit(run_id="running")
    world.launcher.remove(removed, world.ledger)
    gone, alive = world.launcher.statuses([removed, running])
    assert getattr(gone, "state", gone) is JobState.GONE
    assert getattr(alive, "state", alive) is JobState.WAITING


def test_a_field_that_is_null_is_a_field_that_is_absent(world: World) -> None:
    job = world.submit()
    world.server.only("jobsets")["status"] = {"conditions": None}
    world.server.add_pod("p", job=job.name, rank=0, status={"containerStatuses": None}, lines=[])
    assert world.launcher.status(job).state is JobState.WAITING


def test_a_launcher_that_breaks_is_named_and_does_not_silence_the_list(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        name = "kubernetes"

        def answered_by(self, _: Submission) -> str:
            return "context test"

        def status(self, _: Submission) -> None:
            raise TypeError("'NoneType' object is not iterable")

        statuses = status

    entry = LedgerEntry(
        kind="job", name="r", launcher="kubernetes", id="00000000-0000-0000-0000-000000000000",
        details={"context": "test", "namespace": "default", "kind": "JobSet", "config": "c"},
    )  # fmt: skip
    runs = [(RunDir(tmp_path / name), entry) for name in ("a", "b")]
    told = ask_all(runs, {"kubernetes": Broken()}, within_s=5.0)  # type: ignore[dict-item]
    assert set(told.values()) == {"no answer"}
    assert "kubernetes raised TypeError: 'NoneType' object" in caplog.text


def test_a_runtime_that_may_not_be_read_comes_with_the_command_that_grants_it(world: World) -> None:
    world.server.refusals["GET", "/clustertrainingruntimes/shardyard-efa"] = (403, FORBIDDEN)
    with pytest.raises(AccessError, match="kubectl create clusterrole shardyard-runtimes --verb=g"):
        world.submit(TRAINJOB)
    found = world.findings(TRAINJOB)["runtime"]
    assert found.verdict == "problem" and "kubectl create clusterrolebinding" in found.mend
    assert world.server.objects == {}


def test_the_doctor_looks_at_the_runtime_of_a_trainjob(world: World) -> None:
    assert "runtime" not in world.findings()
    assert world.findings(TRAINJOB)["runtime"].what.startswith("the launch creates")
    world.server.forbidden = {"clustertrainingruntimes"}
    found = world.findings(TRAINJOB)["runtime"]
    assert found.verdict == "problem" and "you may not create it" in found.what
    world.server.forbidden = set()
    world.submit(TRAINJOB)
    assert world.findings(TRAINJOB)["runtime"].what.endswith("exists")
    world.server.only("clustertrainingruntimes")["metadata"]["annotations"] = {}
    assert "with other content" in world.findings(TRAINJOB)["runtime"].what


@pytest.mark.parametrize("is_served", [True, False])
def test_the_doctor_goes_on_where_the_user_is_not_told(world: World, *, is_served: bool) -> None:
    """Kubernetes looks at rights first: 403 also answers for a review that is not served."""
    world.server.reviews = ["selfsubjectreviews"] if is_served else ["tokenreviews"]
    words = 'selfsubjectreviews is forbidden: User "alice" cannot create resource'
    world.server.refusals["POST", "/selfsubjectreviews"] = (403, words)
    found = world.findings()
    assert found["credentials"].verdict == "ok" and "nodes" in found


def test_a_kubeconfig_without_credentials_is_a_problem(world: World) -> None:
    words = 'selfsubjectreviews is forbidden: User "system:anonymous" cannot create resource'
    world.server.refusals["POST", "/selfsubjectreviews"] = (403, words)
    (found,) = world.findings().values()
    assert found.verdict == "problem" and "sends no credentials for this context" in found.what


def test_a_kind_that_is_not_served_is_no_right_that_is_lacking(world: World) -> None:
    world.server.served = {"jobsets"}
    words = 'localqueues "team" is forbidden: User "alice" cannot get resource'
    world.server.refusals["GET", "/localqueues/team"] = (403, words)
    found = world.findings("launch.kubernetes.queue=team")
    assert "serves no LocalQueue: Kueue is missing" in found["Kueue"].what
    assert "kueue/releases" in found["Kueue"].mend and "queue" not in found
    api = world.launcher._api_of(request_for())
    with pytest.raises(RequestError, match=r"does not serve LocalQueue .*Kueue 0.19.2 serves it"):
        api.get("LocalQueue", "team")


def test_jobs_are_found_with_a_role_for_one_kind_of_them(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    job = world.submit()
    world.server.refusals["GET", "/pytorchjobs"] = (403, "pytorchjobs is forbidden")
    assert [found.id for found in world.launcher.find(request_for().recipe)] == [job.id]
    assert "pytorchjobs are left out, as you may not list them" in caplog.text
    world.server.refusals["GET", "/jobsets"] = (403, "jobsets is forbidden")
    with pytest.raises(AccessError, match="jobsets is forbidden"):
        world.launcher.find(request_for().recipe)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (422, 'ConfigMap "r" is invalid: []: Too long: must have at most 1048576 characters'),
        (500, "etcdserver: request is too large"),
        (413, "Request entity too large: limit is 3145728"),
    ],
)
def test_an_object_that_is_too_large_names_its_largest_parts(
    world: World, code: int, words: str
) -> None:
    world.server.refusals["POST", "/configmaps"] = (code, words)
    item = {
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "r"},
        "data": {"recipe.yaml": "x" * 2_000_000, "small": "y"},
    }  # fmt: skip
    api = world.launcher._api_of(request_for())
    with pytest.raises(RequestError) as raised:
        api.create(item)
    assert "ConfigMap r has " in str(raised.value)
    assert "largest parts are data.recipe.yaml (" in str(raised.value)
    assert "1 MiB of data" in str(raised.value)


def _pod(rank: int) -> dict[str, Any]:
    labels = {"batch.kubernetes.io/job-completion-index": str(rank)}
    meta = {"name": f"p-{rank}", "uid": f"u-{rank}", "labels": labels}
    return {"metadata": meta, "status": RUNNING}


def test_the_log_of_a_node_that_is_not_reached_names_pod_and_node_and_keeps_the_others(
    world: World,
) -> None:
    job = world.submit()
    for rank in range(2):
        world.server.add_pod(f"p-{rank}", job=job.name, rank=rank, status=RUNNING, lines=["hello"])
    words = 'Get "https://lost:10250/containerLogs/x": dial tcp: lookup lost: no such host'
    world.server.refusals["GET", "/pods/p-0/log"] = (500, words)
    read: list[str] = []
    with pytest.raises(CapacityError) as raised:
        for line in world.launcher.logs(job, node=None, follow=False):
            read.append(f"{line.source}: {line.text}")
    assert read == ["node 1: hello"]
    assert "the log of pod p-0 cannot be read" in str(raised.value)
    assert "lookup lost: no such host" in str(raised.value)
    assert "overloaded" not in str(raised.value)


def test_the_log_of_a_pod_on_a_node_that_was_removed_is_not_empty(world: World) -> None:
    """Kubernetes answers 404 with the name of the node; one with the pod's name means the pod."""
    job = world.submit()
    world.server.add_pod("p-0", job=job.name, rank=0, status=RUNNING, lines=["hello"])
    world.server.missing["/pods/p-0/log"] = "lost"
    with pytest.raises(CapacityError, match=r"log of pod p-0 .*node lost is not there"):
        list(world.launcher.logs(job, node=0, follow=False))
    world.server.missing["/pods/p-0/log"] = "p-0"
    assert list(world.launcher.logs(job, node=0, follow=False)) == []


def test_a_node_that_comes_back_is_followed_and_its_silence_is_reported_once() -> None:
    answers: Iterator[Exception | bytes] = iter(
        [NodeSilentError("node lost"), NodeSilentError("node lost"), b"back\n"]
    )

    def read(_pod: dict[str, Any], _follow: bool) -> Iterator[bytes]:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        yield answer

    over = iter([False] * 3)
    follower = follow_logs(
        lambda: [_pod(0)], read, node=None, is_over=lambda: next(over, True), poll_s=0.01
    )
    texts = [line.text for line in follower]
    assert texts == ["node lost. Shardyard tries again.", "back"]


def test_following_ends_with_the_job_although_a_node_stays_silent() -> None:
    def read(_pod: dict[str, Any], _follow: bool) -> Iterator[bytes]:
        raise NodeSilentError("node lost")
        yield b""

    over = iter([False])
    follower = follow_logs(
        lambda: [_pod(0)], read, node=None, is_over=lambda: next(over, True), poll_s=0.01
    )
    assert len(list(follower)) == 1


def test_a_right_that_is_lacking_ends_following_with_its_reason() -> None:
    def read(_pod: dict[str, Any], _follow: bool) -> Iterator[bytes]:
        raise AccessError("you may not get pods/log")
        yield b""

    follower = follow_logs(lambda: [_pod(0)], read, node=None, is_over=lambda: False, poll_s=0.01)
    with pytest.raises(AccessError, match="pods/log"):
        list(follower)


def test_silent_nodes_are_counted() -> None:
    def read(_pod: dict[str, Any], _follow: bool) -> Iterator[bytes]:
        raise NodeSilentError("node lost")
        yield b""

    with pytest.raises(NodeSilentError, match=r"node lost\. 2 more logs cannot be read either"):
        list(logs_so_far([_pod(rank) for rank in range(3)], read, node=None))


def test_all_that_the_doctor_asks_for_is_in_the_documented_role(world: World) -> None:
    blocks = PAGE.read_text().split("```yaml\n")[1:]
    roles = [yaml.safe_load(block.partition("```")[0]) for block in blocks]
    allowed = {
        (group, resource, verb)
        for role in roles
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    asked: set[tuple[str, str, str]] = set()
    request = request_for("launch.kubernetes.scheduler=volcano")
    api = world.launcher._api_of(request)

    def may(verb: str, resource: str, *, group: str = "", everywhere: bool = False) -> bool:
        del everywhere
        asked.add((group, resource, verb))
        return True

    api.may = may  # type: ignore[method-assign]
    kubernetes_checks(request, api)
    assert len(asked) > 10
    assert asked <= allowed
