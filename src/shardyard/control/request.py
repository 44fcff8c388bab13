"""Request of a user: recipe files and overrides, loaded, checked, with the model's shape.

This is the first step of every verb that takes a recipe. A process of its own compares the weights
of a model that only transformers knows.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardyard.config.adapter_files import adapter_errors
from shardyard.config.auto import MemoryFitter, ResolveContext
from shardyard.config.cluster_choice import devices_of_node
from shardyard.config.inspection import inspect_folder, loads_weights, tokenizer_notes
from shardyard.config.load import Source, is_override, name_of
from shardyard.config.model.growth import Growth, grow
from shardyard.config.model.source import (
    config_content,
    config_notes,
    has_tokenizer,
    head_notes,
    model_folder,
    network_or_none,
    shape_or_none,
    stated_shape,
    with_heads,
    with_labels,
)
from shardyard.config.model.vocabulary import vocabulary_in, vocabulary_of_recipe
from shardyard.config.model_sizes import ModelSizes, sizes_of
from shardyard.config.origins import origin_of
from shardyard.config.other_names import Meaning, lookups
from shardyard.config.paths import (
    NodePaths,
    check_existing_paths,
    check_local_paths,
    check_mounted_paths,
    make_paths_absolute,
)
from shardyard.config.resolve import (
    PartialResolution,
    check_devices,
    resolve,
    resolve_partial,
    reuse_previous,
)
from shardyard.config.resolved import DatasetMetadata, Resolved, settings_in
from shardyard.config.rules.check import check_trainable, load_checked_recipe
from shardyard.config.rules.custom_module import (
    FOLLOWING_A_SHAPE,
    LACKS,
    NO_SHAPE,
    generic_type,
    is_generic,
    on_generic_path,
    require_shape,
)
from shardyard.config.rules.images import check_image_size
from shardyard.config.rules.model import check_model
from shardyard.config.run_length import check_run_length
from shardyard.config.schema.recipe import Model, Recipe
from shardyard.config.validate import override_hint
from shardyard.config.weight_files import has_weight_files
from shardyard.control.continue_from import start_overrides
from shardyard.control.subprocesses import run_program
from shardyard.errors import AccessError, Problem, RecipeError, RequestError, ShardyardError
from shardyard.families.images.network import ImageNetwork
from shardyard.families.lora import lora_target_errors, trained_module_errors
from shardyard.families.shape import ModelShape
from shardyard.hardware.machine import Machine
from shardyard.io.yaml import read_yaml
from shardyard.launchers.secrets import loose_files, resolve_local
from shardyard.log import info, warn


@dataclass(frozen=True, kw_only=True)
class Request:
    """A checked recipe and its model."""

    recipe: Recipe
    as_written: Recipe
    """The same with its relative paths: for nodes that share no folder with this machine."""
    name: str
    """Name of the recipe's files; the run is named after it."""
    model_dir: Path | None
    """The model's own files: config.json, tokenizer, weights. None for a preset, and where they
    have not been opened."""
    shape: ModelShape | None
    """Before the data is prepared, its vocabulary may be that of the tokenizer to be trained. None:
    not known here, and node 0 of the launch settles it; or a module of the user's own."""
    no_shape_reason: str = ""
    network: ImageNetwork | None = None
    """Network that classifies images, where the recipe reads images and it is known here."""
    weight_notes: tuple[str, ...] = ()
    """Sentences on what is left out of the model's files, or overrides config.json."""
    growth_note: str = ""
    """Sentence on the rows that the embedding gets for added tokens; empty: none, or not known
    before the data is prepared."""

    @staticmethod
    def read(
        arguments: Sequence[Source],
        *,
        to_train: bool = True,
        needs_weights: bool = True,
        only_looks: bool = False,
        runs_here: bool = False,
        sees: Callable[[Recipe], NodePaths] | None = None,
        further: Callable[[Recipe], list[Problem]] | None = None,
    ) -> "Request":
        """Load and check a recipe, and find its model.

        Args:
            arguments: Recipe files, dicts, objects, and ``section.key=value`` overrides, which
                win over the others, in any order.
            to_train: Whether what can be planned but not trained yet is rejected; else it is
                noted, and accepted.
            needs_weights: Whether weights that the recipe loads must be there.
            only_looks: Whether the model's files are opened only to learn its shape, and not at
                all where the recipe says it.
            runs_here: Whether the work is done on this machine, so that its secrets are taken.
            sees: What nodes see that do the work, of a recipe; None: this machine does it.
            further: More checks, whose problems are reported with all others.

        Raises:
            RequestError: Anything in it is wrong; every problem that can be seen is named.
            AccessError: The Hugging Face hub asks for permission.
        """
        overrides = [each for each in arguments if isinstance(each, str) and is_override(each)]
        sources = [each for each in arguments if not (isinstance(each, str) and is_override(each))]
        overrides += start_overrides(sources, overrides)

        missing: list[Problem] = []

        def checks(recipe: Recipe) -> Iterator[Problem]:
            if sees is not None:
                sight = sees(recipe)
                yield from [
                    *check_existing_paths(recipe, sight),
                    *check_mounted_paths(recipe, sight),
                ]
            elif runs_here:
                missing.extend(check_local_paths(recipe))
                yield from _missing_secrets(recipe)
            if further is not None:
                yield from further(recipe)

        with _reported_with(missing):
            recipe = load_checked_recipe(
                sources, overrides, to_train=to_train, with_site=True, further=checks
            )
        _note_site(recipe)
        if any(problem.path == "model.path" for problem in missing):
            raise RecipeError(missing, name_of(sources))
        for problem in [] if to_train else check_trainable(recipe):
            info(f"note: {problem}")
        if runs_here:
            take_environment(recipe)
        sight = None if sees is None else sees(recipe)
        files = [Path(each) for each in sources if isinstance(each, str | Path)]
        name = "-".join(file.stem for file in files) or "run"
        with _reported_with(missing):  # what the model's files show too
            request = Request.of(
                recipe,
                name=name,
                needs_weights=needs_weights,
                shape_only=only_looks,
                node_paths=sight,
            )
        if missing:
            raise RecipeError(missing, name_of(sources))
        folder = request.model_dir
        notes = [*config_notes(recipe.model, folder), *head_notes(recipe, folder)]
        for note in [*notes, *filter(None, [request.growth_note])]:
            info(f"note: {note}")
        for note in [*request.weight_notes, *tokenizer_notes(recipe, folder)]:
            warn(note)
        return request

    @staticmethod
    def of(
        recipe: Recipe,
        *,
        name: str = "run",
        needs_weights: bool = True,
        shape_only: bool = False,
        node_paths: NodePaths | None = None,
        previous: Resolved | None = None,
    ) -> "Request":
        """The request of a recipe that is loaded and checked, such as the one of a run.

        Args:
            previous: The last attempt, on a resume: its commit of the hub is taken again.
        """
        if node_paths is not None:
            _raise_if_any(check_mounted_paths(recipe, node_paths))
        anchored = make_paths_absolute(recipe, node_paths)
        model, vocab_size = anchored.model, anchored.data.vocab_size
        folder, why_no_shape = None, ""
        is_stated = shape_only and _local_model_folder(anchored, node_paths) is None
        shape = stated_shape(model, vocab_size) if is_stated else None
        if shape is not None:
            shape = with_heads(shape, anchored.task.name)
        if shape is None:
            folder, why_no_shape = _find(
                model,
                node_paths,
                needs_weights=needs_weights,
                commit=None if previous is None else _commit_before(anchored, previous),
            )
            anchored = _on_its_path(anchored, folder)
            model = anchored.model
            shape = None if why_no_shape else shape_or_none(anchored, folder, vocab_size)
        match = None
        if folder is not None:
            match = inspect_folder(
                reuse_previous(anchored, previous)[0],
                folder,
                shape,
                has_weights=needs_weights or model.path is not None,
            )
        network = None if why_no_shape else network_or_none(anchored, folder)
        if network is not None:
            has_weights = folder is not None and has_weight_files(folder)
            _raise_if_any(check_image_size(anchored, network, folder if has_weights else None))
        growth = _growth(anchored, shape if match is None else match.shape, folder)
        _raise_if_any(_adapter_problems(model, growth.shape, knows_labels=False))
        request = Request(
            recipe=anchored,
            as_written=recipe,
            name=name,
            model_dir=folder,
            shape=growth.shape,
            growth_note=growth.note,
            no_shape_reason=why_no_shape,
            network=network,
            weight_notes=() if match is None else match.notes,
        )
        request.check_compatibility(is_new=previous is None)
        return request

    @property
    def required_shape(self) -> ModelShape:
        """The model's shape, of a request that is made without nodes elsewhere.

        Raises:
            RequestError: The model is a module of the user's own, or of no family here.
        """
        if is_generic(self.recipe):
            raise RequestError(
                f"no plan is possible: {self.model_dir} is not a model of a known family: {LACKS}. "
                f"Train a few steps and see the report.{self._chosen()}"
            )
        return require_shape(self.shape)

    @property
    def generic_sizes(self) -> ModelSizes | None:
        """Sizes that auto follows for a model of no family; None: it has one, or gives none."""
        if self.model_dir is None or not is_generic(self.recipe):
            return None
        return sizes_of(config_content(str(self.model_dir / "config.json")))

    def _chosen(self) -> str:
        """Return the values of auto in a recipe without a plan, in words."""
        preview = self.preview()
        lines = [
            f"\n  {setting}={value} ({preview.reasons[setting]})"
            for setting in FOLLOWING_A_SHAPE
            if setting in preview.reasons
            and (value := settings_in(preview.recipe.model_dump())[setting]) != "auto"
        ]
        return "\nIt would train with:" + "".join(lines) if lines else ""

    @property
    def planned_model(self) -> ModelShape | ImageNetwork:
        """Model that is planned.

        Raises:
            RequestError: As ``required_shape``.
        """
        return self.network or self.required_shape

    @property
    def checkpoint_bytes(self) -> int | None:
        """Bytes of one checkpoint on disk; None: the model must be built to count them."""
        from shardyard.planner.state_memory import checkpoint_bytes  # see _memory_fitter

        model = self.network or self.shape
        return None if model is None else checkpoint_bytes(self.recipe, model)

    @property
    def model_has_tokenizer(self) -> bool | None:
        """Whether the model brings a tokenizer; None: its files have not been opened."""
        model = self.recipe.model
        has_files = model.path is not None or model.hub is not None
        return None if has_files and self.model_dir is None else has_tokenizer(self.model_dir)

    def check_compatibility(
        self,
        machine: Machine | None = None,
        previous: Resolved | None = None,
        *,
        is_new: bool = True,
    ) -> None:
        """Hold everything against each other that is known before the data is prepared.

        Args:
            machine: The machine that trains; None: it has not been looked at.
            previous: The last attempt, on a resume.
            is_new: Whether the length of the run is looked at too: a resume keeps what it has.

        Raises:
            RecipeError: All that does not fit.
        """
        is_new = is_new and previous is None
        for phase in self.preview(machine, previous).of_phases:
            check_compatibility(phase.recipe, self.shape, machine, is_new=is_new)

    def preview(
        self, machine: Machine | None = None, previous: Resolved | None = None
    ) -> PartialResolution:
        """Resolve as far as possible before the data is prepared, or as it was in ``previous``."""
        facts = ResolveContext(
            name=self.name,
            shape=self.shape,
            sizes=self.generic_sizes,
            network=self.network,
            model_has_tokenizer=self.model_has_tokenizer,
            machine=machine,
            data=None if previous is None else previous.data,
            previous=previous,
            fitting=_memory_fitter(machine),
        )
        return resolve_partial(self.recipe, facts)

    def resolve(
        self, machine: Machine, data: DatasetMetadata, *, previous: Resolved | None = None
    ) -> Resolved:
        """Resolve everything, once the data is prepared.

        Raises:
            RecipeError: Degrees, batch, data and model do not fit each other or ``previous``.
        """
        shape = shape_or_none(self.recipe, self.model_dir, data.vocab_size)
        shape = with_labels(shape, data)
        match = None
        if self.model_dir is not None:
            kept = reuse_previous(self.recipe, previous)[0]
            match = inspect_folder(kept, self.model_dir, shape)
        own = shape if match is None else match.shape
        growth = _growth(self.recipe, own, self.model_dir, data)
        if previous is None:
            found = _adapter_problems(self.recipe.model, growth.shape, knows_labels=True)
            _raise_if_any(found)
        if growth.note and not self.growth_note:
            info(f"note: {growth.note}")
        return resolve(
            self.recipe,
            shape=growth.shape,
            sizes=self.generic_sizes,
            network=network_or_none(self.recipe, self.model_dir),
            machine=machine,
            data=data,
            name=self.name,
            model_dir=self.model_dir,
            model_has_tokenizer=has_tokenizer(self.model_dir),
            previous=previous,
            fitting=_memory_fitter(machine),
        )


