"""A first recipe from four answers, each held to the recipe's own rules as soon as it is given.

The answers are settings; where machines are named, the fastest layout that fits is among them. What
the plan makes of it all is written into the comments of the file by ``control/init_text.py``.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from shardyard.config.data_choices import ID_KEYS, PREFERENCE_KEYS, chat_rows_of
from shardyard.config.model.source import config_content, model_folder, read_shape
from shardyard.config.paths import check_existing_paths, check_mounted_paths, path_exists
from shardyard.config.resolve import PartialResolution
from shardyard.config.rules.check import load_checked_recipe
from shardyard.config.rules.custom_module import LACKS, generic_type
from shardyard.config.schema.data import Data
from shardyard.config.schema.recipe import Recipe
from shardyard.config.sources import is_remote
from shardyard.config.tasks import TASKS, tasks_of
from shardyard.control.reliefs import reliefs_of
from shardyard.control.request import Request, check_compatibility
from shardyard.errors import AccessError, CapacityError, RequestError
from shardyard.families.images.registry import IMAGE_PRESETS, is_image_config
from shardyard.families.presets import PRESETS, preset_named
from shardyard.families.shape import ModelShape
from shardyard.hardware.cluster import ClusterHardware
from shardyard.hardware.machine import Machine, probe
from shardyard.io.files import parse_json
from shardyard.launchers.base import launcher_class
from shardyard.launchers.registry import LAUNCHERS
from shardyard.planner.format import candidate_name, fitting_words, settings_of
from shardyard.planner.kernels import missing_rate
from shardyard.planner.layouts import Reliefs, Search, nodes_that_fit, search
from shardyard.planner.plan import Plan, plan_recipe, planned_cluster
from shardyard.planner.workload import Workload, workload_of
from shardyard.plugins import installed
from shardyard.units import format_seconds, format_usd, parse_seconds

BEST = 4
"""Layouts that are shown: the one that is taken, and those ranked next."""

HERE = "here"
"""The answer that means this machine, by `shardyard train`."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """Prediction for a draft."""

    plan: Plan
    preview: PartialResolution
    shape: ModelShape
    machine: Machine | None
    cluster: ClusterHardware | None
    workload: Workload
    search_result: Search | None
    """None: no accelerator, or none whose rates are known."""
    reliefs: Reliefs
    """Gives settings that a search may change in addition to layouts, if no layout fits."""

    def of(self, steps: int) -> Plan:
        """The prediction of a run of so many steps."""
        return _predict(self.preview.recipe, self.shape, self.machine, steps=steps)


@dataclass(frozen=True, kw_only=True)
class RecipeDraft:
    """A recipe on its way: what was answered so far."""

    file: Path
    """File that the recipe will be written to; the run is named after it."""
    probe_machine: Callable[[], Machine] = probe
    """Describes this machine."""
    overrides: tuple[str, ...] = ()
    """The settings, as ``section.key=value``."""
    launcher: str | None = None
    """None: this machine."""
    machines: str = ""
    """Machines as answered: an instance type or a file."""
    planned: Planned | None = None
    no_plan_reason: str = ""
    is_generic: bool = False
    """Whether its model is of no family here, so that it can never be planned."""
    length: str = ""
    """Why it is so long, where that is no setting."""

    @property
    def recipe(self) -> Recipe:
        """The recipe of the settings so far.

        Raises:
            RecipeError: All that is wrong with them, in the words of every other verb.
        """
        return load_checked_recipe((), self.overrides)

    def with_settings(self, *overrides: str) -> "RecipeDraft":
        """With more settings.

        Raises:
            RecipeError: They are wrong, or contradict others.
        """
        draft = replace(self, overrides=(*self.overrides, *overrides))
        load_checked_recipe((), draft.overrides)
        return draft

    def errors(self) -> list[str]:
        """Return problems to fix before it runs there: paths that its nodes cannot have."""
        recipe = self.recipe
        if self.launcher is None:
            return _missing_paths(recipe)
        sight = launcher_class(self.launcher)().node_paths(recipe)
        found = [*check_mounted_paths(recipe, sight), *check_existing_paths(recipe, sight)]
        return [str(problem) for problem in found]


@dataclass(frozen=True, kw_only=True)
class InitQuestion:
    """One of the four."""

    name: str
    """Name of its option, without dashes."""
    text: str
    forms: str
    """Accepted forms of the answer."""
    default: str
    """The answer where none is given."""
    take: Callable[[RecipeDraft, str], RecipeDraft]
    """Function that checks an answer against the rules and continues the draft with it."""


# --- model --------------------------------------------------------------------------------------


def with_model(draft: RecipeDraft, answer: str) -> RecipeDraft:
    """Set the model to train: a preset, a repository of the hub, or a folder.

    Raises:
        RequestError: There is no such model, or none that can be trained.
    """
    answer = answer.strip()
    if answer in IMAGE_PRESETS:
        raise _of_images(f"{answer} is", f"model.preset={answer}")
    settings, preset = _model_settings(answer), preset_named(answer)
    shape, task = None if preset is None else preset.shape, tasks_of(is_causal=True)[0]
    if preset is None:
        model = draft.with_settings(*settings).recipe.model
        try:
            folder = model_folder(model, needs_weights=model.path is not None)
            if is_image_config(_config_in(folder)):
                raise _of_images(f"{folder} holds", " ".join(settings))
            task = tasks_of(is_causal=not _is_masked(folder))[0]
            kind = _generic_type(folder, task)
            if kind is not None:
                why = f"{folder} is a model of type {kind}, which is of no family here: {LACKS}."
                draft = replace(draft, no_plan_reason=why, is_generic=True)
            else:
                shape = read_shape(model, folder, Data().vocab_size)
        except (AccessError, CapacityError) as error:  # of the hub: the answer may be right
            draft = replace(draft, no_plan_reason=str(error))
    if shape is not None:
        task = tasks_of(is_causal=shape.is_causal)[0]
    is_usual = task == tasks_of(is_causal=True)[0]
    return draft.with_settings(*settings, *(() if is_usual else (f"task.name={task}",)))


def _is_masked(folder: Path | None) -> bool:
    """Whether a folder holds a model that learnt hidden words."""
    names = _config_in(folder).get("architectures") or ()
    return any(str(name).endswith("ForMaskedLM") for name in names)


def _generic_type(folder: Path | None, task: str) -> str | None:
    """The type of a model of no family; None: it is of a family, or has no config.json."""
    config = _config_in(folder)
    return generic_type(config, f"{folder}/config.json", task=task) if config else None


def _config_in(folder: Path | None) -> dict[str, Any]:
    """Content of a folder's config.json; empty where there is none."""
    config = None if folder is None else folder / "config.json"
    return config_content(str(config)) if config is not None and config.is_file() else {}


