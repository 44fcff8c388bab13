"""The task `vowels`: its row and its settings. Read with every recipe that names it: no torch."""

from typing import Annotated

from pydantic import Field

from shardyard.config.schema.base import Section
from shardyard.config.tasks import Metric, TaskRow


class Vowels(Section):
    """Predict the tokens that hold vowels, and no others."""

    letters: str = "aeiou"
    """Which letters are vowels."""
    at_least: Annotated[int, Field(ge=1, le=8)] = 1
    """Vowels that a token must hold."""


ROW = TaskRow(
    code="letters.task:VowelTask",
    prepare="shardyard.data.prepare:prepare",
    metrics={"loss": Metric(), "vowel_score": Metric(is_better_higher=True)},
    is_causal=True,
    settings=Vowels,
)
