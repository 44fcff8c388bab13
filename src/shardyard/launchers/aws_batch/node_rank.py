"""Place of a node of a multi-node parallel job, as AWS Batch gives it: `--place aws-batch`."""

import socket
from collections.abc import Callable

from shardyard.launchers.node_rank import PORT, NodeAssignment, Variables


def own_address() -> str:
    """An address of this machine that others in its network reach."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # RFC 5737, for examples; sends nothing
            return str(probe.getsockname()[0])
        except OSError:  # no default route
            return socket.gethostbyname(socket.gethostname())


def in_job(variables: Variables, own_address: Callable[[], str] = own_address) -> NodeAssignment:
    """Return the place of a node of a multi-node parallel job.

    The variable with the main node's address is set on the other nodes only.
    Source: docs.aws.amazon.com/batch/latest/userguide/multi-node-parallel-jobs.html

    Args:
        own_address: Called only on the main node, which does not get its own address.
    """
    nodes = variables.number("AWS_BATCH_JOB_NUM_NODES")
    main = variables.number("AWS_BATCH_JOB_MAIN_NODE_INDEX")
    node_rank = (variables.number("AWS_BATCH_JOB_NODE_INDEX") - main) % nodes
    job = variables.text("AWS_BATCH_JOB_ID").partition("#")[0]  # a node's own id is <job>#<node>
    return NodeAssignment(
        is_container=True,
        node_rank=node_rank,
        nodes=nodes,
        host=variables.text("AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS")
        if node_rank
        else own_address(),
        port=PORT,
        # The attempt is part of it, as a retried job keeps its id.
        session=f"{job}-{variables.number('AWS_BATCH_JOB_ATTEMPT')}",
    )
