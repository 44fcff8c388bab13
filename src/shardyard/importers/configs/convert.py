"""Files in, recipe out: read, recognised, judged key by key, put together, checked."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from shardyard.config.load import load_recipe
from shardyard.config.rules.check import load_checked_recipe
from shardyard.config.schema.recipe import Recipe
from shardyard.errors import Problem, RecipeError, RequestError
from shardyard.importers.configs import kubeflow, scripts, shardyard_manifest, shell
from shardyard.importers.configs.combine import (
    WITH_ANY_ARGUMENTS,
    CombinedConfig,
    Implied,
    combine,
    resolve_rejected,
)
from shardyard.importers.configs.detect import SOURCES, Source, source_of
from shardyard.importers.configs.rules import (
    QUANTITIES,
    Outcome,
    OutcomeKind,
    SourceConfig,
    apply_rules,
    is_default,
    none,
    rejected,
)
from shardyard.importers.configs.source_file import ConfigFile, leaves, read_files
from shardyard.io.files import parse_json
from shardyard.io.sanitize import sanitize
from shardyard.io.yaml import read_yaml, write_yaml

# The recipe as YAML: each line with where it came from.

GIVEN = "given on the command line"
_WIDTH = 40
"""Column at which comments begin, unless a line is longer."""

_KEYED = (
    "launch.env",
    "launch.kubernetes.node_selector",
    "launch.slurm.options",
    "secrets",
)
"""Settings whose value is a mapping, filled key by key."""


def tree_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted names -> sections; a name below a mapping's setting is one key, dots and all."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *parts, last = _parts(name)
        into = tree
        for part in parts:
            into = into.setdefault(part, {})
        into[last] = value
    return tree


def _parts(name: str) -> list[str]:
    for setting in _KEYED:
        if name.startswith(f"{setting}."):
            return [*setting.split("."), name.removeprefix(f"{setting}.")]
    return name.split(".")


def recipe_text(
    content: Mapping[str, Any],
    origins: Mapping[str, str],
    outcomes: Sequence[Outcome],
    files: Sequence[str],
) -> str:
    """The whole file.

    Args:
        content: Sections as the schema has taken them.
        origins: Dotted name -> where its value came from; others are the command line's.
        files: What was imported.
    """
    lines = [f"# Imported from {', '.join(map(sanitize, files))}."]
    order = [name for name in Recipe.model_fields if name in content]
    for section in order:
        lines += ["", *_lines(section, content[section], origins, 0, section)]
    left = [each for each in outcomes if each.result.kind is OutcomeKind.NONE]
    if left:
        lines += ["", "# Without a counterpart:"]
        lines += [f"#   {sanitize(f'{each.location}: {each.result.words}')}" for each in left]
    return "\n".join(lines) + "\n"


def _lines(key: str, value: Any, origins: Mapping[str, str], depth: int, name: str) -> list[str]:
    indent = "  " * depth
    if isinstance(value, dict) and value:
        found = [f"{indent}{_scalar(key)}:"]
        for inner, content in value.items():
            found += _lines(str(inner), content, origins, depth + 1, f"{name}.{inner}")
        return found
    line = f"{indent}{_scalar(key)}: {_flow(value)}"
    return [f"{line.ljust(_WIDTH)}  # {sanitize(origins.get(name, GIVEN))}"]


def _flow(value: Any) -> str:
    """A value on one line."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_scalar(key)}: {_flow(each)}' for key, each in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_flow, value))}]"
    return _scalar(value, is_inside=True)


def _scalar(value: Any, *, is_inside: bool = False) -> str:
    """Return the value as YAML on one line; a text with a sign of a list is quoted."""
    if isinstance(value, str) and (
        any(sign in value for sign in ",[]{}\n") or (is_inside and not value)
    ):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
    text = write_yaml({"x": value}).removeprefix("x:").strip()
    return text if "\n" not in text else '"' + str(value).replace('"', '\\"') + '"'


