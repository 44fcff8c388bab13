"""Required and tested versions of the engines that Shardyard builds on.

They are read from the installed packages' metadata, without imports, in milliseconds.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version

from shardyard.config.rules.observe import services_of
from shardyard.config.schema.recipe import Recipe
from shardyard.config.sources import SCHEMES, scheme_of
from shardyard.config.tasks import TASKS
from shardyard.errors import RequestError
from shardyard.families.registry import FAMILIES
from shardyard.families.shape import ModelShape
from shardyard.plugins import Group, PlugIn, plug_in_named


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One package of the compatibility table."""

    package: str
    at_least: str
    below: str | None = None
    """First version that is rejected; None: newer ones may work and only cause a warning."""
    tested: tuple[str, ...]
    note: str
    """Why this range."""
    required_by: str = ""
    """The setting without which it is not needed, or not this new."""


TORCH = Engine(
    package="torch",
    at_least="2.11",
    below="2.16",  # torch_private.py uses what the next version may lack: it is tried first
    tested=("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0"),
    note="fully_shard, the elastic agent, and what torch_private.py names",
)

OLDEST_CODE = (7, 5)
"""Compute capability from which torch's usual wheels, those of PyPI, have code for a device. Volta
(7.0) went out of the wheels of CUDA 12.8 with torch 2.11 (pytorch/pytorch#172352, 2026-01-13) and
is no target of CUDA 13 (its release notes, 2025-08-07)."""
WHEEL_OF_OLDER = "cu126"
"""Index of the wheels that have code for older ones, with torch 2.11 to 2.14 (RELEASE.md of 2.11
and 2.12, pytorch/pytorch#190355, 2026-07-17); 2.15 has none (#190385, 2026-07-17)."""

ENGINES = (
    TORCH,
    Engine(
        package="transformers",
        at_least="5.17",
        below="6",
        tested=("5.17.0", "5.23.0"),
        note="configs with rope_parameters",
    ),
    Engine(package="safetensors", at_least="0.8", tested=(), note="checkpoints and exports"),
    Engine(package="tokenizers", at_least="0.23.1", tested=(), note="tokenizer.json"),
    Engine(package="numpy", at_least="1.26.4", tested=(), note="data shards"),
    Engine(package="pydantic", at_least="2.11", below="3", tested=(), note="recipes"),
)

TORCH_FOR_EXPERTS = replace(
    TORCH,
    at_least="2.12",
    tested=TORCH.tested[1:],
    note="experts and their block in one group of fully_shard, split over different ranks",
    required_by="parallel.ep above 1",
)

TORCHAO = Engine(
    package="torchao",
    at_least="0.18",
    below="0.19",
    tested=("0.18.0",),
    note="its products are called by name",
    required_by="precision.compute=fp8",
)

TENSORBOARD = Engine(
    package="tensorboard",
    at_least="2.17",
    tested=(),
    note="torch's SummaryWriter needs it",
    required_by="observe.tensorboard=true",
)

PROMETHEUS = Engine(
    package="prometheus_client",
    at_least="0.20",
    tested=("0.26.0",),
    note="start_http_server that can be shut down",
    required_by="observe.prometheus",
)

WANDB = Engine(
    package="wandb",
    at_least="0.31",
    tested=("0.31.0",),
    note="a run that is gone on with says which step it has last",
    required_by="observe.wandb.project",
)

MLFLOW = Engine(
    package="mlflow-skinny",
    at_least="3.17.2",
    below="4",
    tested=("3.17.2",),
    note="MlflowClient; the whole mlflow brings it",
    required_by="observe.mlflow.url",
)

EXPORTERS = {"wandb": WANDB, "mlflow": MLFLOW}
"""Service -> the client that it is spoken to with."""

OPTIONAL = (TORCHAO, TENSORBOARD, PROMETHEUS, WANDB, MLFLOW)
"""Engines that only some settings need."""


def wheels_for_older() -> str:
    """Return the address of the wheels for older devices."""
    return f"https://download.pytorch.org/whl/{WHEEL_OF_OLDER}"


