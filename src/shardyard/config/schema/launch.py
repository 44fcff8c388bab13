"""The section ``launch`` of a recipe, with one for each launcher."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from shardyard.config.schema.base import Auto, OpenSection, Section


class Slurm(Section):
    """Settings for `launch --on slurm`."""

    partition: str | None = None
    """Partition. null: the cluster's default."""
    account: str | None = None
    """Account to charge. null: your default."""
    qos: str | None = None
    """Quality of service (QOS)."""
    constraint: str | None = None
    """Node features, in sbatch's syntax."""
    request_gpus: bool = True
    """Send --gpus-per-node. false: if your Slurm does not manage GPUs."""
    options: dict[str, str | int | bool] = Field(default={})
    """Other sbatch options by their long names, such as {exclude: node7, switches: 1}."""
    requeue: bool = True
    """Requeue after a lost node and at the time limit; continues from the newest checkpoint."""
    signal_before_s: Annotated[int, Field(ge=10)] = 120
    """Seconds before the time limit at which the run drains."""
    container_image: str | None = None
    """Container image for Pyxis/Enroot (srun --container-image). null: no container."""
    container_mounts: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Container mounts, source:target."""
    python: str = "auto"
    """Python on the nodes. auto: the one that runs this command."""
    side_partition: str | None = None
    """Partition of side jobs. null: partition, with its constraint."""


class Volume(Section):
    """A volume of a pod or a Batch job, mounted at a path."""

    path: str
    """Absolute mount path."""
    claim: str | None = None
    """Kubernetes: a persistent volume claim."""
    efs: str | None = None
    """AWS Batch: an EFS file system id."""
    access_point: str | None = None
    """AWS Batch: the EFS access point, which sets user and folder."""
    host: str | None = None
    """Folder of the node. Rejected on Kubernetes unless allow_host_paths is true."""


class Patch(Section):
    """A change of rendered objects of one kind, as `kubectl patch` would make it."""

    kind: Literal["Pod", "JobSet", "TrainJob", "PyTorchJob", "Job", "NetworkPolicy", "PodGroup"]
    """Kind of the objects; Pod: the pods of the job and of side jobs; Job: side jobs."""
    merge: dict[str, Any] | None = None
    """Strategic merge patch."""
    operations: Annotated[tuple[dict[str, Any], ...], Field(strict=False)] = ()
    """Operations of a JSON patch (RFC 6902)."""


class Kubernetes(Section):
    """Settings for `launch --on kubernetes`."""

    target: Literal["jobset", "trainjob", "pytorchjob"] = "jobset"
    """Object to create: JobSet, Kubeflow Trainer's TrainJob, or the training operator's PyTorchJob.
    """
    context: str | None = None
    """Context of your kubeconfig. Required: the current context is never assumed."""
    namespace: str = "default"
    """Namespace of all objects."""
    queue: str | None = None
    """Kueue's local queue, which admits all pods together; with scheduler=volcano, Volcano's queue.
    """
    scheduler: Literal["default", "volcano"] = "default"
    """Scheduler of the pods. volcano: gang scheduling; not for TrainJobs."""
    priority_class: str | None = None
    """Priority class of the pods."""
    service_account: str | None = None
    """Service account of the pods. null: the namespace's default, without its token."""
    node_selector: dict[str, str] = Field(default={})
    """Node labels to require, in addition to the instance type."""
    side_node_selector: dict[str, str] = Field(default={})
    """Node labels for side jobs, instead of node_selector and the instance type."""
    tolerations: Annotated[tuple[str, ...], Field(strict=False)] = ("nvidia.com/gpu",)
    """Taints that pods tolerate: key, key=value or key:Effect."""
    topology: Literal["none", "preferred", "required"] = "none"
    """Kueue's topology hint, which places pods of a run close together."""
    efa: Annotated[int, Field(ge=0)] | Auto = "auto"
    """EFA interfaces per pod. auto: all of the instance type."""
    shared_memory_gib: Annotated[int, Field(ge=1)] = 64
    """Size of /dev/shm in GiB."""
    ttl_s: Annotated[int, Field(ge=0)] = 86400
    """Seconds that the cluster keeps a finished job."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """Restarts of the whole job after lost pods."""
    runtime: str = "shardyard"
    """TrainJob: name of the ClusterTrainingRuntime, which is rendered too."""
    etcd: str | None = None
    """PyTorchJob: host:port of the etcd for rendezvous. null: elastic.rendezvous."""
    etcd_secret: str | Auto | None = "auto"
    """Secret with ca.crt, tls.crt and tls.key for etcd. auto: SERVICE-tls of Shardyard's own etcd;
    null: no TLS."""
    allow_host_paths: bool = False
    """Allow volumes that are folders of the node."""
    labels: dict[str, str] = Field(default={})
    """Further labels of the run's objects and pods; see also run.tags."""
    annotations: dict[str, str] = Field(default={})
    """Further annotations of the run's objects and pods."""
    patches: Annotated[tuple[Patch, ...], Field(strict=False)] = ()
    """Changes of the rendered objects, such as {kind: Pod, merge: {spec: {hostNetwork: true}}}; see
    docs/teams.md."""