def _memory_fitter(machine: Machine | None) -> MemoryFitter:
    # Imported when it is needed: a rejected recipe is answered without the planner.
    from shardyard.planner.fit import ClusterMemoryFitter

    return ClusterMemoryFitter(machine)


def _note_site(recipe: Recipe) -> None:
    """Say which settings come from site files: the recipe does not show them."""
    files: dict[str, list[str]] = {}
    for name, origin in recipe.run.origins.items():
        files.setdefault(origin.partition(", line ")[0], []).append(name)
    for file, names in files.items():
        info(f"note: site file {file} sets {', '.join(names)}")


def _meaning_in_tables(name: str, value: Any, by_pattern: bool) -> Meaning | None:
    """Look up an unknown key in the tables of `shardyard import`."""
    from shardyard.importers.configs.other_names import meaning_in_tables  # only after an error

    return meaning_in_tables(name, value, by_pattern)


lookups.append(_meaning_in_tables)


def option_hint(option: str, text: str) -> str | None:
    """A sentence on the setting somebody meant by ``--option text``; None: none is near."""
    value: Any = text or True
    with suppress(RequestError):
        value = read_yaml(text, source=option, is_file=False) if text else True
    return override_hint(option.lstrip("-").replace("-", "_"), text, value)


def sources_of(recipe: Source | Sequence[Source], more: Sequence[Source]) -> tuple[Source, ...]:
    """One list of what a recipe is made of: ``recipe`` may be one source or several."""
    if isinstance(recipe, Sequence) and not isinstance(recipe, str):
        return (*recipe, *more)
    return (recipe, *more)


