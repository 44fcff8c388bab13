"""Places as schedulers' documentation shows their variables."""

import pytest

from shardyard.errors import RequestError
from shardyard.launchers import base
from shardyard.launchers.aws_batch.node_rank import in_job, own_address
from shardyard.launchers.base import NODE_ASSIGNMENT_READERS, read_node_assignment
from shardyard.launchers.node_rank import NodeAssignment, Variables

# Slurm: sbatch(1), "OUTPUT ENVIRONMENT VARIABLES".
SLURM = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_JOB_NODELIST": "p5-[003-004,7]",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_NODEID": "2",
}
# JobSet: JOB_COMPLETION_INDEX is Kubernetes' own; the others are set by our manifest.
JOBSET = {
    "JOB_COMPLETION_INDEX": "1",
    "SHARDYARD_HOST": "run-node-0-0.run",
    "SHARDYARD_NODES": "2",
    "SHARDYARD_SESSION": "run-0",
}
# Kubeflow Trainer 2.x, plugin torch: static rendezvous, one value per pod.
TRAINJOB = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "run-node-0-0.run",
    "PET_MASTER_PORT": "29500",
    "SHARDYARD_SESSION": "uid-0",
}
# Training operator 1.9 with elasticPolicy.
PYTORCHJOB = {
    "PET_RDZV_ENDPOINT": "run-worker-0:23456",
    "PET_NNODES": "2:4",
    "RANK": "3",
    "SHARDYARD_SESSION": "uid",
}
# AWS Batch User Guide, "Multi-node parallel jobs", Environment variables.
BATCH_CHILD = {
    "AWS_BATCH_JOB_ID": "6c1b2f9e-0000-4d3c-9d5e-1f2a3b4c5d6e#2",
    "AWS_BATCH_JOB_ATTEMPT": "1",
    "AWS_BATCH_JOB_NODE_INDEX": "2",
    "AWS_BATCH_JOB_NUM_NODES": "4",
    "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
    "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.1.5",
}
BATCH_MAIN = {
    **{key: value for key, value in BATCH_CHILD.items() if not key.endswith("IPV4_ADDRESS")},
    "AWS_BATCH_JOB_ID": "6c1b2f9e-0000-4d3c-9d5e-1f2a3b4c5d6e#0",
    "AWS_BATCH_JOB_NODE_INDEX": "0",
}
BATCH_SESSION = "6c1b2f9e-0000-4d3c-9d5e-1f2a3b4c5d6e-1"

CASES = [
    ("slurm", SLURM, (2, 3, "p5-003", 24567, "1234567.0")),
    ("slurm", {**SLURM, "SLURM_RESTART_COUNT": "2"}, (2, 3, "p5-003", 24567, "1234567.2")),
    ("jobset", JOBSET, (1, 2, "run-node-0-0.run", 29400, "run-0")),
    ("jobset", {**JOBSET, "SHARDYARD_PORT": "29999"}, (1, 2, "run-node-0-0.run", 29999, "run-0")),
    ("trainjob", TRAINJOB, (1, 2, "run-node-0-0.run", 29500, "uid-0")),
    ("pytorchjob", PYTORCHJOB, (3, 4, "run-worker-0", 23456, "uid")),
    ("pytorchjob", {**PYTORCHJOB, "PET_NNODES": "3"}, (3, 3, "run-worker-0", 23456, "uid")),
    # our manifest says where node 0 is, whatever the operator's endpoint
    (
        "pytorchjob",
        {
            **PYTORCHJOB,
            "SHARDYARD_HOST": "run-worker-0",
            "SHARDYARD_PORT": "29401",
        },
        (3, 4, "run-worker-0", 29401, "uid"),
    ),
    ("aws-batch", BATCH_CHILD, (2, 4, "10.0.1.5", 29400, BATCH_SESSION)),
    # the main node need not be the first
    (
        "aws-batch",
        {**BATCH_CHILD, "AWS_BATCH_JOB_MAIN_NODE_INDEX": "3"},
        (3, 4, "10.0.1.5", 29400, BATCH_SESSION),
    ),
]


