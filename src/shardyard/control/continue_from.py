"""``run.from=RUN[@STEP|@best]``: a new run that starts from the weights of another one.

The checkpoint is exported in fp32, as it was trained, into the folder of its run, and the new run
loads that folder like any model: every layout, task, dataset and learning rate can start from it.
Adapters are exported by themselves and continued next to the same base.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardyard.config.adapter_files import AdapterFolder, is_adapter_folder, read_adapter_folder
from shardyard.config.load import Source, read_settings
from shardyard.config.model.files import base_digest
from shardyard.config.model.vocabulary import difference_of, vocabulary_in
from shardyard.config.paths import unreadable_reason
from shardyard.config.resolved import Resolved
from shardyard.config.schema.recipe import Lora, Model, Recipe
from shardyard.config.secrets import show
from shardyard.control.subprocesses import run_program
from shardyard.errors import RequestError
from shardyard.log import info
from shardyard.rundir.attempt_files import latest_resolved
from shardyard.rundir.layout import RunDir, find_run, is_run, step_of_name
from shardyard.rundir.script import check_has_recipe

LATEST, BEST = "latest", "best"

_OF_ADAPTERS = ("rank", "alpha", "rslora", "targets", "modules_to_save")
"""Settings of ``model.lora`` that say what an adapter's matrices mean."""


@dataclass(frozen=True, kw_only=True)
class StartingPoint:
    """A checkpoint of a run, and the run's newest resolved recipe."""

    text: str
    """The setting that names it, as it was written."""
    run_dir: RunDir
    step: str
    """A step in digits, latest or best."""
    resolved: Resolved

    def words(self, step: int, runs_dir: Path) -> str:
        """Return the value of run.from that names this checkpoint from anywhere."""
        is_beside = self.run_dir.path.parent == runs_dir.resolve()
        return f"{self.run_dir.run_id if is_beside else self.run_dir.path}@{step}"


def start_overrides(sources: Sequence[Source], overrides: Sequence[str]) -> list[str]:
    """Return the overrides that ``run.from`` and a model.path of a run or an adapter stand for.

    Raises:
        RequestError: There is no such run or checkpoint, or the recipe names other weights too.
        ShardyardError: The export's own.
    """
    recipe: Recipe = read_settings(tuple(sources), overrides, with_site=True)[0]
    model = recipe.model
    if recipe.run.from_ is None and model.path is None:
        return []
    if not all(map(_can_be_followed, (recipe.run.dir, model.path or "."))):
        return []  # the checks of the recipe's paths say why
    runs_dir = Path(recipe.run.dir).expanduser()
    if recipe.run.from_ is not None:
        point = _named_point(recipe.run.from_, runs_dir)
        _check_other_weights(point, model)
    else:
        folder = Path(str(model.path)).expanduser()
        checkpoint = _point_of_folder(folder)
        if checkpoint is None:
            return _written(_of_adapter(folder, recipe)) if is_adapter_folder(folder) else []
        point = checkpoint
        _check_other_weights(point, model.model_copy(update={"path": None}))
    settings, step = _settings_of(point, recipe)
    return _written({**settings, "run.from": point.words(step, runs_dir)})


def _can_be_followed(path: str) -> bool:
    try:
        return unreadable_reason(path) is None
    except (RuntimeError, ValueError):  # an unknown user's home, a NUL
        return False


def _written(settings: Mapping[str, Any]) -> list[str]:
    """Return overrides of the settings: a text as it is, anything else as YAML in one line."""
    return [
        f"{name}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in settings.items()
    ]


def _named_point(name: str, runs_dir: Path) -> StartingPoint:
    run, _, step = name.partition("@")
    text = f"run.from={name}"
    folder = Path(run).expanduser()
    if step_of_name(folder.name) is not None and not step:
        point = _point_of_folder(folder)
        if point is not None:
            return point
    if not run:
        raise RequestError(f"{text} names no run. Write run.from=RUN, RUN@STEP or RUN@best.")
    try:
        run_dir = find_run(run, runs_dir, option="run.dir")
    except RequestError as error:
        raise RequestError(f"{text}: {error}") from error
    return _point(text, run_dir, step or LATEST)


def _point_of_folder(folder: Path) -> StartingPoint | None:
    """Return what a model.path means that is a run or a checkpoint; None: it is neither."""
    text = f"model.path={folder}"
    if (folder / "config.json").exists() or not folder.is_dir():
        return None
    step, above = step_of_name(folder.name), folder.resolve().parent.parent
    if step is not None and is_run(above):
        return _point(text, RunDir(above), str(step))
    run = RunDir(folder.resolve())
    return _point(text, run, LATEST) if is_run(folder) and run.attempts() else None