def _local_model_folder(recipe: Recipe, node_paths: NodePaths | None) -> Path | None:
    """The folder of model.path, where this machine has it; it is inspected even to plan."""
    path = recipe.model.path
    if (
        path is None
        or (node_paths is not None and node_paths.holds(path))
        or not Path(path).is_dir()
    ):
        return None
    return Path(path)


def _on_its_path(recipe: Recipe, folder: Path | None) -> Recipe:
    """The recipe, or what it becomes with a model of no family."""
    config = None if folder is None else folder / "config.json"
    if recipe.model.module is not None or config is None or not config.is_file():
        return recipe
    content = config_content(str(config))
    kind = generic_type(content, str(config), task=recipe.task.name)
    if kind is None:
        return recipe
    assert folder is not None
    info(f"note: {folder} is a model of type {kind}, which is of no family here: {LACKS}")
    return on_generic_path(recipe, kind, folder, sizes=sizes_of(content))


def _commit_before(recipe: Recipe, previous: Resolved) -> str | None:
    """Return the commit that a run began with, unless another revision is requested now."""
    now, before = recipe.model, previous.recipe.model
    is_same = (now.hub, now.revision) == (before.hub, before.revision)
    return previous.model_commit if is_same else None


def take_environment(recipe: Recipe) -> None:
    """Put ``launch.env`` and a recipe's secrets into the environment, which children inherit.

    Raises:
        RequestError: One is missing here.
        AccessError: One may not be read by this user.
    """
    for warning in loose_files(recipe.secrets):
        warn(f"{warning}")
    os.environ.update(recipe.launch.env)
    found = resolve_local(recipe.secrets, os.environ)
    webhooks = {alert.webhook for alert in recipe.observe.alerts}
    for name in found:
        if os.environ.get(name, "").strip("\r\n") not in ("", found[name]):
            of_what = "address" if name in webhooks else "value"
            warn(f"secrets.{name}: blanks or a byte order mark around the {of_what} are left out")
    os.environ.update(found)
    if recipe.observe.alerts:
        from shardyard.control.alerts import validate_addresses  # and with it an HTTP client

        validate_addresses(recipe.observe.alerts, os.environ)


