"""Send what W&B and MLflow lack of a run once more: behind `shardyard report RUN --send`."""

import os

from shardyard.config.rules.observe import services_of
from shardyard.config.versions import EXPORTERS, check_packages
from shardyard.errors import LostError, RequestError
from shardyard.launchers.secrets import resolve_local
from shardyard.log import info, warn
from shardyard.rundir.attempt_files import latest_resolved
from shardyard.rundir.layout import RunDir
from shardyard.rundir.script import latest_script
from shardyard.trackers.service import PREFIXES
from shardyard.trackers.supervisor import send_now

_WITHIN_S = 600.0


def send_run(run: RunDir) -> None:
    """Send what the services of a run's recipe have not yet, from its folder.

    Raises:
        RequestError: The recipe names no service, the folder lacks its attempts, or a package or
            a secret is missing here.
        LostError: A service has not taken all.
    """
    script = latest_script(run)
    resolved = latest_resolved(run).resolved
    if resolved is not None:
        recipe = resolved.recipe
    elif script is not None:
        recipe = script.recipe()
    else:
        raise RequestError(
            f"{run.path} holds no attempt's resolved.json, so it is not known where the run is "
            f"sent. Where its folder is elsewhere, `shardyard fetch {run.handle}` brings it."
        )
    services = services_of(recipe)
    if not services and resolved is None:
        raise RequestError(
            f"--send: the script of {run.run_id} named no tracker, so there is nowhere to send it. "
            'Give shardyard.run(..., observe={"wandb": {"project": "..."}}) and start it again.'
        )
    if not services:
        raise RequestError(
            f"--send: the recipe of {run.run_id} has neither observe.wandb.project nor "
            "observe.mlflow.url, so there is nowhere to send it. Name one, and `shardyard resume`."
        )
    for warning in check_packages(tuple(EXPORTERS[name] for name in services)):
        warn(warning)
    prefixes = tuple(PREFIXES[name] for name in services)
    keys = {name: where for name, where in recipe.secrets.items() if name.startswith(prefixes)}
    environ = {**os.environ, **resolve_local(keys, os.environ)}
    found = send_now(run, _latest_attempt(run), recipe, environ, within_s=_WITHIN_S)
    missing = [sent.words() for sent in found if not sent.has_all]
    if missing:
        raise LostError(f"{'; '.join(missing)} Fix that and run the command again.")
    info(f"{' and '.join(services)}: all of {run.run_id} is there")


def _latest_attempt(run: RunDir) -> int:
    """The newest attempt that was written down whole."""
    return max(
        number
        for number in run.attempts()
        if run.resolved(number).is_file() or run.script(number).is_file()
    )
