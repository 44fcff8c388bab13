"""Moto's server as a program, with what it leaves out of multi-node parallel jobs of AWS Batch.

Moto's own: definitions, queues, the states of a job, and one real container for each node, of the
definition's image and command. Played here, as the AWS Batch and ECS guides describe it:

- the variables of a node: job, attempt, its number, the number of nodes, the main node's number
  (moto sets the main node's address itself),
- secrets, read by reference from moto's Secrets Manager and Parameter Store,
- shared memory and init process of the definition,
- each node's output into a log stream of its own, while it runs, by Docker's driver for CloudWatch,
- TerminateJob as SIGTERM with time to save, where moto kills,
- DescribeJobs of a node (``<job>#<node>``), and the exit code of the main node.

Attempts after the first are not played: moto has none.
"""

import os
from typing import Any

import boto3
from docker.models.containers import Container, ContainerCollection
from moto.batch.models import BatchBackend, Job, batch_backends
from moto.server import main

REGION = "us-east-1"
ACCOUNT = "123456789012"
STOP_TIMEOUT_S = 150
"""What `cluster/batch/stack.py` writes for a drain of two minutes."""

_run_container = ContainerCollection.run
_describe_job = Job.describe
_describe_jobs = BatchBackend.describe_jobs


def run_container(self: Any, image: str, command: Any = None, **given: Any) -> Any:
    """In place of docker's own: moto starts the container of a node, by the name job-node."""
    started, _, number = given["name"].rpartition("-")
    jobs = batch_backends[ACCOUNT][REGION]._jobs.values()
    job, node = next(job for job in jobs if started.endswith(job.job_id)), int(number)
    wanted = container_of(job)
    linux = wanted["linuxParameters"]
    given["environment"] |= variables(job, node) | secret_values(wanted)
    given["log_config"] = {"Type": "awslogs", "Config": log_options(job, node)}
    given |= {"init": linux["initProcessEnabled"], "shm_size": f"{linux['sharedMemorySize']}m"}
    return _run_container(self, image, command, **given)


def container_of(job: Any) -> dict[str, Any]:
    """The one description of all nodes."""
    (of_all,) = job.job_definition.node_properties["nodeRangeProperties"]
    container: dict[str, Any] = of_all["container"]
    return container


def variables(job: Any, node: int) -> dict[str, str]:
    """What Batch tells a node of its place."""
    properties = job.job_definition.node_properties
    return {
        "AWS_BATCH_JOB_ID": f"{job.job_id}#{node}",
        "AWS_BATCH_JOB_ATTEMPT": "1",
        "AWS_BATCH_JOB_NODE_INDEX": str(node),
        "AWS_BATCH_JOB_NUM_NODES": str(properties["numNodes"]),
        "AWS_BATCH_JOB_MAIN_NODE_INDEX": str(properties["mainNode"]),
    }


def secret_values(container: dict[str, Any]) -> dict[str, str]:
    """What the ECS agent puts into the environment for the references of a definition."""
    found = {}
    for secret in container.get("secrets", []):
        place = secret["valueFrom"]
        if ":secretsmanager:" in place:
            client = boto3.client("secretsmanager", region_name=REGION)
            found[secret["name"]] = client.get_secret_value(SecretId=place)["SecretString"]
        else:
            client = boto3.client("ssm", region_name=REGION)
            answer = client.get_parameter(Name=place, WithDecryption=True)
            found[secret["name"]] = answer["Parameter"]["Value"]
    return found


def log_stream(job: Any, node: int) -> str:
    """Prefix, container, task, as ECS names it."""
    options = container_of(job)["logConfiguration"]["options"]
    return f"{options['awslogs-stream-prefix']}/default/{job.job_id}-{node}"


def log_options(job: Any, node: int) -> dict[str, str]:
    """Of Docker's driver for CloudWatch; its group is made by Batch."""
    options = container_of(job)["logConfiguration"]["options"]
    return {
        "awslogs-endpoint": os.environ["AWS_ENDPOINT_URL"],
        "awslogs-region": REGION,
        "awslogs-create-group": "true",
        "awslogs-group": options["awslogs-group"],
        "awslogs-stream": log_stream(job, node),
    }


def describe_job(self: Any) -> dict[str, Any]:
    """With the main node's log stream and exit code, as an attempt has them."""
    answer: dict[str, Any] = _describe_job(self)
    if self.job_definition.type == "multinode" and self.attempts:
        main_node = self.job_definition.node_properties["mainNode"]
        container: dict[str, Any] = {"logStreamName": log_stream(self, main_node)}
        if self.job_stopped and self.exit_code is not None:
            container["exitCode"] = self.exit_code
        attempt = {**self.attempts[-1], "container": container}
        answer |= {"container": container, "attempts": [attempt]}
    return answer


def describe_jobs(self: Any, jobs: list[str]) -> list[dict[str, Any]]:
    """Of jobs, and of single nodes."""
    answers: list[dict[str, Any]] = _describe_jobs(self, jobs)
    for name in jobs:
        job_id, _, node = name.partition("#")
        job = self._jobs.get(job_id)
        if node and job is not None:
            container = {"logStreamName": log_stream(job, int(node))} if job.attempts else {}
            answers.append({**job.describe(), "jobId": name, "attempts": [],
                            "container": container})  # fmt: skip
    return answers


def ask_to_end(self: Any, *_: Any) -> None:
    """In place of SIGKILL."""
    self.stop(timeout=STOP_TIMEOUT_S)


def no_second_copy(_: Any, **_asked: Any) -> bytes:
    """Docker has sent the output to CloudWatch already."""
    return b""


PLAYED = (
    (ContainerCollection, "run", run_container),
    (Container, "kill", ask_to_end),
    (Container, "logs", no_second_copy),
    (Job, "describe", describe_job),
    (BatchBackend, "describe_jobs", describe_jobs),
)
"""What of moto, and of the Docker client that it uses, is replaced."""

if __name__ == "__main__":
    for owner, name, ours in PLAYED:
        setattr(owner, name, ours)
    main()