@dataclass(frozen=True, kw_only=True)
class Imported:
    """Result of importing some files."""

    files: tuple[str, ...]
    text: str
    """The recipe; empty where there are problems."""
    recipe: Mapping[str, Any]
    """The same as sections."""
    outcomes: tuple[Outcome, ...]
    errors: tuple[Problem, ...]

    def raise_errors(self) -> None:
        """Raises:
        RecipeError: All of them, where there are some.
        """
        if self.errors:
            raise RecipeError(self.errors, ", ".join(self.files), hint=_HINT)

    def of_kind(self, kind: OutcomeKind) -> list[Outcome]:
        """The outcomes of one kind."""
        return [outcome for outcome in self.outcomes if outcome.result.kind is kind]

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "files": list(self.files),
            "recipe": dict(self.recipe),
            "text": self.text,
            "outcomes": [outcome.to_json() for outcome in self.outcomes],
            "problems": [str(problem) for problem in self.errors],
        }


_HINT = (
    "No recipe was made. Add section.key=value for settings, --without KEY for keys to leave out."
)


def import_files(
    paths: Sequence[Path], words: Sequence[str] = (), without: Sequence[str] = ()
) -> Imported:
    """Return the recipe of a job that is configured by some files.

    Args:
        words: ``section.key=value``, which win over the files.
        without: Rejected keys to leave out; ``*`` matches any text.

    Raises:
        RequestError: A file cannot be read, or is of no known kind; a word is none.
    """
    whole = _find_rendered_recipe(paths)
    if whole is not None:
        return _import_rendered(paths, whole, words)
    overrides = _parse_overrides(words)
    read = [file for path in paths for file in _detect_sources(path)]
    names = {path.name for path in paths}
    outcomes = [outcome for file, source in read for outcome in _outcomes(file, source, names)]
    outcomes = _ignore_extra_starts(outcomes)
    implied = [_implied(file, source) for file, source in read if source is not None]
    implied += [each for file, source in read for each in _implied_of_commands(file, source)]
    outcomes = resolve_rejected(_exclude_keys(outcomes, without), implied, overrides)
    job = combine(outcomes, implied, overrides)
    outcomes = [_drop_unused(outcome, job) for outcome in outcomes]
    return _check_recipe(paths, words, outcomes, job)


def _parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """Settings of the command line by their dotted names, a mapping's also key by key."""
    content = load_recipe((), words).model_dump(mode="json", exclude_unset=True)
    overrides: dict[str, Any] = {word.partition("=")[0]: None for word in words}
    return overrides | {name: value for name, value in leaves(content) if name}


def _find_rendered_recipe(paths: Sequence[Path]) -> str | None:
    """The recipe in what a launch here rendered, where the files are that."""
    for path in paths:
        for file in read_files(path):
            if file.content is not None:
                found = shardyard_manifest.recipe_in(file.content)
            elif file.text.lstrip()[:1] == "[":
                found = shardyard_manifest.recipe_of_calls(_calls(file))
            else:
                found = shardyard_manifest.recipe_of_script(file.name, file.text)
            if found is not None:
                return found
    return None


def _calls(file: ConfigFile) -> list[Any]:
    try:
        content = parse_json(file.text)
    except ValueError:
        return []
    return content if isinstance(content, list) else []


def _import_rendered(paths: Sequence[Path], text: str, words: Sequence[str]) -> Imported:
    content = _content(text)
    recipe = load_recipe([content], words)
    sections = recipe.model_dump(mode="json", exclude_unset=True)
    names = tuple(map(str, paths))
    origin = f"{names[0]}: the recipe that it was rendered from"
    origins = {name: origin for name, _ in leaves(content)}
    for word in words:
        origins.pop(word.partition("=")[0], None)
    return Imported(
        files=names, text=recipe_text(sections, origins, (), names), recipe=sections,
        outcomes=(), errors=(),
    )  # fmt: skip


