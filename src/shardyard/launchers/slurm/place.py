"""`--place slurm`: where a node of a batch job stands, as Slurm says it."""

from shardyard.launchers.node_rank import Place, Variables
from shardyard.launchers.slurm.nodelist import host_of

_PORTS = range(20000, 30000)
"""Below the ports that Linux gives to clients; jobs that share a node differ by their ids."""


def in_job(variables: Variables) -> Place:
    """Read from the variables of sbatch(1)."""
    job, node_rank = variables.number("SLURM_JOB_ID"), variables.number("SLURM_NODEID")
    hosts = variables.text("SLURM_JOB_NODELIST")
    return Place(
        node_rank=node_rank,
        nodes=variables.number("SLURM_JOB_NUM_NODES"),
        host=host_of(hosts, 0),
        own_host=host_of(hosts, node_rank),
        port=_PORTS[job % len(_PORTS)],
        session=f"{job}.{variables.number('SLURM_RESTART_COUNT', 0)}",  # unset at the first start
    )
