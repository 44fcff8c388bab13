"""The side job `prepare` on its node: the model is fetched, the data prepared, as node 0 would."""

from dataclasses import asdict
from typing import Any

from shardyard.config.anchor import anchor_paths
from shardyard.config.model.hub import commit_of, digest_of
from shardyard.control.prepare import prepare_data
from shardyard.control.request import Request
from shardyard.log import say
from shardyard.node.homes import with_homes
from shardyard.node.side_job import SideWork


def prepare(work: SideWork) -> dict[str, Any]:
    """Fetch the model, prepare the data; what is there already is found."""
    recipe = anchor_paths(work.recipe)
    shares_folder = bool(work.arguments["shares_folder"])
    recipe = with_homes(recipe, work.run, shares_folder=shares_folder)
    if recipe.data.workers == "auto" and not work.arguments["is_this_machine"]:
        # a container counts the cores of its whole machine
        data = recipe.data.model_copy(update={"workers": recipe.launch.side.cpus})
        recipe = recipe.model_copy(update={"data": data})
    request = Request.of(recipe, name=work.run.run_id)
    folder = request.model_dir
    if folder is not None:
        say(f"the model's files are in {folder}")
    facts = prepare_data(request, verify=bool(work.arguments["verify"]))
    return {
        "data": asdict(facts),
        "model_dir": None if folder is None else str(folder),
        "model_commit": None if folder is None else commit_of(folder),
        "model_digest": None if folder is None else digest_of(folder),
    }