def _of_images(subject: str, settings: str) -> RequestError:
    return RequestError(
        f"{subject} a network that classifies images, and `shardyard init` writes recipes for "
        f"text. Train it on your pictures: `shardyard train {settings} "
        "task.name=image_classification data.source=FOLDER optim.lr=1e-3 run.epochs=3` "
        "(docs/images.md)."
    )


def _model_settings(answer: str) -> tuple[str, ...]:
    if preset_named(answer) is not None:
        return (f"model.preset={answer}",)
    if answer.startswith((".", "/", "~")) or Path(answer).is_dir():
        return (f"model.path={answer}",)
    if "/" in answer:
        name, at, revision = answer.partition("@")
        return (f"model.hub={name}", *([f"model.revision={revision}"] if at else ()))
    return (f"model.preset={answer}",)


# --- data ---------------------------------------------------------------------------------------


def with_data(draft: RecipeDraft, answer: str) -> RecipeDraft:
    """Set the data to train on: a file, folder, glob or address.

    Whether it exists is reported at the end.

    Raises:
        RequestError: It cannot be read from there.
    """
    source = answer.strip()
    draft = draft.with_settings(f"data.source={source}")
    keys = _keys_of_first_row(source)
    is_pair = {*PREFERENCE_KEYS} <= {*keys}
    if {*ID_KEYS} & {*keys} and Data().text_key not in keys:
        return draft.with_settings("data.format=token_ids")
    if not (is_pair or chat_rows_of(keys)) or draft.recipe.task.name != tasks_of(is_causal=True)[0]:
        return draft
    template = () if _has_chat_template(draft.recipe) else ("data.chat_template=chatml",)
    if is_pair:
        task = next(name for name, row in TASKS.items() if row.compares_answers)
        format = f"data.format={TASKS[task].data_formats[0]}"
        return draft.with_settings(f"task.name={task}", format, *template)
    return draft.with_settings("data.format=chat", *template)


