"""Place of a pod: `--place jobset`, `trainjob`, `pytorchjob`.

Each object's own controller gives it, and our manifest the rest.
"""

from shardyard.errors import RequestError
from shardyard.launchers.node_rank import PORT, NodeAssignment, Variables


def in_jobset(variables: Variables) -> NodeAssignment:
    """JOB_COMPLETION_INDEX is Kubernetes' own."""
    return NodeAssignment(
        is_container=True,
        node_rank=variables.number("JOB_COMPLETION_INDEX"),
        nodes=variables.number("SHARDYARD_NODES"),
        host=variables.text("SHARDYARD_HOST"),
        port=variables.number("SHARDYARD_PORT", PORT),
        session=variables.text("SHARDYARD_SESSION"),
    )


def in_trainjob(variables: Variables) -> NodeAssignment:
    """PET_* are the trainer's, whose rendezvous is static."""
    return NodeAssignment(
        is_container=True,
        node_rank=variables.number("PET_NODE_RANK"),
        nodes=variables.number("PET_NNODES"),
        host=variables.text("PET_MASTER_ADDR"),
        port=variables.number("PET_MASTER_PORT", PORT),
        session=variables.text("SHARDYARD_SESSION"),
    )


def in_pytorchjob(variables: Variables) -> NodeAssignment:
    """An elastic PyTorchJob. Its PET_NNODES is min:max; the most that may come is what counts.

    Our manifest says where node 0 is, and which etcd its nodes meet in, if any.
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
    return NodeAssignment(
        is_container=True,
        node_rank=variables.number("RANK"),
        nodes=int(most),
        # An IPv6 address has brackets in front of its port.
        host=host.strip("[]"),
        own_host=variables.optional("SHARDYARD_OWN_HOST"),
        port=int(port),
        session=variables.text("SHARDYARD_SESSION"),
        rendezvous=variables.optional("SHARDYARD_RENDEZVOUS"),
    )
