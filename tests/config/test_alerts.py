"""Alerts that could never be sent, and addresses in a recipe, are refused with a hint."""

from typing import Any

import pytest

from shardyard.config.rules.observe import check_alerts
from shardyard.config.schema.recipe import Recipe

ADDRESS = "https://hooks.example/T0/secret"


def problems(*alerts: dict[str, Any], **sections: Any) -> list[str]:
    recipe = Recipe.model_validate(
        {"secrets": {"OWN": "env"}, "observe": {"alerts": list(alerts)}, **sections}
    )
    return [str(problem) for problem in check_alerts(recipe)]


def test_what_can_be_sent_is_accepted() -> None:
    fine = {"when": ["failed", "cost", "target"], "webhook": "OWN", "above_usd": 10.0}
    assert problems(fine, run={"target": {"loss": 2.0}}) == []


@pytest.mark.parametrize(
    ("alert", "words"),
    [
        ({"when": ["failed"], "webhook": ADDRESS}, "Keep it as a secret and give its name"),
        ({"when": ["failed"], "webhook": "OTHER"}, "=OTHER is not a name in secrets. Say where"),
        ({"when": ["cost"], "webhook": "OWN"}, "=cost needs a sum. Give above_usd"),
        ({"when": ["failed"], "webhook": "OWN", "above_usd": 3.0}, "is only for when: cost"),
        ({"when": ["target"], "webhook": "OWN"}, "the recipe has no run.target. Give one"),
    ],
)
def test_what_could_not_be_sent_is_refused(alert: dict[str, Any], words: str) -> None:
    (told,) = problems(alert)
    assert told.startswith("observe.alerts[0].") and words in told
    assert "secret" not in told or ADDRESS not in told