_FIRST_ROW_BYTES = 2**20
"""Most bytes of a first row that is looked at."""


def _keys_of_first_row(source: str) -> tuple[str, ...]:
    """Keys of the first row of the first JSON file; empty where there is none on this machine."""
    if is_remote(source) or source == Data().source:
        return ()
    path = Path(source).expanduser()
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    if not path.exists() and "*" in path.name and path.parent.is_dir():
        files = sorted(path.parent.glob(path.name))
    first = next((each for each in files if each.suffix in _JSON and each.is_file()), None)
    if first is None:
        return ()
    try:
        with first.open("rb") as file:
            line = file.readline(_FIRST_ROW_BYTES)
        row = parse_json(line)
    except (OSError, ValueError, RecursionError):
        return ()
    return tuple(row) if isinstance(row, dict) else ()


_JSON = (".jsonl", ".ndjson")


def _has_chat_template(recipe: Recipe) -> bool:
    """Whether the model's folder has a chat template; one of the hub is seen when it is there."""
    if recipe.model.path is None:
        return recipe.model.hub is not None
    folder = Path(recipe.model.path).expanduser()
    config = folder / "tokenizer_config.json"
    has_it = config.is_file() and b'"chat_template"' in config.read_bytes()
    return has_it or (folder / "chat_template.jinja").is_file()


def _missing_paths(recipe: Recipe) -> list[str]:
    return [
        f"{setting}={entry}: this path does not exist on this machine. Put text there, or fix the "
        "path."
        for setting, entry in recipe.data.entries
        if entry != Data().source and not is_remote(entry) and not path_exists(entry)
    ]


# --- place --------------------------------------------------------------------------------------

_PLACE = re.compile(r"(?P<where>\S+)(?:\s+(?:(?P<nodes>\d+)\s*x\s*)?(?P<machines>\S+))?")
PLACE_FORMS = "here, or LAUNCHER NODES x MACHINE such as slurm 2 x p5.48xlarge"


def with_location(draft: RecipeDraft, answer: str) -> RecipeDraft:
    """Set the place of training, planned at once: the settings of the fastest layout that fits.

    Raises:
        RequestError: There is no such launcher or machine, or the model does not fit there.
    """
    found = _PLACE.fullmatch(answer.strip())
    if found is None:
        raise RequestError(f"{answer!r} is not a place. Answer {PLACE_FORMS}.")
    where, nodes, machines = found["where"], found["nodes"], found["machines"]
    if where == HERE and machines is None:
        return _planned(draft)
    names = (*LAUNCHERS, *installed("launchers"))
    if where not in names:
        raise RequestError(
            f"{where!r} is not a place. Answer {PLACE_FORMS}; launchers are {', '.join(names)}."
        )
    if launcher_class(where).capabilities.is_this_machine:
        raise RequestError(f"{where!r} is this machine. Answer {HERE}.")
    if machines is None:
        raise RequestError(
            f"{answer!r} does not say on which machines, which a plan needs. Add an EC2 type, or a "
            f"YAML file that describes a node of your own cluster (docs/hardware.md): {where} 2 x "
            f"p5.48xlarge, {where} 4 x our-nodes.yaml."
        )
    setting = "file" if machines.endswith((".yaml", ".yml")) or "/" in machines else "instance"
    draft = draft.with_settings(f"cluster.nodes={nodes or 1}", f"cluster.{setting}={machines}")
    return _planned(replace(draft, launcher=where, machines=machines))


