"""Where a process stands among the nodes of its job, as each scheduler says it."""

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from shardyard.errors import RequestError
from shardyard.launch.nodelist import first_host

PlaceKind = Literal["slurm", "jobset", "trainjob", "pytorchjob", "aws-batch", "given"]
KINDS: tuple[PlaceKind, ...] = get_args(PlaceKind)

PORT = 29400
"""Of the rendezvous where node 0 has a network address of its own, as pods have."""
_SLURM_PORTS = range(20000, 30000)
"""Below the ports that Linux gives to clients; jobs that share a node differ by their ids."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """One node's place; read from the environment by ``place_in``."""

    node_rank: int
    nodes: int
    host: str
    """Where node 0 serves the rendezvous, as all nodes can reach it."""
    port: int
    session: str
    """The same on all nodes of one start of the job, and new at each (requeue, retry, restart)."""

    @property
    def endpoint(self) -> str:
        """HOST:PORT of the rendezvous."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def own_address() -> str:
    """An address of this machine that others in its network reach."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # RFC 5737, for examples; sends nothing
            return str(probe.getsockname()[0])
        except OSError:  # no default route
            return socket.gethostbyname(socket.gethostname())


def place_in(
    kind: str, environ: Mapping[str, str], *, own_address: Callable[[], str] = own_address
) -> Place:
    """Read this node's place from the variables that a scheduler sets.

    Args:
        kind: One of ``KINDS``, but not ``given``: that one is given by options.
        own_address: Asked on AWS Batch's main node alone, which is not told its own address.

    Raises:
        RequestError: A variable is missing or is no number.
    """
    variables = _Variables(kind, environ)
    match kind:
        case "slurm":
            return _in_slurm(variables)
        case "jobset":
            return _in_jobset(variables)
        case "trainjob":
            return _in_trainjob(variables)
        case "pytorchjob":
            return _in_pytorchjob(variables)
        case "aws-batch":
            return _in_aws_batch(variables, own_address)
    raise RequestError(
        f"--place {kind} is no place that can be read from the environment. "
        f"Use one of {', '.join(KINDS)}."
    )


class _Variables:
    """The environment of a node; what is missing is an error that names it."""

    def __init__(self, kind: str, environ: Mapping[str, str]) -> None:
        self._kind = kind
        self._environ = environ

    def optional(self, name: str) -> str | None:
        return self._environ.get(name) or None

    def text(self, name: str) -> str:
        value = self.optional(name)
        if value is None:
            raise RequestError(
                f"the variable {name} is not set. --place {self._kind} reads this node's place "
                "from it. Start this command inside such a job, or say the place yourself with "
                "--place given --node-rank K --nodes N --rendezvous HOST:PORT --session S."
            )
        return value

    def number(self, name: str, default: int | None = None) -> int:
        if default is not None and self.optional(name) is None:
            return default
        value = self.text(name)
        if not value.isdecimal():
            raise RequestError(
                f"the variable {name}={value!r} is no number. --place {self._kind} reads this "
                "node's place from it. Whatever started this command must set it as the scheduler "
                "does."
            )
        return int(value)


def _in_slurm(variables: _Variables) -> Place:
    job = variables.number("SLURM_JOB_ID")
    return Place(
        node_rank=variables.number("SLURM_NODEID"),
        nodes=variables.number("SLURM_JOB_NUM_NODES"),
        host=first_host(variables.text("SLURM_JOB_NODELIST")),
        port=_SLURM_PORTS[job % len(_SLURM_PORTS)],
        session=f"{job}.{variables.number('SLURM_RESTART_COUNT', 0)}",  # unset at the first start
    )


def _in_jobset(variables: _Variables) -> Place:
    return Place(
        node_rank=variables.number("JOB_COMPLETION_INDEX"),
        nodes=variables.number("SHARDYARD_NODES"),
        host=variables.text("SHARDYARD_HOST"),
        port=variables.number("SHARDYARD_PORT", PORT),
        session=variables.text("SHARDYARD_SESSION"),
    )


def _in_trainjob(variables: _Variables) -> Place:
    return Place(
        node_rank=variables.number("PET_NODE_RANK"),
        nodes=variables.number("PET_NNODES"),
        host=variables.text("PET_MASTER_ADDR"),
        port=variables.number("PET_MASTER_PORT", PORT),
        session=variables.text("SHARDYARD_SESSION"),
    )


def _in_pytorchjob(variables: _Variables) -> Place:
    """An elastic PyTorchJob. Its PET_NNODES is min:max; the most that may come is what counts.

    Where its policy names an etcd, the operator's endpoint is that; our manifest says where node 0
    is in any case.
    """
    endpoint = variables.optional("SHARDYARD_HOST")
    if endpoint is None:
        endpoint = variables.text("PET_RDZV_ENDPOINT")
    else:
        endpoint += f":{variables.number('SHARDYARD_PORT', PORT)}"
    host, _, port = endpoint.rpartition(":")
    nodes = variables.text("PET_NNODES")
    _, _, most = nodes.rpartition(":")
    if not host or not port.isdecimal() or not most.isdecimal():
        raise RequestError(
            f"the variables PET_RDZV_ENDPOINT={endpoint!r} and PET_NNODES={nodes!r} are not "
            "HOST:PORT and MIN:MAX. The training operator sets them for a PyTorchJob with "
            "elasticPolicy. Check that the job has one."
        )
    return Place(
        node_rank=variables.number("RANK"),
        nodes=int(most),
        host=host.strip("[]"),
        port=int(port),
        session=variables.text("SHARDYARD_SESSION"),
    )


def _in_aws_batch(variables: _Variables, own_address: Callable[[], str]) -> Place:
    """A node of a multi-node parallel job.

    The variable with the main node's address is set on the other nodes only.
    Source: docs.aws.amazon.com/batch/latest/userguide/multi-node-parallel-jobs.html
    """
    nodes = variables.number("AWS_BATCH_JOB_NUM_NODES")
    main = variables.number("AWS_BATCH_JOB_MAIN_NODE_INDEX")
    node_rank = (variables.number("AWS_BATCH_JOB_NODE_INDEX") - main) % nodes
    job = variables.text("AWS_BATCH_JOB_ID").partition("#")[0]  # a node's own id is <job>#<node>
    return Place(
        node_rank=node_rank,
        nodes=nodes,
        host=variables.text("AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS")
        if node_rank
        else own_address(),
        port=PORT,
        session=f"{job}-{variables.number('AWS_BATCH_JOB_ATTEMPT')}",
    )
