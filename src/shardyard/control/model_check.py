"""Folders whose tensors only transformers knows: compared by it, in a process of its own."""

from shardyard.config.inspection import loads_weights
from shardyard.config.rules.custom_module import is_generic
from shardyard.config.weight_files import has_weight_files
from shardyard.control.request import Request
from shardyard.control.subprocesses import run_program
from shardyard.errors import Problem, RecipeError


def check_weights_match_config(request: Request) -> None:
    """Compare the folder of a model of no family, or of an image network, with its config.json.

    Models of a family are compared where the request is read, without transformers.

    Raises:
        RecipeError: The folder holds less or more than the model.
    """
    folder, recipe = request.model_dir, request.recipe
    kind = "images" if request.network is not None else "text"
    is_asked = kind == "images" or is_generic(recipe)
    if folder is None or not is_asked or not loads_weights(recipe) or not has_weight_files(folder):
        return
    found = run_program("shardyard.models.folder_report", [str(folder), kind])["problems"]
    if found:
        setting = "model.path" if recipe.model.path is not None else "model.hub"
        raise RecipeError([Problem(setting, problem) for problem in found])