def _missing_secrets(recipe: Recipe) -> Iterator[Problem]:
    """Secrets that this machine would read and does not have."""
    environ = {**os.environ, **recipe.launch.env}
    for name, text in recipe.secrets.items():
        try:
            resolve_local({name: text}, environ)
        except RequestError as error:
            yield Problem(f"secrets.{name}", str(error).removeprefix(f"secrets.{name}: "))
        except AccessError:
            continue  # it has an exit code of its own


def _find(
    model: Model, node_paths: NodePaths | None, *, needs_weights: bool, commit: str | None
) -> tuple[Path | None, str]:
    """The model's own files; or why its shape is not known here, which node 0 then settles."""
    if model.module is not None:
        return None, NO_SHAPE
    is_elsewhere = (
        node_paths is not None and model.path is not None and node_paths.holds(model.path)
    )
    if is_elsewhere:
        return None, f"model.path={model.path} is on the nodes"
    try:
        folder = model_folder(model, needs_weights=needs_weights, commit=commit, log=info)
        return folder, ""
    except ShardyardError as error:
        if node_paths is None or model.hub is None:
            raise
        return None, f"model.hub={model.hub} could not be read here ({error})"


@contextmanager
def _reported_with(missing: list[Problem]) -> Iterator[None]:
    """Add paths that are missing to the problems of a recipe that the block raises."""
    try:
        yield
    except RecipeError as error:
        raise error.with_problems(missing) from None