def _planned(draft: RecipeDraft) -> RecipeDraft:
    """With a prediction, and with the layout that the search ranks first."""
    if draft.no_plan_reason:
        return draft
    planned = _plan(draft, machine=None if draft.launcher else draft.probe_machine())
    _check_fits(draft, planned)
    if planned.search_result is None:
        return replace(draft, planned=planned)
    draft = draft.with_settings(*settings_of(planned.search_result.best[0]))
    return replace(
        draft, planned=_plan(draft, machine=planned.machine, search_result=planned.search_result)
    )


def _plan(
    draft: RecipeDraft, *, machine: Machine | None, search_result: Search | None = None
) -> Planned:
    request = Request.of(draft.recipe, name=draft.file.stem, needs_weights=False, shape_only=True)
    preview, shape = request.preview(machine), request.required_shape
    recipe = preview.recipe
    check_compatibility(recipe, shape)
    cluster = planned_cluster(recipe, machine, devices_per_node=_devices(recipe))
    plan = _predict(recipe, shape, machine, steps=preview.steps)
    by_rule = "memory.loss_chunk" in preview.reasons
    workload = replace(workload_of(recipe, shape, plan.layout), chunks_by_rule=by_rule)
    has_rates = cluster and not missing_rate(cluster.accelerator, workload.formats.compute)
    reliefs = cache(
        partial(
            reliefs_of, request.recipe, recipe, shape, plan.layout, cluster, chunks_by_rule=by_rule
        )
    )
    if search_result is None and cluster is not None and has_rates:
        search_result = search(workload, cluster, best=BEST, reliefs=reliefs)
    return Planned(
        plan=plan, preview=preview, shape=shape, machine=machine, cluster=cluster,
        workload=workload, search_result=search_result, reliefs=reliefs,
    )  # fmt: skip


def _predict(
    recipe: Recipe, shape: ModelShape, machine: Machine | None, *, steps: int | None
) -> Plan:
    return plan_recipe(
        recipe,
        shape=shape,
        steps=steps,
        world_size=recipe.cluster.nodes * _devices(recipe),
        devices_per_node=_devices(recipe),
        machine=machine,
    )


def _devices(recipe: Recipe) -> int:
    devices = recipe.cluster.devices
    assert isinstance(devices, int)  # named machines and this one say how many
    return devices


def _check_fits(draft: RecipeDraft, planned: Planned) -> None:
    """Raise if no layout fits, with the nodes on which one does."""
    found, plan = planned.search_result, planned.plan
    if found is None:
        if plan.fits == "does not fit":
            raise RequestError(
                f"{plan.model} does not fit on {plan.devices_words()}: {plan.fits_reason}. "
                "Choose a smaller model, or machines with more memory."
            )
        return
    if found.best:
        return
    nearest, cluster = found.nearest, planned.cluster
    assert nearest is not None and cluster is not None  # a search without result keeps the nearest
    enough = nodes_that_fit(planned.workload, cluster, reliefs=planned.reliefs)
    remedy = "Choose machines with more memory, or a smaller model."
    if enough is not None and draft.launcher is not None:
        remedy = f"It fits on more of them: {draft.launcher} {enough[0]} x {draft.machines}."
    raise RequestError(
        f"{plan.model} does not fit on {plan.devices_words()}. {fitting_words(found)} The nearest "
        f"is {candidate_name(nearest)}: {nearest.fit.reason}. {remedy}"
    )


# --- length -------------------------------------------------------------------------------------

_COUNT = re.compile(
    r"([\d.,]+)\s*(?:([KMBT])\s*)?(steps?|tokens?|samples?|epochs?)?", re.IGNORECASE
)
_TIMES = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_MOST_STEPS = 10**9
"""Most steps in a search for a time or a price: no run is that long."""
LENGTH_FORMS = "300 steps, 20B tokens, 2 epochs, a time such as 12h, or a price such as $500"


