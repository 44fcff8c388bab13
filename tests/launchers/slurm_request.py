"""Requests to launch on Slurm, as the command line makes them."""

from dataclasses import replace
from pathlib import Path

from shardyard.config.load import dump_recipe, load_recipe
from shardyard.hardware.catalogue import instance
from shardyard.hardware.cluster import cluster_of
from shardyard.launchers.base import LaunchRequest, SideJob

CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "llama-tiny-cpu-4": (4, ("cluster.device=cpu",)),
    "llama-tiny-cpu-elastic": (4, ("cluster.device=cpu", "elastic.min_nodes=2")),
    "llama-tiny-cpu-short": (
        2,
        (
            "cluster.device=cpu",
            "launch.slurm.partition=short",
            "launch.slurm.signal_before_s=60",
            "elastic.drain_timeout_s=60",
            "launch.time_limit=5min",
        ),
    ),
    "llama-tiny-cpu-nasty-values": (
        2,
        ("cluster.device=cpu", "launch.env={A: \"it's\", B: '$(x) `y` \"z\"', C: '%j #'}"),
    ),
    "llama-tiny-cpu-secrets": (
        1,
        ("cluster.device=cpu", "secrets={HF_TOKEN: env, OTHER: 'env:MY_OTHER', KEY: 'file:/k'}"),
    ),
    "llama2-7b-p5.48xlarge-2": (
        2,
        ("model.preset=llama2-7b", "cluster.instance=p5.48xlarge", "launch.time_limit=2d"),
    ),
    "llama2-7b-p4d.24xlarge-4-no-requeue": (
        4,
        (
            "model.preset=llama2-7b",
            "cluster.instance=p4d.24xlarge",
            "launch.slurm.requeue=false",
        ),
    ),
    "llama2-13b-p4de.24xlarge-3-account": (
        3,
        (
            "model.preset=llama2-13b",
            "cluster.instance=p4de.24xlarge",
            "launch.slurm.account=team",
            "launch.slurm.partition=main",
            "launch.slurm.qos=normal",
        ),
    ),
    "llama2-7b-g5.12xlarge-2-constraint": (
        2,
        (
            "model.preset=llama2-7b",
            "cluster.instance=g5.12xlarge",
            "launch.slurm.constraint=fast&quiet",
        ),
    ),
    "llama3-8b-p6-b200.48xlarge-2-slow-drain": (
        2,
        (
            "model.preset=llama3-8b",
            "cluster.instance=p6-b200.48xlarge",
            "elastic.drain_timeout_s=600",
            "launch.slurm.signal_before_s=900",
            "launch.time_limit=12h",
        ),
    ),
    "llama3-8b-p5.48xlarge-2-container": (
        2,
        (
            "model.preset=llama3-8b",
            "cluster.instance=p5.48xlarge",
            "launch.slurm.container_image=registry.example/shardyard@sha256:0123",
            "launch.slurm.container_mounts=['/fsx:/fsx', '/data:/data:ro']",
        ),
    ),
    "llama2-7b-p4d.24xlarge-2-options": (
        2,
        (
            "model.preset=llama2-7b",
            "cluster.instance=p4d.24xlarge",
            "launch.slurm.options={exclude: '127.0.0.4', gres: 'gpu:a100:8', switches: '1@10:00', "
            "contiguous: true, nice: 7, auto-resume: 1}",
        ),
    ),
    "llama2-7b-p5.48xlarge-2-no-gres": (
        2,
        (
            "model.preset=llama2-7b",
            "cluster.instance=p5.48xlarge",
            "launch.slurm.request_gpus=false",
        ),
    ),
    "llama-1b-dl1.24xlarge-2": (2, ("model.preset=llama-1b", "cluster.instance=dl1.24xlarge")),
    "llama-tiny-unlisted-gpus-1": (1, ("cluster.device=cuda",)),
    "side-p5.48xlarge": (
        1,
        (
            "model.preset=llama2-7b",
            "cluster.instance=p5.48xlarge",
            "launch.slurm.partition=main",
            "launch.slurm.constraint=fast",
            "launch.side={cpus: 2, memory_gib: 3}",
            "launch.time_limit=2h",
        ),
    ),
    "side-own-partition-container": (
        1,
        (
            "model.preset=llama2-7b",
            "cluster.instance=p5.48xlarge",
            "launch.slurm.partition=main",
            "launch.slurm.constraint=fast",
            "launch.slurm.side_partition=short",
            "launch.slurm.container_image=registry.example/shardyard@sha256:0123",
            "launch.slurm.container_mounts=['/fsx:/fsx']",
            "secrets={HF_TOKEN: env}",
        ),
    ),
}
"""Requests whose scripts are kept in golden/slurm and shown to a real sbatch: nodes, overrides."""

SIDE = SideJob(kind="export", arguments={"step": 7, "to": "/fsx/it's"})


def golden_request(name: str) -> LaunchRequest:
    """One of ``CASES``, with names that are the same on every machine."""
    nodes, overrides = CASES[name]
    words = ("launch.slurm.python=/opt/shardyard/bin/python", *overrides)
    if "launch.slurm.container_image" in " ".join(overrides):
        words = overrides
    request = slurm_request(*words, nodes=nodes, run_dir=f"/shared/it's 100%/runs/{name}")
    return replace(request, side=SIDE) if name.startswith("side-") else request


def slurm_request(
    *overrides: str, run_dir: str | Path = "/shared/runs/tiny", nodes: int = 2, devices: int = 1
) -> LaunchRequest:
    """A request for CPU nodes, or for those of ``cluster.instance`` if an override names one."""
    recipe = load_recipe(
        [],
        [
            "model.preset=llama-tiny",
            f"cluster.nodes={nodes}",
            *(["cluster.device=cpu"] if not any("cluster." in word for word in overrides) else []),
            *overrides,
        ],
    )
    cluster = None
    if recipe.cluster.instance is not None:
        cluster = cluster_of(instance(recipe.cluster.instance), nodes)
    return LaunchRequest(
        run_id=Path(run_dir).name,
        recipe=recipe,
        recipe_text=dump_recipe(recipe),
        nodes=nodes,
        devices_per_node=cluster.devices_per_node if cluster else devices,
        cluster=cluster,
        run_dir=str(run_dir),
    )