@pytest.mark.parametrize(("kind", "environ", "expected"), CASES)
def test_each_scheduler_says_where_a_node_stands(
    kind: str, environ: dict[str, str], expected: tuple[int, int, str, int, str]
) -> None:
    node_rank, nodes, host, port, session = expected
    assert read_node_assignment(kind, environ) == NodeAssignment(
        node_rank=node_rank, nodes=nodes, host=host, port=port, session=session,
        is_container=kind != "slurm", own_host="p5-7" if kind == "slurm" else None,
    )  # fmt: skip


def test_a_pytorchjob_says_which_etcd_its_nodes_meet_in() -> None:
    environ = {**PYTORCHJOB, "SHARDYARD_RENDEZVOUS": "etcd://etcd:2379"}
    assert read_node_assignment("pytorchjob", environ).rendezvous == "etcd://etcd:2379"


def test_a_worker_of_a_pytorchjob_is_reached_by_the_service_of_its_own_name() -> None:
    environ = {**PYTORCHJOB, "SHARDYARD_OWN_HOST": "run-worker-3"}
    assert read_node_assignment("pytorchjob", environ).own_host == "run-worker-3"


def test_the_main_node_of_aws_batch_finds_its_own_address() -> None:
    place = in_job(Variables("aws-batch", BATCH_MAIN), own_address=lambda: "10.0.1.9")
    assert (place.node_rank, place.host, place.session) == (0, "10.0.1.9", BATCH_SESSION)


NEEDED = [
    (kind, environ, name)
    for kind, environ in [
        ("slurm", SLURM),
        ("jobset", JOBSET),
        ("trainjob", {k: v for k, v in TRAINJOB.items() if k != "PET_MASTER_PORT"}),
        ("pytorchjob", PYTORCHJOB),
        ("aws-batch", BATCH_CHILD),
    ]
    for name in environ
]


@pytest.mark.parametrize(("kind", "environ", "name"), NEEDED)
def test_a_missing_variable_is_named(kind: str, environ: dict[str, str], name: str) -> None:
    rest = {key: value for key, value in environ.items() if key != name}
    with pytest.raises(RequestError) as caught:
        read_node_assignment(kind, rest)
    assert f"the variable {name} is not set" in str(caught.value)
    assert f"--place {kind}" in str(caught.value) and "--place given" in str(caught.value)


def test_a_variable_that_is_no_number_is_named_with_its_value() -> None:
    with pytest.raises(RequestError, match="SLURM_NODEID='two' is not a number"):
        read_node_assignment("slurm", {**SLURM, "SLURM_NODEID": "two"})


def test_an_elastic_job_without_an_elastic_policy_is_told_so() -> None:
    with pytest.raises(RequestError, match="elasticPolicy"):
        read_node_assignment("pytorchjob", {**PYTORCHJOB, "PET_RDZV_ENDPOINT": "run-worker-0"})


def test_a_place_that_is_not_read_from_the_environment_names_the_others() -> None:
    with pytest.raises(RequestError) as caught:
        read_node_assignment("ray", {})
    assert all(word in str(caught.value) for word in (*NODE_ASSIGNMENT_READERS, "given"))


def test_a_launcher_of_a_package_reads_its_own_place(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ours:
        @staticmethod
        def node_assignment(variables: Variables) -> NodeAssignment:
            rank = variables.number("RAY_RANK")
            return NodeAssignment(node_rank=rank, nodes=2, host="head", port=1, session="s")

    monkeypatch.setattr(base, "installed", lambda _: {"ray": ()})
    monkeypatch.setattr(base, "launcher_class", lambda _: Ours)
    assert read_node_assignment("ray", {"RAY_RANK": "1"}).node_rank == 1
    with pytest.raises(RequestError, match="--place ray reads this node"):
        read_node_assignment("ray", {})


def test_an_address_of_version_6_is_bracketed_in_the_endpoint() -> None:
    place = NodeAssignment(node_rank=0, nodes=1, host="fd00::5", port=29400, session="s")
    assert place.endpoint == "[fd00::5]:29400"


def test_this_machine_has_an_address() -> None:
    assert own_address().count(".") == 3