def _content(text: str) -> dict[str, Any]:
    content = read_yaml(text, source="the recipe in it")
    return content if isinstance(content, dict) else {}


def _detect_sources(path: Path) -> list[tuple[ConfigFile, Source | None]]:
    found = [(file, source_of(file)) for file in read_files(path)]
    if not any(source for _, source in found):
        known = "; ".join(f"{each.name} ({each.recognised_by})" for each in SOURCES)
        raise RequestError(
            f"{path} is not a configuration of a known tool. Known are: {known}; and what "
            "`shardyard launch --dry-run` prints. Give one of these."
        )
    return found


def _outcomes(
    file: ConfigFile, source: Source | None, file_names: Collection[str]
) -> list[Outcome]:
    """One for each value of a file, and those of commands in it.

    Args:
        file_names: Names of all files that were given.
    """
    if source is None:
        kind = (file.content or {}).get("kind", "object")
        words = f"another {kind} of the file, which a launch does not send"
        return [
            Outcome(file=file.name, entry=entry, result=none(words)) for entry in file.entries()
        ]
    entries = file.entries() if file.content is not None else shell.read_script(file.text)
    found = apply_rules(file.name, entries, source.rows, source.name)
    found = _reject_missing_files(found, file, source, file_names)
    config = SourceConfig({entry.path: entry for entry in entries})
    for path, inner in _commands(file, config).items():
        found += apply_rules(f"{file.name}: {path}", inner, scripts.ROWS)
    return found


def _commands(file: ConfigFile, config: SourceConfig) -> dict[str, list[Any]]:
    return kubeflow.commands(config) if (file.content or {}).get("kind") else {}


def _read_config(file: ConfigFile) -> SourceConfig:
    entries = file.entries() if file.content is not None else shell.read_script(file.text)
    return SourceConfig({entry.path: entry for entry in entries})


def _implied(file: ConfigFile, source: Source) -> Implied:
    config = _read_config(file)
    return Implied(
        origin=f"{file.name} ({source.name})",
        values=source.implied(config),
        fills_auto=source.fills_auto(config),
        decides=source.decides(config),
        notes=source.notes(config),
    )


def _implied_of_commands(file: ConfigFile, source: Source | None) -> list[Implied]:
    if source is None or file.content is None:
        return []
    found = []
    for path, entries in _commands(file, _read_config(file)).items():
        config = SourceConfig({entry.path: entry for entry in entries})
        values = scripts.implied(config)
        values.pop("cluster.devices", None)  # the operator says it by PET_NPROC_PER_NODE
        is_trainer = scripts.is_of_trainer(config)
        found.append(Implied(origin=f"{file.name}: {path}", values=values, fills_auto=is_trainer))
    return found