def with_length(draft: RecipeDraft, answer: str) -> RecipeDraft:
    """Set the length of training: a count, or the steps that a time or price allows by the plan.

    Raises:
        RequestError: It is no length, or a time or a price that cannot be converted to steps.
    """
    text = answer.strip()
    if text.startswith("$"):
        usd = _number(text[1:], answer)
        draft = draft.with_settings(f"launch.max_usd={usd:g}")
        return _within(draft, answer, lambda plan: plan.usd is not None and plan.usd <= usd)
    if counted := _COUNT.fullmatch(text):
        number = _number(counted[1], answer, times=_TIMES[(counted[2] or "").lower()])
        unit = (counted[3] or "steps").lower().rstrip("s") + "s"
        value = f"{number:.0f}" if number == int(number) else f"{number!r}"
        return _replanned(draft.with_settings(f"run.{unit}={value}"))
    try:
        seconds = parse_seconds(text)
    except ValueError as error:
        raise RequestError(f"{answer!r} is not a length. Answer {LENGTH_FORMS}.") from error
    return _within(draft, answer, lambda plan: plan.wall_s is not None and plan.wall_s <= seconds)


def _number(text: str, answer: str, *, times: float = 1) -> float:
    try:
        number = float(text.replace(",", "")) * times
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise RequestError(f"{answer!r} is not a length. Answer {LENGTH_FORMS}.")
    return number


def _within(draft: RecipeDraft, answer: str, allows: Callable[[Plan], bool]) -> RecipeDraft:
    """Set as many steps as the plan allows."""
    planned = draft.planned
    plan = None if planned is None else planned.of(1)
    if planned is None or plan is None or plan.step_s is None:
        why = draft.no_plan_reason if plan is None else plan.speed.reason
        raise RequestError(
            f"{answer!r} cannot be said in steps: the speed is not predicted ({why}). Answer in "
            "steps, tokens, samples or epochs."
        )
    if answer.startswith("$") and plan.price.usd_per_hour is None:
        raise RequestError(
            f"{answer!r} cannot be said in steps: {plan.price.source}. Answer in steps or a time."
        )
    if not allows(plan):
        cost = "" if plan.usd is None else f" and {format_usd(plan.usd)}"
        raise RequestError(
            f"{answer!r} is too short: with its start, one step takes "
            f"{format_seconds(plan.wall_s or plan.step_s)}{cost}."
        )
    low, high = 1, 2
    while allows(planned.of(high)):
        low, high = high, 2 * high
        if high > _MOST_STEPS:
            raise RequestError(f"{answer!r} is more than {_MOST_STEPS:,} steps. Answer less.")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if allows(planned.of(middle)) else (low, middle)
    return replace(_replanned(draft.with_settings(f"run.steps={low}")), length=answer)


def _replanned(draft: RecipeDraft) -> RecipeDraft:
    """Plan again, with the length."""
    planned = draft.planned
    if planned is None:
        return draft
    return replace(
        draft, planned=_plan(draft, machine=planned.machine, search_result=planned.search_result)
    )


QUESTIONS = (
    InitQuestion(
        name="model",
        text="What is trained?",
        forms="owner/name on the Hugging Face hub, a folder, or a preset: " + ", ".join(PRESETS),
        default="llama-tiny",
        take=with_model,
    ),
    InitQuestion(
        name="data",
        text="From which text?",
        forms="a file, folder or glob of text, JSON or Parquet, or an address such as s3://",
        default=str(Data().source),
        take=with_data,
    ),
    InitQuestion(name="where", text="Where?", forms=PLACE_FORMS, default=HERE, take=with_location),
    InitQuestion(
        name="how-long", text="How long?", forms=LENGTH_FORMS, default="300 steps", take=with_length
    ),
)
"""In this order: each answer is held against those before it."""