def engines_for(recipe: Recipe) -> tuple[Engine, ...]:
    """Return the engines that a recipe needs: the table, and those that only some settings need."""
    engines: tuple[Engine, ...] = ENGINES
    if recipe.parallel.ep > 1:
        engines = tuple(TORCH_FOR_EXPERTS if e.package == "torch" else e for e in engines)
    if recipe.precision.compute == "fp8":
        engines = (*engines, TORCHAO)
    if recipe.observe.tensorboard:
        engines = (*engines, TENSORBOARD)
    engines = (*engines, *(EXPORTERS[name] for name in services_of(recipe)))
    return engines if recipe.observe.prometheus is None else (*engines, PROMETHEUS)


def installed_version(package: str) -> str | None:
    """Version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def check_packages(
    engines: tuple[Engine, ...] = ENGINES,
    find_version: Callable[[str], str | None] = installed_version,
) -> list[str]:
    """Reject packages outside the required range.

    Returns:
        One warning for each package whose version is in range but was not tested.

    Raises:
        RequestError: Packages are missing, too old or too new; names all, and how to install them.
    """
    wrong, warnings = [], []
    for engine in engines:
        found = find_version(engine.package)
        if found is None or not _in_range(found, engine):
            by = f" by {engine.required_by}" if engine.required_by else ""
            required = f"{_range(engine)} required{by}"
            wrong.append(f"  {engine.package}: {found or 'none'} found, {required}")
        elif engine.tested and _plain(found) not in engine.tested:
            warnings.append(
                f"{engine.package} {found} was not tested with this version of shardyard "
                f"(tested: {', '.join(engine.tested)})"
            )
    if wrong:
        packages = [e.package for e in engines if any(f"  {e.package}:" in w for w in wrong)]
        wanted = " ".join(f"'{e.package}{_range(e)}'" for e in engines if e.package in packages)
        raise RequestError(
            "installed packages do not fit this version of shardyard:\n"
            + "\n".join(wrong)
            + f"\nInstall them with: python -m pip install {wanted}"
        )
    return warnings


def package_versions() -> dict[str, str | None]:
    """Package -> installed version, for the manifest."""
    return {engine.package: installed_version(engine.package) for engine in (*ENGINES, *OPTIONAL)}


def _in_range(version_text: str, engine: Engine) -> bool:
    number = _numbers(version_text)
    return number >= _numbers(engine.at_least) and (
        engine.below is None or number < _numbers(engine.below)
    )


def _range(engine: Engine) -> str:
    return f">={engine.at_least}" + (f",<{engine.below}" if engine.below else "")


def _numbers(text: str) -> tuple[int, ...]:
    """``2.13.0+cpu`` -> ``(2, 13, 0)``."""
    return tuple(int(number) for number in re.findall(r"\d+", re.split(r"[^\d.]", text)[0]))


def _plain(text: str) -> str:
    """Without the local part that names the build: ``2.13.0+cpu`` -> ``2.13.0``."""
    return text.partition("+")[0]


# Which installed packages the nodes of a run need.


def plug_ins_of(recipe: Recipe, shape: ModelShape | None) -> list[PlugIn]:
    """Return the plug-ins that a run's nodes need. Launchers start the nodes and are left out.

    Raises:
        RequestError: Several packages claim a name.
    """
    used: list[tuple[Group, str, Collection[str]]] = [("tasks", recipe.task.name, TASKS)]
    if shape is not None:
        used.append(("families", shape.model_type, FAMILIES))
    schemes = [scheme_of(entry) for _, entry in recipe.data.entries]
    used += [("sources", scheme, SCHEMES) for scheme in sorted({each for each in schemes if each})]
    found = [plug_in_named(group, name) for group, name, ours in used if name not in ours]
    return [plug_in for plug_in in found if plug_in is not None]


def is_needed_to_train(entry: Mapping[str, str]) -> bool:
    """Whether an entry of manifest.json is one of ``plug_ins_of``: a launcher has done its work
    when a node begins, and a reader of a suffix when the data is prepared."""
    return entry["group"] != "launchers" and not entry["name"].startswith(".")
