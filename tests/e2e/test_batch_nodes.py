"""The container of a Batch job, run here as its main and its child node: the losses of `train`.

What Batch would start is read from the rendered job definition: its command and its environment.
The variables are those that Batch sets, the main node's address on the child alone.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest

from shardyard.errors import EXIT_DRAINED
from shardyard.launchers.aws_batch.launcher import BatchLauncher
from shardyard.launchers.aws_batch.node_rank import own_address
from shardyard.launchers.log_markers import rebuild
from shardyard.rundir.jsonl import read_lines, read_steps
from tests.e2e.shardyard import PATIENCE_S, Answer, Place, end_what_is_left, wait_for_step
from tests.launchers.local_runs import TWO_NODES, LocalRuns

JOB_ID = "7a712a94-0dcb-4e2e-9a1b-5f0f6f3d7a11"
QUEUE = ("launch.image=shardyard", "launch.aws_batch.queue=trainers",
         "launch.aws_batch.vcpus=1", "launch.aws_batch.memory_gib=2")  # fmt: skip


def container(place: Place, run_id: str, *overrides: str) -> dict[str, Any]:
    """What the job definition says of every node."""
    request = LocalRuns(place).request(run_id, *TWO_NODES, *QUEUE, *overrides)
    definition = BatchLauncher().render(replace(request, cluster=None)).objects[0]["params"]
    (node_range,) = definition["nodeProperties"]["nodeRangeProperties"]
    made: dict[str, Any] = node_range["container"]
    return made


def batch_variables(node: int, *, attempt: int) -> dict[str, str]:
    """Source: AWS Batch User Guide, environment variables of multi-node parallel jobs."""
    variables = {
        "AWS_BATCH_JOB_ID": f"{JOB_ID}#{node}",
        "AWS_BATCH_JOB_ATTEMPT": str(attempt),
        "AWS_BATCH_JOB_NODE_INDEX": str(node),
        "AWS_BATCH_JOB_NUM_NODES": "2",
        "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
    }
    if node != 0:
        variables["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"] = own_address()
    return variables


@contextmanager
def started(
    place: Place, made: dict[str, Any], node: int, *, attempt: int
) -> Iterator[subprocess.Popen[str]]:
    environment = {row["name"]: row["value"] for row in made["environment"]}
    command = [sys.executable, *made["command"][1:]]  # the image's python
    process = subprocess.Popen(
        command,
        cwd=place.folder,
        env=place.environment({**environment, **batch_variables(node, attempt=attempt)}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            end_what_is_left()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def run_job(
    place: Place, made: dict[str, Any], *, attempt: int = 1, drain: Callable[[], None] | None = None
) -> list[tuple[int, str]]:
    """Both nodes to their end: exit code and output of each.

    Args:
        drain: Returns when both are to be asked to end, as by an instance that shuts down.
    """
    with ExitStack() as stack:
        nodes = [stack.enter_context(started(place, made, n, attempt=attempt)) for n in (0, 1)]
        if drain is not None:
            drain()
            for node in nodes:
                node.terminate()
        outputs = [node.communicate(timeout=PATIENCE_S)[0] for node in nodes]
        return [(node.returncode, output) for node, output in zip(nodes, outputs, strict=True)]


def losses(place: Place, run_id: str) -> list[float]:
    return [line["loss"] for line in read_steps(place.run_dir(run_id).metrics)]


@pytest.fixture
def batch_place(place: Place, prepared: Answer) -> Place:
    assert prepared.code == 0
    return place


def test_main_and_child_compute_what_train_does_and_the_log_holds_all_of_it(
    batch_place: Place, base: Answer
) -> None:
    assert base.code == 0
    (main_code, main_said), (child_code, child_said) = run_job(
        batch_place, container(batch_place, "batched")
    )
    assert (main_code, child_code) == (0, 0), main_said + child_said
    assert losses(batch_place, "batched") == losses(batch_place, "base")
    run_dir, copy = batch_place.run_dir("batched"), batch_place.run_dir("batched-copy")
    assert rebuild(main_said.splitlines(), copy.path) > 24
    assert list(read_lines(copy.metrics)) == list(read_lines(run_dir.metrics))


@pytest.mark.slow
def test_a_drained_attempt_ends_with_143_and_the_next_goes_on_exactly(
    batch_place: Place, base: Answer
) -> None:
    assert base.code == 0
    made, run_dir = container(batch_place, "again"), batch_place.run_dir("again")
    first = run_job(batch_place, made, drain=lambda: wait_for_step(run_dir, 4))
    assert [code for code, _ in first] == [EXIT_DRAINED, EXIT_DRAINED], first
    assert len(losses(batch_place, "again")) < 24
    assert [code for code, _ in run_job(batch_place, made, attempt=2)] == [0, 0]
    assert losses(batch_place, "again") == losses(batch_place, "base")


def test_a_container_without_a_recipe_says_so(place: Place) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shardyard.node.env_entry", "--place", "aws-batch"],
        env={name: value for name, value in os.environ.items() if name != "SHARDYARD_RECIPE"},
        cwd=place.folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 2
    assert "SHARDYARD_RECIPE is not set" in done.stderr
    assert "shardyard launch" in done.stderr