def _adapter_problems(
    model: Model, shape: ModelShape | None, *, knows_labels: bool
) -> list[Problem]:
    """Compare the adapter that is continued with the model, where this machine has both."""
    lora = model.lora
    if lora.path is None or lora.rank is None or shape is None or not Path(lora.path).is_dir():
        return []
    if lora_target_errors(shape, lora.targets) or trained_module_errors(
        shape, lora.modules_to_save
    ):
        return []  # found by the check of the model
    errors = adapter_errors(shape, lora, knows_labels=knows_labels)
    return [Problem("model.lora.path", text) for text in errors]


def _growth(
    recipe: Recipe,
    shape: ModelShape | None,
    folder: Path | None,
    data: DatasetMetadata | None = None,
) -> Growth:
    """Return the model with a row for each token, as far as the tokenizer is known.

    Args:
        folder: The model's own files.
        data: The prepared data; None: the recipe's tokenizer is opened, where it is a folder.

    Raises:
        RecipeError: The tokenizer is not that of the model.
    """
    given = vocabulary_of_recipe(recipe, folder) if data is None else vocabulary_in(Path(data.dir))
    size = data.vocab_size if data is not None else 0 if given is None else given.size
    growth = grow(recipe, shape, given=given, size=size, model_dir=folder)
    _raise_if_any(list(growth.errors))
    return growth


def _raise_if_any(errors: list[Problem]) -> None:
    if errors:
        raise RecipeError(errors)


def check_compatibility(
    recipe: Recipe,
    shape: ModelShape | None,
    machine: Machine | None = None,
    *,
    is_new: bool = True,
) -> None:
    """Reject misfits like ``Request.check_compatibility``, for a recipe resolved as far as it can
    be.

    Raises:
        RecipeError: All that does not fit.
    """
    found = check_model(recipe, shape, devices_per_node=devices_of_node(recipe.cluster))
    if machine is not None:
        found += check_devices(recipe, machine)
    if is_new:
        found += check_run_length(recipe)
    if found:
        raise RecipeError(found)


# A recipe with every setting that can be known before its data is prepared.


def resolve_recipe(recipe: Source | Sequence[Source], *overrides: Source) -> PartialResolution:
    """Check a recipe and settle what is ``auto``, with the reason of each; needs no data.

    Args:
        recipe: The path of a YAML file, a dict of sections, or a ``Recipe``; or several of them.
        overrides: ``section.key=value``, or more of the recipe; later ones win.

    Raises:
        RequestError: Anything in it is wrong; every problem that can be seen is named.
    """
    words = sources_of(recipe, overrides)
    return Request.read(words, to_train=False, needs_weights=False, only_looks=True).preview()


def settings_of(request: Request, preview: PartialResolution) -> dict[str, dict[str, Any]]:
    """Dotted name -> ``value`` and ``reason`` of every setting, as `shardyard config` has them."""
    given = settings_in(request.recipe.model_dump(mode="json", exclude_unset=True))
    values = settings_in(preview.recipe.model_dump(mode="json"))
    return {
        name: {
            "value": value,
            "reason": preview.reasons.get(name)
            or origin_of(request.recipe, name)
            or ("given" if name in given else "default"),
        }
        for name, value in values.items()
        if value != {} or name != "secrets"  # a section without settings
    }


def check_weights_match_config(request: Request) -> None:
    """Compare the folder of a model of no family, or of an image network, with its config.json.

    Models of a family are compared where the request is read, without transformers.

    Raises:
        RecipeError: The folder holds less or more than the model.
    """
    folder, recipe = request.model_dir, request.recipe
    is_asked = request.network is not None or is_generic(recipe)
    if folder is None or not is_asked or not loads_weights(recipe) or not has_weight_files(folder):
        return
    found = run_program("shardyard.models.folder_report", [str(folder), recipe.task.name])[
        "problems"
    ]
    if found:
        setting = "model.path" if recipe.model.path is not None else "model.hub"
        raise RecipeError([Problem(setting, problem) for problem in found])
