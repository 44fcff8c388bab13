"""Findings of `shardyard doctor`: one sentence each, with how to fix it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from shardyard.errors import AccessError, CapacityError, ShardyardError

Severity = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    name: str
    """In a word or two: ``devices``, ``shared memory``."""
    verdict: Severity
    """problem: the run would fail; warning: it would be slow, or may fail later."""
    what: str
    """The finding, with numbers."""
    mend: str = ""
    """The fix to apply now; empty where none is needed."""


Check = Callable[[], Iterable[Finding]]
"""One look at a target; may raise ShardyardError where it cannot be asked."""


def gather(checks: Mapping[str, Check], *, essential: str) -> list[Finding]:
    """Return the findings of several checks; a check without access rights becomes a warning.

    Args:
        checks: In their order, by the name of the finding that an error becomes.
        essential: The check without which a launch could not be right either.
    """
    findings: list[Finding] = []
    for name, check in checks.items():
        try:
            findings += check()
        except CapacityError as error:  # nothing else will be answered either
            return [*findings, Finding(name=name, verdict="problem", what=str(error))]
        except AccessError as error:
            severity: Severity = "problem" if name == essential else "warning"
            findings.append(Finding(name=name, verdict=severity, what=f"cannot be asked: {error}"))
        except ShardyardError as error:
            findings.append(Finding(name=name, verdict="problem", what=str(error)))
    return findings


def count(findings: list[Finding], severity: Severity) -> int:
    """Return how many findings have a verdict."""
    return sum(finding.verdict == severity for finding in findings)
