"""What settings took that were measured by turns (``by_turns.py``)."""

from collections.abc import Sequence
from statistics import median
from typing import Any


def compared(answers: Sequence[Sequence[dict[str, Any] | None]]) -> list[dict[str, Any]]:
    """For each setting its median step by turn, and how it stands beside the first of its turn.

    Args:
        answers: For each setting those of its turns, in their order; None: there was no time.
    """
    steps = [[_step_s(answer) for answer in of_setting] for of_setting in answers]
    return [
        {
            "step_s": of_setting,
            "times_the_first": _middle(
                [mine / its for mine, its in zip(of_setting, steps[0], strict=True) if mine and its]
            ),
            **_failure(turns),
        }
        for of_setting, turns in zip(steps, answers, strict=True)
    ]


def _step_s(answer: dict[str, Any] | None) -> float | None:
    if answer is None or answer["status"] != "ok":
        return None
    found: float = median(answer["step_times_s"])
    return found


def _middle(ratios: Sequence[float]) -> float | None:
    return median(ratios) if ratios else None


def _failure(turns: Sequence[dict[str, Any] | None]) -> dict[str, Any]:
    """How the setting went: as its worst turn."""
    done = [turn for turn in turns if turn is not None]
    if not done:
        return {"status": "not run", "message": "no time was left"}
    failed = next((turn for turn in done if turn["status"] != "ok"), None)
    if failed is not None:
        return {"status": failed["status"], "message": failed.get("message")}
    return {"status": "ok", "attention": done[0]["attention"], "losses": done[0]["losses"]}