def _ignore_extra_starts(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Clear the problem of a script that starts no process if another one does."""
    has_start = any(each.entry.path == "start.program" for each in outcomes)
    started = none("another file starts the processes")
    return [
        replace(each, result=started) if has_start and each.entry.path == "start" else each
        for each in outcomes
    ]


def _reject_missing_files(
    outcomes: Sequence[Outcome], file: ConfigFile, source: Source, file_names: Collection[str]
) -> list[Outcome]:
    """Return the outcomes; those that name a file that is not given become rejections."""
    named = source.files(_read_config(file))
    missing = {path: name for path, name in named.items() if Path(name).name not in file_names}
    return [
        replace(each, result=rejected(_NOT_GIVEN.format(
            name=missing[each.entry.path], file=file.name, last=Path(missing[each.entry.path]).name
        )))
        if each.entry.path in missing else each
        for each in outcomes
    ]  # fmt: skip


_NOT_GIVEN = (
    "={name} was not given, and says more of the job. Give it too: `shardyard import {file} "
    ".../{last}`."
)


def _exclude_keys(outcomes: Sequence[Outcome], without: Sequence[str]) -> list[Outcome]:
    used: set[str] = set()
    found = []
    for outcome in outcomes:
        key = outcome.entry.path
        pattern = next((each for each in without if key == each or fnmatchcase(key, each)), None)
        if pattern is None:
            found.append(outcome)
            continue
        used.add(pattern)
        found.append(replace(outcome, result=none("left out as asked (--without)")))
    for pattern in without:
        if pattern not in used:
            raise RequestError(
                f"--without {pattern}: no file has that key. Give it as `shardyard import --json` "
                "prints it."
            )
    return found


def _drop_unused(outcome: Outcome, job: CombinedConfig) -> Outcome:
    """Accumulation that no batch could be made of has no counterpart."""
    is_alone = set(outcome.result.settings) == {"accumulation_steps"}
    known = set(job.claims) | set(job.overrides)
    if outcome.entry.path.rpartition(".")[2] == "max_grad_norm" and _is_decided(outcome, job):
        return replace(
            outcome, result=none("DeepSpeed clips, and its file has no gradient_clipping")
        )
    is_used = {"optim.global_batch", "optim.batch_per_device"} & known
    if outcome.result.kind is OutcomeKind.MAPPED and is_alone and not is_used:
        words = "optim.global_batch and optim.batch_per_device both set a step: give one"
        return replace(outcome, result=none(words))
    return outcome


def _is_decided(outcome: Outcome, job: CombinedConfig) -> bool:
    claim = job.claims.get("optim.grad_clip")
    says = outcome.result.settings
    return "optim.grad_clip" in says and claim is not None and WITH_ANY_ARGUMENTS in claim.origin


def _check_recipe(
    paths: Sequence[Path], words: Sequence[str], outcomes: Sequence[Outcome], job: CombinedConfig
) -> Imported:
    claims = {name: claim for name, claim in job.claims.items() if name not in QUANTITIES}
    kept = {
        name: claim for name, claim in claims.items()
        if claim.has_note or not is_default({name: claim.value})
    }  # fmt: skip
    problems = [_to_problem(each) for each in outcomes if each.result.kind is OutcomeKind.REFUSED]
    problems += job.errors
    names = tuple(map(str, paths))
    tree = tree_of({name: claim.value for name, claim in kept.items()})
    problems += _missing_settings(set(kept) | set(job.overrides))
    sections: dict[str, Any] = {}
    try:
        recipe = load_checked_recipe([tree], words, to_train=False)
        sections = recipe.model_dump(mode="json", exclude_unset=True)
    except RecipeError as error:
        told = {problem.path for problem in problems}
        problems += [_with_origin(each, kept) for each in error.problems if each.path not in told]
    origins = {name: claim.origin for name, claim in kept.items() if name not in job.overrides}
    text = "" if problems else recipe_text(sections, origins, outcomes, names)
    return Imported(
        files=names, text=text, recipe={} if problems else sections, outcomes=tuple(outcomes),
        errors=tuple(problems),
    )  # fmt: skip


def _with_origin(problem: Problem, claims: Mapping[str, Any]) -> Problem:
    """A problem of the recipe, with where the value came from."""
    claim = claims.get(problem.path)
    return problem if claim is None else Problem(problem.path, f"{problem.text} ({claim.origin})")


def _to_problem(outcome: Outcome) -> Problem:
    line = "" if outcome.entry.line is None else f", line {outcome.entry.line}"
    return Problem(f"{outcome.file}{line}: {outcome.entry.path}", outcome.result.words)


def _missing_settings(settings: set[str]) -> list[Problem]:
    """Return problems for model and data, which are in the script that is not read."""
    found = []
    if not settings & {"model.preset", "model.path", "model.hub", "model.module"}:
        text = (
            "is not said by the files. Give model.preset=..., model.hub=owner/name, "
            "model.path=FOLDER or model.module=package.module:function."
        )
        found.append(Problem("model", text))
    if not settings & {"data.source", "data.mixture"}:
        text = "is not said by the files. Give data.source=FILES (docs/verbs/prepare.md)."
        found.append(Problem("data.source", text))
    return found
