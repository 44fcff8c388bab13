"""The recipe as a drill runs it: short, on this machine, in a folder of the drill's own."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardyard.config.cluster_choice import devices_of_node
from shardyard.config.schema.recipe import Recipe
from shardyard.control.request import Request
from shardyard.errors import RequestError

LEAST_STEPS = 10
"""Fewer leave no room for a checkpoint, a fault and what comes after it."""
_SAVES = 6
"""Checkpoints of one run, so that a fault has one before it and one after it."""
_ELSEWHERE = ("slurm", "kubernetes", "aws_batch", "ssh", "image")


@dataclass(frozen=True, kw_only=True)
class DrillRecipe:
    """Settings that every run of a drill shares."""

    words: tuple[str, ...]
    """Recipe files and overrides, the drill's own at the end."""
    steps: int
    save_every: int
    nodes: int
    devices: int
    """Ranks on each node; as the twin had them, once it has run."""
    is_exact: bool
    """Whether the recipe promises the same bits for any number of ranks."""
    min_nodes: int = 1
    """Fewest nodes with which a run continues."""
    checks_bits: bool = False
    """Whether ranks compare what each of them computes."""
    replicas: int | None = None
    """Ranks that hold each weight alike, as the twin had them; None: it has not run yet."""

    def of(self, runs_dir: Path, run_id: str) -> tuple[str, ...]:
        """The words of one run."""
        return (*self.words, f"run.dir={runs_dir}", f"run.id={run_id}")


def read_drill_recipe(words: Sequence[str], *, steps: int) -> DrillRecipe:
    """Check a recipe, and bound it.

    Raises:
        RequestError: It is wrong, or a drill cannot run it.
    """
    recipe = Request.read(words, runs_here=True).recipe
    _check_local(recipe)
    if recipe.phases:
        raise RequestError(
            "phases: a drill runs one short piece of training and compares it step by step; a run "
            "of several phases cannot be drilled. Drill a recipe of one of them."
        )
    save_every = max(1, steps // _SAVES)
    fewest = recipe.elastic.min_nodes
    lengths = [name for name in ("tokens", "samples", "epochs") if getattr(recipe.run, name)]
    own = [
        f"run.steps={steps}",
        *(f"run.{name}=null" for name in lengths),
        f"checkpoint.every={save_every}",
        "observe.sample_ids=true",
    ]
    return DrillRecipe(
        words=(*words, *own),
        steps=steps,
        save_every=save_every,
        nodes=recipe.cluster.nodes,
        devices=devices_of_node(recipe.cluster) or 1,
        is_exact=str(recipe.precision.reduce) == "exact",
        min_nodes=recipe.cluster.nodes if fewest == "auto" else fewest,
        checks_bits=recipe.elastic.check_bits_every is not None,
    )


def _check_local(recipe: Recipe) -> None:
    cluster, launch = recipe.cluster, recipe.launch.model_fields_set
    found = [f"cluster.{name}" for name in ("instance", "file") if getattr(cluster, name)]
    found += [f"launch.{name}" for name in _ELSEWHERE if name in launch]
    if found:
        raise RequestError(
            f"{', '.join(found)}: the recipe is one for a cluster, and a drill kills and stops "
            "processes, which it does only on this machine. Take these settings out, and let "
            "cluster.nodes and cluster.devices be what this machine can run (CPU processes with "
            "cluster.device=cpu)."
        )
