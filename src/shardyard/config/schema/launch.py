"""The section ``launch`` of a recipe, with one for each launcher."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from shardyard.config.schema.base import Auto, OpenSection, Section


class Slurm(Section):
    """`launch --on slurm`."""

    partition: str | None = None
    """Partition; null: the cluster's default."""
    account: str | None = None
    """Account that pays; null: your default."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Features that nodes must have, in sbatch's syntax."""
    request_gpus: bool = True
    """Whether --gpus-per-node is sent; false where the cluster's Slurm manages no GPUs."""
    options: dict[str, str | int | bool] = Field(default={})
    """Other options of sbatch by their long names, such as {exclude: node7, switches: 1}."""
    requeue: bool = True
    """Start again after a lost node and at the time limit, from the newest checkpoint."""
    signal_before_s: Annotated[int, Field(ge=10)] = 120
    """Seconds before the time limit at which the run drains."""
    container_image: str | None = None
    """Image for Pyxis/Enroot (srun --container-image); null: the nodes' own Python."""
    container_mounts: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Paths mounted into the container, source:target."""
    python: str = "auto"
    """Python on the nodes; auto: the one that runs this command."""
    side_partition: str | None = None
    """Partition of side jobs; null: partition, with its constraint."""


class Volume(Section):
    """A volume of a pod or a Batch job, mounted at a path."""

    path: str
    """Absolute path at which the volume is mounted."""
    claim: str | None = None
    """Kubernetes: a persistent volume claim."""
    efs: str | None = None
    """AWS Batch: an EFS file system id."""
    access_point: str | None = None
    """AWS Batch: the EFS access point that says as whom, and below which folder."""
    host: str | None = None
    """Folder of the node. Rejected on Kubernetes unless allow_host_paths is true."""


class Kubernetes(Section):
    """`launch --on kubernetes`."""

    target: Literal["jobset", "trainjob", "pytorchjob"] = "jobset"
    """JobSet, Kubeflow Trainer's TrainJob, or the training operator's PyTorchJob."""
    context: str | None = None
    """Context of the kubeconfig; must be given, the current one is never assumed."""
    namespace: str = "default"
    """Namespace of all objects."""
    queue: str | None = None
    """Kueue's local queue, in which all pods are admitted together; or Volcano's (scheduler)."""
    scheduler: Literal["default", "volcano"] = "default"
    """Scheduler of the pods; volcano places all pods of a job together. Not for TrainJobs."""
    priority_class: str | None = None
    """Priority class of the pods."""
    service_account: str | None = None
    """Service account of the pods; null: the namespace's default, without its token."""
    node_selector: dict[str, str] = Field(default={})
    """Labels that nodes must have, in addition to the instance type."""
    side_node_selector: dict[str, str] = Field(default={})
    """Labels that nodes of side jobs must have, in place of node_selector and the instance type."""
    tolerations: Annotated[tuple[str, ...], Field(strict=False)] = ("nvidia.com/gpu",)
    """Taints that pods tolerate: key, key=value or key:Effect."""
    topology: Literal["none", "preferred", "required"] = "none"
    """Kueue's topology hint: pods of one run near each other."""
    efa: Annotated[int, Field(ge=0)] | Auto = "auto"
    """EFA interfaces of a pod; auto: all of the instance type."""
    shared_memory_gib: Annotated[int, Field(ge=1)] = 64
    """Size of /dev/shm."""
    ttl_s: Annotated[int, Field(ge=0)] = 86400
    """Seconds that a finished job is kept by the cluster."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """Times that the whole job is started again after a lost pod."""
    runtime: str = "shardyard"
    """TrainJob: the ClusterTrainingRuntime, rendered too."""
    etcd: str | None = None
    """PyTorchJob: host:port of the etcd in which its nodes meet; null: elastic.rendezvous."""
    etcd_secret: str | Auto | None = "auto"
    """Secret with ca.crt, tls.crt, tls.key for it; auto: SERVICE-tls of our own; null: no TLS."""
    allow_host_paths: bool = False
    """Whether volumes may be folders of the node."""


OF_QUEUES = ("subnets", "security_groups", "instance_role", "ami", "user_data")
"""Settings of before of launch.aws_batch: they are the queue's, not a run's."""


class AwsBatch(Section):
    """`launch --on aws-batch`."""

    region: str | None = None
    """AWS region; null: that of your AWS configuration."""
    queue: str | None = None
    """Job queue; `shardyard cluster create kind=batch` makes one."""
    side_queue: str | None = None
    """Job queue of side jobs, on EC2; null: queue."""
    job_role: str | None = None
    """ARN of the role that the container acts as."""
    execution_role: str | None = None
    """ARN of the role that pulls the image and reads secrets."""
    log_group: str = "/aws/batch/job"
    """Log group in CloudWatch to which containers write."""
    attempts: Annotated[int, Field(ge=1, le=10)] = 3
    """Times that Batch starts the job."""
    vcpus: Annotated[int, Field(ge=1)] | None = None
    """VCPUs of a container; null: all of cluster.instance."""
    memory_gib: Annotated[int, Field(ge=1)] | None = None
    """Memory of a container; null: what cluster.instance can give."""
    shared_memory_gib: Annotated[int, Field(ge=1)] = 64
    """Size of /dev/shm."""


class Side(Section):
    """One node without accelerators that prepares, exports, fetches or probes for a run."""

    cpus: Annotated[int, Field(ge=1)] = 4
    """Cores of a side job; on local it has the whole machine."""
    memory_gib: Annotated[int, Field(ge=1)] = 12
    """Memory of a side job, which a node of 16 GiB can give; on local it has the whole machine."""


def as_text(value: object) -> object:
    """A number or a yes as the text that a variable holds: ``1``, ``0.5``, ``true``."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else value


class Launch(OpenSection):
    """Submission of the run to a scheduler; `train` reads only `env`."""

    image: str | None = None
    """Container image; by digest (name@sha256:...) where it must not change under a run."""
    run_dir: str | None = None
    """The run's parent folder as the nodes see it; null: run.dir."""
    time_limit: (
        Annotated[str, Field(pattern=r"^\d+(\.\d+)?(min|h|d)$", description="a time with its unit")]
        | None
    ) = None
    """Longest time, such as 90min, 24h or 2d; null: the scheduler's own limit."""
    env: dict[str, Annotated[str, BeforeValidator(as_text)]] = Field(default={})
    """Environment of every process, also of `train`; secrets have a section of their own."""
    code: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Folders, files or globs of your own code, importable on nodes; not on AWS Batch."""
    volumes: Annotated[tuple[Volume, ...], Field(strict=False)] = ()
    """Volumes to mount into containers."""
    image_paths: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Folders that nodes hold by themselves, in the image or on a disk: not looked for here."""
    max_usd: Annotated[float, Field(gt=0)] | None = None
    """Most that the run may cost: a plan above it is rejected, and a run that reaches it drains."""
    stop_idle_after: Annotated[str, Field(pattern=r"^\d+(\.\d+)?(min|h|d)$")] | None = None
    """Drain a run that makes no step for so long, such as 30min; its start counts. null: never."""
    require_efa: bool = False
    """Fail where the network turns out to be sockets although the instance has EFA."""
    side: Side = Side()
    """Resources of side jobs."""
    slurm: Slurm = Slurm()
    """Settings only for Slurm."""
    kubernetes: Kubernetes = Kubernetes()
    """Settings only for Kubernetes."""
    aws_batch: AwsBatch = AwsBatch()
    """Settings only for AWS Batch."""
