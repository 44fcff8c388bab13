"""`--place slurm`: where a node of a batch job stands, as Slurm says it."""

from shardyard.launchers.place import Place, Variables
from shardyard.launchers.slurm.nodelist import first_host

_PORTS = range(20000, 30000)
"""Below the ports that Linux gives to clients; jobs that share a node differ by their ids."""


def in_job(variables: Variables) -> Place:
    """Read from the variables of sbatch(1)."""
    job = variables.number("SLURM_JOB_ID")
    return Place(
        node_rank=variables.number("SLURM_NODEID"),
        nodes=variables.number("SLURM_JOB_NUM_NODES"),
        host=first_host(variables.text("SLURM_JOB_NODELIST")),
        port=_PORTS[job % len(_PORTS)],
        session=f"{job}.{variables.number('SLURM_RESTART_COUNT', 0)}",  # unset at the first start
    )
