"""Where the nodes of a launched run keep what they fetch and prepare, unless the recipe says it."""

from shardyard.config.schema.recipe import Recipe
from shardyard.rundir.layout import RunDir


def with_homes(recipe: Recipe, run: RunDir, *, shares_folder: bool) -> Recipe:
    """The recipe with defaults of ``data.dir`` and ``model.dir``, the same for all runs beside it.

    So what one run or `shardyard prepare` made is found by the next, and by its other nodes.

    Args:
        run: As the node sees its folder.
        shares_folder: Whether the machine of the command line sees that folder too; else the folder
            that a command starts in is a pod's own, and the runs' is what all nodes share.
    """
    if recipe.model.dir is None:
        store = {"dir": str(run.path.parent / "models")}
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update=store)})
    if shares_folder or "dir" in recipe.data.model_fields_set:
        return recipe
    home = {"dir": str(run.path.parent / "prepared")}
    return recipe.model_copy(update={"data": recipe.data.model_copy(update=home)})