def _point(text: str, run_dir: RunDir, step: str) -> StartingPoint:
    """Return a checkpoint to start from, once it is sure that it can be one.

    Raises:
        RequestError: There is no such checkpoint on this machine, or its model cannot be loaded.
    """
    handle, steps = run_dir.handle, run_dir.checkpoint_steps()
    if step not in (LATEST, BEST) and not step.isdecimal():
        raise RequestError(
            f"{text}: {step!r} is no step. Write run.from={handle}@STEP, run.from={handle}@{BEST}, "
            f"or run.from={handle} for the newest."
        )
    check_has_recipe(
        run_dir,
        verb=text,
        instead="Call shardyard.export(model, FOLDER) in the script, and set model.path=FOLDER.",
    )
    if not steps:
        raise RequestError(
            f"{text}: run {run_dir.run_id} has no checkpoint on this machine. If its files are on "
            f"the cluster, fetch them first: `shardyard fetch {handle}`."
        )
    if step.isdecimal() and int(step) not in steps:
        raise RequestError(
            f"{text}: run {run_dir.run_id} has no checkpoint of step {step}. It has those of steps "
            f"{', '.join(map(str, steps))}. Write run.from={handle}@{steps[-1]}."
        )
    resolved = latest_resolved(run_dir).resolved
    if resolved is None:
        raise RequestError(
            f"{text}: run {run_dir.run_id} has no attempt whose resolved.json can be read, so its "
            f"model is not known. `shardyard resume {handle}` writes it again."
        )
    if resolved.recipe.model.module is not None:
        raise RequestError(
            f"{text}: run {run_dir.run_id} trains model.module="
            f"{resolved.recipe.model.module}, whose weights only that function can load. Export "
            f"them with `shardyard export {handle} --to DIR`, and load DIR in the function."
        )
    return StartingPoint(text=text, run_dir=run_dir, step=step, resolved=resolved)


def _check_other_weights(point: StartingPoint, model: Model) -> None:
    """Raise if the recipe names other weights than those of the run."""
    before = point.resolved.recipe.model
    same = {"path": before.path, "hub": before.hub, "module": None}
    exports = str(point.run_dir.exports)
    others = [
        f"model.{key}={value}"
        for key, before_value in same.items()
        if (value := getattr(model, key)) is not None
        and value != before_value
        and not (key == "path" and _is_same_folder(value, before_value, exports))
    ]
    others += ["model.weights=random"] if model.weights == "random" else []
    if others:
        raise RequestError(
            f"{point.text}: the weights are those of run {point.run_dir.run_id}, and "
            f"{' and '.join(others)} asks for others. Leave {'it' if len(others) == 1 else 'them'} "
            "out, or leave run.from out."
        )


def _is_same_folder(path: str, before: str | None, exports: str) -> bool:
    folder = Path(path).expanduser().resolve()
    is_same = before is not None and folder == Path(before).resolve()
    return is_same or folder.is_relative_to(exports)  # a recipe of a run that began there before


def _settings_of(point: StartingPoint, recipe: Recipe) -> tuple[dict[str, Any], int]:
    """Return the model's settings with which a run starts there, and the step."""
    before, run = point.resolved.recipe.model, point.run_dir
    has_adapters = before.lora.rank is not None
    continues = has_adapters and _continues_adapters(point, recipe.model.lora)
    options = ["--answer", "--step", point.step, "--dtype", "float32"]
    options += ["--merged"] if has_adapters and not continues else []
    arguments = [str(run.path), "--into", str(run.exports), *options]
    written = run_program("shardyard.checkpoint.export", arguments)
    folder, step = str(written["to"]), int(written["step"])
    how = ""
    if has_adapters:
        how = ", its adapters continued" if continues else ", its adapters merged into the weights"
    info(f"starting from run {run.run_id}, step {step}{how}: {folder}")
    if not continues:
        gone = {"model.lora.path": None} if recipe.model.lora.path is not None else {}
        return {**_model(recipe.model, path=folder), **gone}, step
    commit = point.resolved.model_commit
    base = _model(recipe.model, path=before.path, hub=before.hub, revision=commit)
    tokenizer = _tokenizer(Path(folder), before.path, recipe, before.lora)
    return {**base, "model.lora.path": folder, **tokenizer}, step


