"""What can be planned but not trained yet: asked by the verbs that prepare or start a training.

The planner looks further than the training half has come: `plan` and `config` accept what is
refused here, and say that it is. What can never be done is refused by all (``config/check.py``).
"""

from collections.abc import Callable, Iterable

from shardyard.config.machines import chosen_cluster
from shardyard.config.schema import Recipe
from shardyard.errors import Problem, RequestError
from shardyard.families.presets import PRESETS, preset_named
from shardyard.families.registry import trained_types
from shardyard.hardware.cluster import Cluster


def trainable_problems(recipe: Recipe) -> list[Problem]:
    """Every setting of a recipe that `plan` can predict and `train` cannot carry out yet.

    A model in a folder or on the hub is judged by its config.json.
    """
    return [problem for look in _LOOKS for problem in look(recipe)]


def _precision(recipe: Recipe) -> Iterable[Problem]:
    if recipe.precision.compute == "fp16":
        yield _planned_only("precision.compute", "fp16", "a run in fp16", "bf16, fp32 or fp8")


def _offload(recipe: Recipe) -> Iterable[Problem]:
    offload = recipe.memory.offload
    if offload in ("params", "optimizer"):
        remedy = "activations or none; memory.recompute and parallel.zero=3 save memory too"
        yield _planned_only("memory.offload", offload, f"offloading {offload}", remedy)


def _device(recipe: Recipe) -> Iterable[Problem]:
    cluster, chosen = recipe.cluster, _chosen(recipe)
    remedy = "a machine with cuda, xpu or hpu"
    if cluster.device == "xla":
        yield _planned_only("cluster.device", "xla", "a run on Trainium or TPU", remedy)
    elif chosen is not None and chosen.accelerator.device == "xla":
        setting = "file" if cluster.instance is None else "instance"
        what = f"a run on {chosen.accelerator.name}"
        yield _planned_only(f"cluster.{setting}", getattr(cluster, setting), what, remedy)


def _chosen(recipe: Recipe) -> Cluster | None:
    """The machines that a recipe names; None: this one, or another check says what is wrong."""
    try:
        return chosen_cluster(recipe.cluster)
    except RequestError:
        return None


def _family(recipe: Recipe) -> Iterable[Problem]:
    preset = preset_named(recipe.model.preset)
    if preset is None or preset.shape.family.is_trained:
        return
    others = [name for name, other in PRESETS.items() if other.shape.family.is_trained]
    what = f"a model of type {preset.shape.model_type}"
    remedy = f"a preset of {' or '.join(trained_types())}: {', '.join(others)}"
    yield _planned_only("model.preset", recipe.model.preset, what, remedy)


_LOOKS: tuple[Callable[[Recipe], Iterable[Problem]], ...] = (
    _precision,
    _offload,
    _device,
    _family,
)


def _planned_only(path: str, value: object, what: str, remedy: str) -> Problem:
    return Problem(path, f"={value}: {what} can be planned, not trained yet. Use {remedy}.")
