"""What `shardyard doctor` finds: one sentence each, with how to mend it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from shardyard.errors import AccessError, CapacityError, ShardyardError

Verdict = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    name: str
    """In a word or two: ``devices``, ``shared memory``."""
    verdict: Verdict
    """problem: the run would fail; warning: it would be slow, or may fail later."""
    what: str
    """What was found, with numbers."""
    mend: str = ""
    """What to do now; empty where nothing is to be done."""


Check = Callable[[], Iterable[Finding]]
"""One look at a target; may raise ShardyardError where it cannot be asked."""


def gather(checks: Mapping[str, Check], *, essential: str) -> list[Finding]:
    """What several checks found; those that may not be asked are warnings.

    Args:
        checks: In their order, by the name of the finding that an error becomes.
        essential: The check without which a launch could not be right either.
    """
    found: list[Finding] = []
    for name, check in checks.items():
        try:
            found += check()
        except CapacityError as error:  # nothing else will be answered either
            return [*found, Finding(name=name, verdict="problem", what=str(error))]
        except AccessError as error:
            verdict: Verdict = "problem" if name == essential else "warning"
            found.append(Finding(name=name, verdict=verdict, what=f"cannot be asked: {error}"))
        except ShardyardError as error:
            found.append(Finding(name=name, verdict="problem", what=str(error)))
    return found


def count(findings: list[Finding], verdict: Verdict) -> int:
    """How many findings have a verdict."""
    return sum(finding.verdict == verdict for finding in findings)
