"""Folders of runs as they grow: a loss that takes steps back, a drain, a resume."""

from pathlib import Path
from typing import Any

from shardyard.rundir.layout import RunDir
from tests.report.synthetic import RunWriter, resolved_run

RUN_ID = "bert-20261118-200640-0a1b"
KEY = "0123456789abcdef0123456789abcdef01234567"
"""A key of W&B has so many characters."""
TOKEN = "only-the-server-may-see-this"


def new_run(folder: Path, **observe: Any) -> RunWriter:
    """A run whose recipe names services, and both keys among other secrets."""
    secrets = {"WANDB_API_KEY": "env", "MLFLOW_TRACKING_TOKEN": "env", "HF_TOKEN": "env"}
    resolved = resolved_run(
        observe=observe,
        secrets=secrets,
        launch={"env": {"WHERE": "a-place-of-ours"}},
        run={"tags": {"team": "nlp"}},
    )
    return RunWriter(RunDir(folder / RUN_ID), resolved)


def begin(writer: RunWriter, *, last: int = 4) -> RunDir:
    """The first steps of an attempt that goes on."""
    writer.begin()
    writer.start()
    writer.event("run_started", run=RUN_ID)
    writer.steps(1, last)
    return writer.write()


def lose_and_drain(writer: RunWriter) -> RunDir:
    """A worker is lost after step 6, step 3 is where all go back to, and a drain after 8."""
    writer.steps(5, 6)
    writer.lose(after_s=0.5)
    writer.start(load_step=2)
    writer.steps(3, 8)
    writer.end(143, "drained; step-00000008 is durable.")
    return writer.write()


def resume_and_finish(writer: RunWriter, *, last: int = 20) -> RunDir:
    """The next attempt, with another learning rate, to the end."""
    writer.clock_t += 600
    optim = writer.resolved.recipe.optim.model_copy(update={"lr": 5e-4})
    recipe = writer.resolved.recipe.model_copy(update={"optim": optim})
    object.__setattr__(writer.resolved, "recipe", recipe)
    writer.begin()
    writer.start(load_step=8)
    writer.steps(9, last)
    writer.finish(last)
    writer.end(0, "finished")
    return writer.write()


def steps_of(writer: RunWriter) -> list[int]:
    """Steps in the order in which they were done, those done again too."""
    return [line["step"] for line in writer.lines if "eval" not in line]
