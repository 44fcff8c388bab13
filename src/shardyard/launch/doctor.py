"""What `shardyard doctor` finds: one sentence each, with how to mend it; and who can be asked."""

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from shardyard.launch.base import LaunchRequest

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


@runtime_checkable
class HasChecks(Protocol):
    """A launcher that can look at its target before anything is submitted."""

    def checks(self, request: LaunchRequest) -> list[Finding]:
        """Look, and change nothing. What cannot be asked is a finding, not an error."""


def count(findings: list[Finding], verdict: Verdict) -> int:
    """How many findings have a verdict."""
    return sum(finding.verdict == verdict for finding in findings)