OF_QUEUES = ("subnets", "security_groups", "instance_role", "ami", "user_data")
"""Settings of before of launch.aws_batch: they are the queue's, not a run's."""


class AwsBatch(Section):
    """Settings for `launch --on aws-batch`."""

    region: str | None = None
    """AWS region. null: from your AWS configuration."""
    queue: str | None = None
    """Job queue; `shardyard cluster create kind=batch` creates one."""
    side_queue: str | None = None
    """Job queue of side jobs, on EC2. null: queue."""
    job_role: str | None = None
    """ARN of the container's IAM role."""
    execution_role: str | None = None
    """ARN of the role that pulls the image and reads secrets."""
    log_group: str = "/aws/batch/job"
    """CloudWatch log group of the containers."""
    attempts: Annotated[int, Field(ge=1, le=10)] = 3
    """Attempts of the job by Batch."""
    vcpus: Annotated[int, Field(ge=1)] | None = None
    """vCPUs of a container. null: all of cluster.instance."""
    memory_gib: Annotated[int, Field(ge=1)] | None = None
    """Memory of a container in GiB. null: what cluster.instance can give."""
    shared_memory_gib: Annotated[int, Field(ge=1)] = 64
    """Size of /dev/shm in GiB."""
    tags: dict[str, str] = Field(default={})
    """Further tags of job definition, job and ECS tasks; see also run.tags."""
    share_identifier: str | None = None
    """Share identifier, for a queue with a fair-share scheduling policy."""
    scheduling_priority: Annotated[int, Field(ge=0, le=9999)] | None = None
    """Scheduling priority within the share; higher goes first."""


class Ssh(Section):
    """Settings for `launch --on ssh`."""

    hosts: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Hosts as [user@]host[:port], rank 0 first."""
    hostfile: str | None = None
    """File with one host a line, such as `gpu1 slots=8`, instead of hosts."""
    python: str = "auto"
    """Python on the hosts. auto: the one that runs this command."""
    config_file: str | None = None
    """Configuration file for ssh. null: ~/.ssh/config."""
    rendezvous_host: str | None = None
    """Address of the first host for the others. null: its HostName for ssh."""
    rendezvous_port: Annotated[int, Field(ge=1024, le=65535)] | Auto = "auto"
    """Port of the rendezvous. auto: a free one."""


class Side(Section):
    """Resources of side jobs: one node without accelerators that prepares, exports, fetches or
    probes."""

    cpus: Annotated[int, Field(ge=1)] = 4
    """CPU cores of a side job. On local, it uses the whole machine."""
    memory_gib: Annotated[int, Field(ge=1)] = 12
    """Memory of a side job in GiB; the default fits a 16 GiB node. On local, it uses the whole
    machine."""


def as_text(value: object) -> object:
    """A number or a yes as the text that a variable holds: ``1``, ``0.5``, ``true``."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else value


class Launch(OpenSection):
    """Submission to a scheduler. `train` uses only `launch.env`."""

    image: str | None = None
    """Container image. Use a digest (name@sha256:...) to pin it."""
    run_dir: str | None = None
    """Parent folder of the run as the nodes see it. null: run.dir."""
    time_limit: (
        Annotated[str, Field(pattern=r"^\d+(\.\d+)?(min|h|d)$", description="a time with its unit")]
        | None
    ) = None
    """Time limit, such as 90min, 24h or 2d. null: the scheduler's."""
    env: dict[str, Annotated[str, BeforeValidator(as_text)]] = Field(default={})
    """Environment variables of every process, also with `train`. Use `secrets` for secrets."""
    code: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Folders, files or globs of your own code to make importable on the nodes; not on AWS Batch.
    """
    volumes: Annotated[tuple[Volume, ...], Field(strict=False)] = ()
    """Volumes to mount into containers."""
    image_paths: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Folders that exist only on the nodes, in the image or on a disk; not checked on this machine.
    """
    max_usd: Annotated[float, Field(gt=0)] | None = None
    """Cost limit in dollars: a plan above it is rejected, and a run that reaches it drains."""
    stop_idle_after: Annotated[str, Field(pattern=r"^\d+(\.\d+)?(min|h|d)$")] | None = None
    """Drain a run without a finished step for this long, such as 30min, including its start. null:
    never."""
    require_efa: bool = False
    """Fail if the network uses sockets although the instance has EFA."""
    side: Side = Side()
    """Resources of side jobs."""
    slurm: Slurm = Slurm()
    """Settings only for Slurm."""
    kubernetes: Kubernetes = Kubernetes()
    """Settings only for Kubernetes."""
    aws_batch: AwsBatch = AwsBatch()
    """Settings only for AWS Batch."""
    ssh: Ssh = Ssh()
    """Settings only for ssh."""
