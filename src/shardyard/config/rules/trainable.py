"""Check what can be planned but not trained yet, for verbs that prepare or start a training.

The planner supports more than training does. `plan` and `config` accept what is rejected
here, and say so. What can never run is rejected by all verbs (``config/rules/check.py``).
"""

from collections.abc import Iterable

from shardyard.config.cluster_choice import chosen_cluster
from shardyard.config.rules.plan_only import DEVICES, planned_only, settings_planned_only
from shardyard.config.schema.recipe import Recipe
from shardyard.errors import Problem, RequestError
from shardyard.families.presets import preset_named
from shardyard.hardware.cluster import ClusterHardware


def check_trainable(recipe: Recipe) -> list[Problem]:
    """Every setting of a recipe that `plan` can predict and `train` cannot carry out yet.

    A model in a folder or on the hub is judged by its config.json.
    """
    return [*settings_planned_only(recipe), *_machines(recipe), *_model(recipe)]


def _model(recipe: Recipe) -> Iterable[Problem]:
    named = preset_named(recipe.model.preset)
    if named is not None and named.shape.is_planned_only:
        what = "a model with latent attention"
        remedy = "a preset of another family, such as qwen3-30b-a3b"
        yield planned_only("model.preset", recipe.model.preset, what, remedy)


def _machines(recipe: Recipe) -> Iterable[Problem]:
    cluster, chosen = recipe.cluster, _chosen(recipe)
    if chosen is None or chosen.accelerator.device != "xla" or cluster.device == "xla":
        return  # or another check says so
    setting = "file" if cluster.instance is None else "instance"
    what = f"a run on {chosen.accelerator.name}"
    yield planned_only(f"cluster.{setting}", getattr(cluster, setting), what, DEVICES)


def _chosen(recipe: Recipe) -> ClusterHardware | None:
    """The machines that a recipe names; None: this one, or another check says what is wrong."""
    try:
        return chosen_cluster(recipe.cluster)
    except RequestError:
        return None
