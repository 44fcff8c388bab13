"""The pod template: least rights, no secret, nothing typed twice."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from shardyard.config.load import dump_recipe
from shardyard.config.machines import capacity_of
from shardyard.errors import RequestError
from shardyard.launchers.base import read_node_assignment
from shardyard.launchers.kubernetes.objects import render_objects, to_yaml
from shardyard.launchers.kubernetes.policies import is_from_capacity, selector_terms
from tests.launchers.kubernetes.requests import IMAGE, RUN_ID, request_for
from tests.launchers.kubernetes.schemas import check_object, pod_of

ALL_TARGETS = ["jobset", "trainjob", "pytorchjob"]


def pod_for(*overrides: str, **changes: object) -> dict[str, Any]:
    return pod_of(render_objects(replace(request_for(*overrides), **changes)))  # type: ignore[arg-type]


def container_for(*overrides: str) -> dict[str, Any]:
    (container,) = pod_for(*overrides)["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def variables(container: dict[str, Any]) -> dict[str, Any]:
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container["env"]}


# kubernetes.io, Pod Security Standards, profile "restricted".
@pytest.mark.parametrize("target", ALL_TARGETS)
@pytest.mark.parametrize("efa", [0, 4])
def test_pods_keep_to_the_restricted_standard_but_for_what_efa_needs(target: str, efa: int) -> None:
    target_setting = f"launch.kubernetes.target={target}"
    spec = pod_for(target_setting, f"launch.kubernetes.efa={efa}")["spec"]
    (container,) = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    security = container["securityContext"]
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"]["drop"] == ["ALL"]
    assert security["capabilities"].get("add") == (["IPC_LOCK"] if efa else None)
    assert spec["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
    assert {kind for volume in spec["volumes"] for kind in volume if kind != "name"} == {
        "configMap", "emptyDir", "persistentVolumeClaim",
    }  # fmt: skip


def test_the_node_command_is_an_argument_list() -> None:
    assert container_for()["command"] == [
        "python", "-P", "-m", "shardyard.node", "/shardyard/recipe/recipe.yaml",
        "--run-dir", f"/runs/{RUN_ID}", "--place", "jobset",
    ]  # fmt: skip


def test_nothing_is_set_for_nccl_and_libfabric_but_the_log_level() -> None:
    names = variables(container_for())
    assert names["NCCL_DEBUG"] == "WARN"
    assert not [name for name in names if name.startswith(("FI_", "RDMAV_"))]
    assert [name for name in names if name.startswith("NCCL_")] == ["NCCL_DEBUG"]


def test_a_drain_fits_in_the_grace_period() -> None:
    assert pod_for("elastic.drain_timeout_s=300.5")["spec"]["terminationGracePeriodSeconds"] == 331


def test_no_planted_secret_is_in_any_rendered_object(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = {"HF_TOKEN": "hf_PlantedTokenPlantedTokenPlanted", "AWS_SECRET_ACCESS_KEY": "pl4nt3d"}
    for name, value in planted.items():
        monkeypatch.setenv(name, value)
    for target in ALL_TARGETS:
        secrets = "secrets={HF_TOKEN: k8s:hf/token, AWS_SECRET_ACCESS_KEY: k8s:aws/key}"
        objects = render_objects(request_for(f"launch.kubernetes.target={target}", secrets))
        text = to_yaml(objects)
        assert not [value for value in planted.values() if value in text]
        env = variables(pod_of(objects)["spec"]["containers"][0])
        assert env["HF_TOKEN"] == {"secretKeyRef": {"name": "hf", "key": "token"}}


@pytest.mark.parametrize("kept", ["env", "file:/home/me/token", "ssm:/team/token", "aws-sm:token"])
def test_a_secret_that_no_pod_can_read_comes_with_the_way_to_one_it_can(kept: str) -> None:
    words = r"secrets.HF_TOKEN is kept in .*kubectl create secret.*secrets.HF_TOKEN=k8s:NAME/KEY"
    with pytest.raises(RequestError, match=words):
        pod_for(f"secrets.HF_TOKEN={kept}")


def _as_the_kubelet_expands(text: str, variables: dict[str, str]) -> str:
    """By the rules of kubernetes.io (EnvVar.value): written from their words, not from ours."""
    found, rest = "", text
    while "$" in rest:
        before, _, rest = rest.partition("$")
        found += before
        end = rest.find(")")
        if rest.startswith("$"):  # an escaped one
            found, rest = found + "$", rest[1:]
        elif rest.startswith("(") and end > 0:
            name = rest[1:end]
            found, rest = found + variables.get(name, f"$({name})"), rest[end + 1 :]
        else:
            found += "$"
    return found + rest


@pytest.mark.parametrize(
    "text",
    ["$(HOME)", "$$", "$$(HOME)", "$", "a$", "$(", "$(HOME", "$)", "$$$(HOME)$$", "$HOME ${HOME}"],
)
def test_values_and_words_arrive_as_they_were_written(text: str) -> None:
    env = json.dumps({"A": text})
    pod = pod_for(f"launch.env={env}", run_dir=f"/runs/{text}")
    (container,) = pod["spec"]["containers"]
    sent = variables(container)["A"]
    assert isinstance(sent, str)
    assert _as_the_kubelet_expands(sent, {"HOME": "/tmp"}) == text
    word = container["command"][container["command"].index("--run-dir") + 1]
    assert _as_the_kubelet_expands(word, {"HOME": "/tmp"}) == f"/runs/{text}"


def test_a_missing_image_is_refused() -> None:
    with pytest.raises(RequestError, match=r"launch.image is not given.*best by digest"):
        pod_for("launch.image=null")
    assert container_for()["image"] == IMAGE


def test_a_folder_of_the_node_is_refused_unless_allowed() -> None:
    volumes = "launch.volumes=[{path: /runs, host: /mnt/shared}]"
    with pytest.raises(RequestError, match=r"host='/mnt/shared' is a folder of the node"):
        pod_for(volumes)
    spec = pod_for(volumes, "launch.kubernetes.allow_host_paths=true")["spec"]
    assert spec["volumes"][-1]["hostPath"] == {"path": "/mnt/shared", "type": "Directory"}


@pytest.mark.parametrize("kind", ["efs: fs-1", "claim: a, host: /b", ""])
def test_a_volume_that_is_not_one_claim_is_refused(kind: str) -> None:
    extra = f", {kind}" if kind else ""
    with pytest.raises(RequestError, match=r"volumes\[0\] \(/runs\) does not name one claim"):
        pod_for(f"launch.volumes=[{{path: /runs{extra}}}]")


def test_a_run_folder_on_no_volume_is_refused() -> None:
    with pytest.raises(RequestError, match=r"is on none of launch.volumes.*Mount a claim"):
        pod_for("launch.volumes=[{path: /other, claim: other}]")


def test_shared_memory_is_in_memory_and_not_larger_than_what_the_pod_has() -> None:
    large = pod_for("launch.kubernetes.shared_memory_gib=128")["spec"]["volumes"][1]
    assert large["emptyDir"] == {"medium": "Memory", "sizeLimit": "131072Mi"}
    small = pod_for("cluster.instance=g4dn.xlarge")["spec"]["volumes"][1]
    assert small["emptyDir"]["sizeLimit"] == "13107Mi"  # 80 % of 16 GiB


@pytest.mark.parametrize(
    ("text", "toleration"),
    [
        ("spot", {"key": "spot", "operator": "Exists"}),
        ("team=a", {"key": "team", "operator": "Equal", "value": "a"}),
        ("spot:NoExecute", {"key": "spot", "operator": "Exists", "effect": "NoExecute"}),
    ],
)
def test_tolerations_have_three_forms(text: str, toleration: dict[str, str]) -> None:
    assert toleration in pod_for(f"launch.kubernetes.tolerations=[{text}]")["spec"]["tolerations"]


def test_an_unknown_effect_of_a_taint_is_refused() -> None:
    with pytest.raises(RequestError, match=r"'spot:Never' ends in 'Never'.*NoSchedule"):
        pod_for("launch.kubernetes.tolerations=['spot:Never']")


def test_the_taint_of_the_devices_is_tolerated() -> None:
    keys = [one["key"] for one in pod_for("cluster.instance=dl1.24xlarge")["spec"]["tolerations"]]
    assert "habana.ai/gaudi" in keys


def test_pods_go_to_nodes_of_the_instance_type() -> None:
    selector = pod_for("launch.kubernetes.node_selector={pool: a}")["spec"]["nodeSelector"]
    assert selector == {"node.kubernetes.io/instance-type": "p5.48xlarge", "pool": "a"}


CR = "cr-0123456789abcdef0"
BLOCK = (f"cluster.capacity=block:{CR}", "cluster.block_ends=2027-01-31T11:30:00Z")


@pytest.mark.parametrize(
    ("overrides", "labels", "is_wanted"),
    [
        (BLOCK, {"karpenter.k8s.aws/capacity-reservation-id": CR}, True),
        (BLOCK, {"shardyard/capacity-reservation": CR}, True),
        (BLOCK, {"shardyard/capacity-reservation": "cr-00000000"}, False),
        (BLOCK, {"eks.amazonaws.com/capacityType": "CAPACITY_BLOCK"}, False),
        ((f"cluster.capacity=reservation:{CR}",), {"shardyard/capacity-reservation": CR}, True),
        (("cluster.capacity=spot",), {"karpenter.sh/capacity-type": "spot"}, True),
        (("cluster.capacity=spot",), {"eks.amazonaws.com/capacityType": "SPOT"}, True),
        (("cluster.capacity=spot",), {}, False),
        (("cluster.capacity=on-demand",), {}, True),
        (("cluster.capacity=on-demand",), {"karpenter.sh/capacity-type": "on-demand"}, True),
        (("cluster.capacity=on-demand",), {"karpenter.sh/capacity-type": "reserved"}, False),
        (("cluster.capacity=on-demand",), {"eks.amazonaws.com/capacityType": "SPOT"}, False),
    ],
)
def test_pods_take_nodes_of_the_capacity_alone_that_the_recipe_names(
    overrides: tuple[str, ...], labels: dict[str, str], is_wanted: bool
) -> None:
    request = request_for(*overrides)
    capacity = capacity_of(request.recipe.cluster)
    assert capacity is not None and is_from_capacity(capacity, labels) is is_wanted
    for target in ALL_TARGETS:
        *_, job = render_objects(request_for(*overrides, f"launch.kubernetes.target={target}"))
        (terms,) = found_in(job, "nodeSelectorTerms")
        assert terms == [{"matchExpressions": term} for term in selector_terms(capacity)]
        check_object(job)


def found_in(tree: object, key: str) -> list[object]:
    """The values of a key, wherever it is."""
    if isinstance(tree, dict):
        here = [tree[key]] if key in tree else []
        return here + [found for value in tree.values() for found in found_in(value, key)]
    return (
        [found for item in tree for found in found_in(item, key)] if isinstance(tree, list) else []
    )


@pytest.mark.parametrize("target", ALL_TARGETS)
def test_a_block_s_end_is_the_job_s_time_limit(target: str) -> None:
    words = (*BLOCK, f"launch.kubernetes.target={target}")
    for limit, left_s, seconds in [("2h", 3600.5, 3600), ("30min", 3600.0, 1800)]:
        request = request_for(*words, f"launch.time_limit={limit}", block_left_s=left_s)
        assert found_in(render_objects(request)[-1], "activeDeadlineSeconds") == [seconds]


def test_the_recipe_travels_in_a_config_map_named_by_its_content() -> None:
    first, other = render_objects(request_for())[0], render_objects(request_for("run.seed=1"))[0]
    assert first["data"]["recipe.yaml"] == dump_recipe(request_for().recipe)
    assert first["metadata"]["name"] != other["metadata"]["name"]
    assert re.fullmatch(rf"{RUN_ID}-[0-9a-f]{{8}}", first["metadata"]["name"])


def test_a_recipe_that_no_config_map_can_hold_is_refused() -> None:
    with pytest.raises(RequestError, match=r"1,000,001 bytes, and a ConfigMap takes 1,000,000"):
        render_objects(request_for(recipe_text="x" * 1_000_001))


def test_a_range_of_nodes_needs_a_target_that_can_keep_it() -> None:
    for target in ("jobset", "trainjob"):
        with pytest.raises(RequestError, match=r"elastic.min_nodes=1.*target=pytorchjob"):
            pod_for("elastic.min_nodes=1", f"launch.kubernetes.target={target}")


def test_nodes_outside_of_the_elastic_range_are_refused() -> None:
    with pytest.raises(RequestError, match=r"cluster.nodes=2 is not between .*=3 and .*=4"):
        pod_for("launch.kubernetes.target=pytorchjob", "elastic.min_nodes=3", "elastic.max_nodes=4")


# What the controllers add to a pod's environment, from their documentation.
ADDED = {
    "jobset": {"JOB_COMPLETION_INDEX": "1"},
    "trainjob": {
        "PET_NODE_RANK": "1", "PET_NNODES": "2", "PET_MASTER_PORT": "29500",
        "PET_MASTER_ADDR": f"{RUN_ID}-node-0-0.{RUN_ID}",
    },
    "pytorchjob": {"PET_RDZV_ENDPOINT": f"{RUN_ID}-worker-0:29400", "PET_NNODES": "2:2"},
}  # fmt: skip
HOSTS = {
    "jobset": f"{RUN_ID}-node-0-0.{RUN_ID}",
    "trainjob": f"{RUN_ID}-node-0-0.{RUN_ID}",
    "pytorchjob": f"{RUN_ID}-worker-0",
}
FIELDS = {
    "metadata.name": f"{RUN_ID}-worker-1",
    "metadata.labels['training.kubeflow.org/replica-index']": "1",
    "metadata.labels['batch.kubernetes.io/controller-uid']": "uid-of-this-start",
}


@pytest.mark.parametrize("target", ALL_TARGETS)
def test_a_node_reads_its_place_from_what_its_pod_is_given(target: str) -> None:
    environ = dict(ADDED[target])
    for name, value in variables(container_for(f"launch.kubernetes.target={target}")).items():
        environ[name] = value if isinstance(value, str) else FIELDS[value["fieldRef"]["fieldPath"]]
    place = read_node_assignment(target, environ)
    assert (place.node_rank, place.nodes, place.host) == (1, 2, HOSTS[target])
    assert place.own_host == (f"{RUN_ID}-worker-1" if target == "pytorchjob" else None)
    assert place.session == (RUN_ID if target == "pytorchjob" else "uid-of-this-start")


def test_a_session_is_new_at_each_submission_or_each_start() -> None:
    """A PyTorchJob's is its name, which counts submissions; a JobSet's is told by Kubernetes."""

    def session(*overrides: str, submission: int = 1) -> Any:
        request = request_for(*overrides, run_id="demo", submission=submission)
        (container,) = pod_of(render_objects(request))["spec"]["containers"]
        return variables(container)["SHARDYARD_SESSION"]

    elastic = "launch.kubernetes.target=pytorchjob"
    assert [session(elastic, submission=number) for number in (1, 2)] == ["demo", "demo-s2"]
    uid = "metadata.labels['batch.kubernetes.io/controller-uid']"
    assert session() == {"fieldRef": {"fieldPath": uid}}


@pytest.mark.parametrize("target", ["jobset", "trainjob", "pytorchjob"])
def test_a_node_is_not_emptied_to_save_money_while_a_run_is_on_it(target: str) -> None:
    objects = render_objects(request_for(f"launch.kubernetes.target={target}"))
    notes = pod_of(objects)["metadata"]["annotations"]
    assert notes["karpenter.sh/do-not-disrupt"] == "true"
    assert notes["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"
    if target == "trainjob":  # that of Trainer 2.0 patches no metadata
        (replicated,) = objects[-2]["spec"]["template"]["spec"]["replicatedJobs"]
        template = replicated["template"]["spec"]["template"]
        assert template["metadata"]["annotations"].items() <= notes.items()


def test_metrics_are_offered_at_the_pods_own_address_where_they_are_asked_for() -> None:
    container = container_for("observe.prometheus=9400")
    assert container["ports"] == [{"name": "metrics", "containerPort": 9400}]
    source = {"fieldRef": {"fieldPath": "status.podIP"}}
    assert {"name": "SHARDYARD_METRICS_ADDRESS", "valueFrom": source} in container["env"]
    plain = container_for()
    assert "ports" not in plain
    assert "SHARDYARD_METRICS_ADDRESS" not in [each["name"] for each in plain["env"]]


@pytest.mark.parametrize("target", ["jobset", "trainjob", "pytorchjob"])
def test_every_target_takes_a_pod_that_offers_metrics(target: str) -> None:
    request = request_for("observe.prometheus=9400", f"launch.kubernetes.target={target}")
    for item in render_objects(request):
        check_object(item)
