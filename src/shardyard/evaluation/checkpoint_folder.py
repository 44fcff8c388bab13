"""A checkpoint of a run as a model folder, for the programs that run the model.

It is exported next to the run, as `shardyard export` does, with adapters merged.
"""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardyard.checkpoint.export import plan_export, write_export
from shardyard.checkpoint.export_formats import has_adapters
from shardyard.checkpoint.select import choose_checkpoint
from shardyard.config.resolved import Resolved
from shardyard.errors import RequestError
from shardyard.evaluation.language_model import DTYPES
from shardyard.rundir.attempt_files import latest_resolved
from shardyard.rundir.layout import RunDir
from shardyard.rundir.script import check_has_recipe


@contextmanager
def exported_checkpoint(
    run_dir: RunDir, step: str, dtype: str | None, *, verb: str
) -> Iterator[tuple[Path, int]]:
    """Export a checkpoint into a folder that is removed afterwards; yields it and the step.

    Args:
        step: A number, latest or best.
        dtype: Dtype of the weights; None: as saved.
        verb: Verb of the command line that needs the model.

    Raises:
        RequestError: The run trains no causal language model, or has no such checkpoint.
        CheckpointError: The checkpoint cannot be read.
    """
    resolved = _resolved(run_dir, verb)
    chosen = choose_checkpoint(run_dir, step)
    for note in (*([chosen.note] if chosen.note else []), *chosen.damaged):
        print(f"warning: {note}. `{verb}` uses step {chosen.step}.", file=sys.stderr)
    try:
        scratch = tempfile.TemporaryDirectory(prefix=f".{verb}-", dir=run_dir.path)
    except OSError:  # somebody else's run, which this user may only read
        scratch = tempfile.TemporaryDirectory(prefix=f"shardyard-{verb}-")
    with scratch as name:
        folder = Path(name) / f"step-{chosen.step:08d}"
        plan = plan_export(
            chosen.path,
            resolved,
            folder,
            dtype=None if dtype is None else DTYPES[dtype],
            merged=has_adapters(resolved),
        )
        write_export(plan, resolved)
        yield folder, chosen.step


def _resolved(run_dir: RunDir, verb: str) -> Resolved:
    """The run's recipe, of a causal language model.

    Raises:
        RequestError: It trains something else, or is not known.
    """
    check_has_recipe(
        run_dir,
        verb=f"`{verb}`",
        instead="Export the model in the script by shardyard.export(model, FOLDER), then use "
        f"`shardyard {verb} FOLDER`.",
    )
    resolved = latest_resolved(run_dir).resolved
    if resolved is None:
        raise RequestError(
            f"{run_dir.path} has no attempt whose resolved.json can be read, so its model is not "
            f"known. Export it where it was trained, then use `shardyard {verb} FOLDER`."
        )
    shape = resolved.shape
    if resolved.recipe.model.module is not None:
        raise RequestError(
            f"run {run_dir.run_id} trains model.module={resolved.recipe.model.module}, code of "
            f"your own that `{verb}` does not run. If it is a transformers model, export it by "
            f"save_pretrained(FOLDER), then use `shardyard {verb} FOLDER`."
        )
    if shape is None or not shape.is_causal or shape.label_head is not None:
        raise RequestError(
            f"run {run_dir.run_id} trains task.name={resolved.recipe.task.name}, which is no "
            "causal language model: it cannot score or continue text. Its validation metrics are "
            f"in `shardyard report {run_dir.handle}`."
        )
    return resolved
