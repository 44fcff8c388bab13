"""Slurm's clients behind a folder in PATH that writes down each call and then runs the real one."""

import shutil
from dataclasses import replace
from pathlib import Path

from tests.launchers.slurm_cluster import SlurmCluster

_CLIENTS = ("sacct", "scontrol", "sinfo", "squeue")


def counted(cluster: SlurmCluster, folder: Path) -> tuple[SlurmCluster, Path]:
    """The same cluster, and a file that gets a line, the client's name, for each call."""
    calls = folder / "calls"
    calls.touch()
    (folder / "bin").mkdir()
    for name in _CLIENTS:
        real, ours = shutil.which(name), folder / "bin" / name
        ours.write_text(f'#!/bin/sh\necho {name} >> "{calls}"\nexec {real} "$@"\n')
        ours.chmod(0o755)
    path = f"{folder / 'bin'}:{cluster.env['PATH']}"
    return replace(cluster, env={**cluster.env, "PATH": path}), calls
