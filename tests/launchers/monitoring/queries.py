"""What a PromQL query asks for, as far as tests of dashboards and alerts want to know."""

import re

from shardyard.launchers.monitoring.alerts import LABELS

_METRIC = re.compile(r"\b(?:shardyard_|DCGM_)\w+")
_SELECTOR = re.compile(r"\b((?:shardyard_|DCGM_)\w+)\{([^}]*)\}")
_GROUPED = re.compile(r"\b(?:by|on) \(([^)]*)\)")
_SHOWN = re.compile(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}")


def metrics_of(query: str) -> set[str]:
    """Names of all metrics in it."""
    return set(_METRIC.findall(query))


def unknown_in(query: str, shown: str = "") -> set[str]:
    """Metrics that nobody exports, and labels that those have not.

    Args:
        shown: A legend or an annotation, with labels in double braces.
    """
    names = metrics_of(query)
    found = names - LABELS.keys()
    labels = set().union(*(LABELS.get(name, set()) for name in names))
    for name, matchers in _SELECTOR.findall(query):
        found |= set(re.findall(r"(\w+)\s*[=!]", matchers)) - LABELS.get(name, set())
    for group in [*_GROUPED.findall(query), ", ".join(_SHOWN.findall(shown))]:
        found |= {word.strip() for word in group.split(",") if word.strip()} - labels
    return found