def _model(
    model: Model,
    *,
    path: str | None = None,
    hub: str | None = None,
    revision: str | None = None,
) -> dict[str, str | None]:
    """Return the settings that name a model, and null for those that name another one."""
    settings = {"path": path, "hub": hub, "revision": None if hub is None else revision}
    return {"model.weights": "load"} | {
        f"model.{key}": value
        for key, value in settings.items()
        if value is not None or getattr(model, key) is not None
    }


def _continues_adapters(point: StartingPoint, lora: Lora) -> bool:
    """Whether a run goes on training the adapters; else they become a part of the weights."""
    before, base = point.resolved.recipe.model, point.resolved.model_dir
    if lora.rank is None:
        return False
    changed = [
        f"model.lora.{key}={old}"
        for key in _OF_ADAPTERS
        if (old := getattr(before.lora, key)) != getattr(lora, key)
    ]
    if changed:
        info(
            f"note: model.lora is not that of run {point.run_dir.run_id}, so new adapters are "
            f"trained next to the merged weights. To continue its adapters, set {' '.join(changed)}"
        )
        return False
    if base is None:
        info(
            f"note: the adapters of run {point.run_dir.run_id} were trained next to random "
            "weights, so new adapters are trained next to the merged weights"
        )
        return False
    if Path(base).is_dir() and base_digest(Path(base)) != point.resolved.base_digest:
        raise RequestError(
            f"{point.text}: {base} holds other weights than those under which run "
            f"{point.run_dir.run_id} trained its adapters. Bring those back."
        )
    return True


def _tokenizer(adapter: Path, base: str | None, recipe: Recipe, lora: Lora) -> dict[str, str]:
    """Return the setting of an adapter's own tokenizer, if tokens were added to the base's.

    Args:
        base: Folder of the base; None: it is on the hub, and its tokenizer is not looked at.
        lora: The adapter's settings.
    """
    given = vocabulary_in(adapter)
    if recipe.data.tokenizer != "auto" or given is None or not lora.modules_to_save:
        return {}
    if base is not None:
        own = vocabulary_in(Path(base).expanduser())
        if own is None or given.size <= own.size or difference_of(own, given):
            return {}
    return {"data.tokenizer": str(adapter)}


def _of_adapter(folder: Path, recipe: Recipe) -> dict[str, Any]:
    """Return the settings that continue the adapter of a folder in PEFT's format."""
    adapter, model = read_adapter_folder(folder), recipe.model
    settings: dict[str, Any] = {
        key: getattr(model.lora, key) for key in model.lora.model_fields_set
    }
    wrong = [
        key
        for key in _OF_ADAPTERS
        if key in settings and settings[key] != getattr(adapter.lora, key)
    ]
    if wrong:
        in_recipe = " ".join(f"model.lora.{key}={show(settings[key])}" for key in wrong)
        in_folder = " ".join(
            f"model.lora.{key}={show(getattr(adapter.lora, key))}" for key in wrong
        )
        raise RequestError(
            f"model.path={folder} is an adapter with {in_folder}, and the recipe has {in_recipe}. "
            "Leave that out: the folder says it."
        )
    if model.hub not in (None, adapter.base):
        raise RequestError(
            f"model.path={folder} is an adapter of {adapter.base}, and model.hub={model.hub} names "
            "another model. Leave model.hub out."
        )
    lora: dict[str, Any] = {**adapter.lora.model_dump(mode="json", exclude_unset=True), **settings}
    info(f"model.path={folder} is an adapter of {adapter.base}, which is continued")
    of_adapter = {f"model.lora.{key}": value for key, value in lora.items()}
    base = _base_of(adapter, model)
    tokenizer = _tokenizer(folder, base.get("model.path"), recipe, adapter.lora)
    return {**base, **of_adapter, **tokenizer}


def _base_of(adapter: AdapterFolder, model: Model) -> dict[str, str | None]:
    if Path(adapter.base).expanduser().is_dir():
        return _model(model, path=adapter.base)
    if adapter.base.startswith(("/", ".", "~")):
        raise RequestError(
            f"model.path={adapter.folder} is an adapter of {adapter.base}, which does not exist "
            f"here. Give the folder of that model: model.path=BASE model.lora.path={adapter.folder}"
            f" model.lora.rank={adapter.lora.rank}."
        )
    return _model(model, hub=adapter.base, revision=adapter.revision)
