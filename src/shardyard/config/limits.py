"""Limits of site files, which no recipe may exceed: nodes, dollars, instances and launchers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shardyard.config.schema.recipe import Recipe
from shardyard.errors import Problem

SECTION = "limits"
"""Section of a site file."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """One limit of one site file; all of all files hold."""

    name: str
    value: Any
    origin: str
    """File and line."""

    def __str__(self) -> str:
        shown = ", ".join(self.value) if isinstance(self.value, tuple) else f"{self.value:g}"
        return f"{SECTION}.{self.name}={shown} of site file {self.origin}"


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and value > 0 else None


def _nodes(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _names(value: Any) -> tuple[str, ...] | None:
    is_list = isinstance(value, list) and value and all(isinstance(each, str) for each in value)
    return tuple(value) if is_list else None


_KINDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "max_nodes": (_nodes, "a whole number from 1, such as 8"),
    "max_usd": (_number, "a number above 0, such as 500"),
    "instances": (_names, "a list of instance types, such as [p5.48xlarge]"),
    "launchers": (_names, "a list of launchers, such as [slurm, kubernetes]"),
}


def read_limits(content: Any, locate: Callable[[str], str]) -> tuple[list[Limit], list[Problem]]:
    """Return the limits of a site file, and what is wrong with them.

    Args:
        content: Its section ``limits``.
        locate: Gives file and line of a dotted name.
    """
    if not isinstance(content, dict):
        text = f"is not a mapping. Write limits such as {SECTION}: {{max_nodes: 8}}."
        return [], [Problem(SECTION, text)]
    found, problems = [], []
    for name, value in content.items():
        path = f"{SECTION}.{name}"
        if name not in _KINDS:
            problems.append(Problem(path, f"is no limit. There are {', '.join(_KINDS)}."))
            continue
        read, words = _KINDS[name]
        if (valid := read(value)) is None:
            problems.append(Problem(path, f"={value!r} is not {words}."))
        else:
            found.append(Limit(name=name, value=valid, origin=locate(path)))
    return found, problems


def beyond_limits(recipe: Recipe, limits: Sequence[Limit]) -> Iterator[Problem]:
    """Yield each setting of a recipe that exceeds a limit."""
    cluster, elastic, launch = recipe.cluster, recipe.elastic, recipe.launch
    for limit in limits:
        if limit.name == "max_nodes":
            for path, nodes in (
                ("cluster.nodes", cluster.nodes), ("elastic.max_nodes", elastic.max_nodes),
            ):  # fmt: skip
                if isinstance(nodes, int) and nodes > limit.value:
                    yield Problem(path, f"={nodes} is above {limit}. Set {path}={limit.value}.")
        elif limit.name == "max_usd" and launch.max_usd is not None:
            if launch.max_usd > limit.value:
                text = f"={launch.max_usd:g} is above {limit}. Set launch.max_usd={limit.value:g}."
                yield Problem("launch.max_usd", text)
        elif limit.name == "instances" and cluster.instance not in (None, *limit.value):
            text = f"={cluster.instance} is not among {limit}. Set cluster.instance="
            yield Problem("cluster.instance", f"{text}{limit.value[0]}.")


def beyond_launchers(launcher: str, limits: Sequence[Limit]) -> str | None:
    """Return why a launcher is not allowed, and which is; None: it is."""
    for limit in limits:
        if limit.name == "launchers" and launcher not in limit.value:
            return f"--on {launcher} is not among {limit}. Use --on {limit.value[0]}."
    return None


def least_usd(limits: Sequence[Limit]) -> Limit | None:
    """Return the smallest limit of dollars; None: there is none."""
    found = [limit for limit in limits if limit.name == "max_usd"]
    return min(found, key=lambda limit: float(limit.value), default=None)
