"""`observe.wandb` and `observe.mlflow`: what is refused, and what they need."""

import re

import pytest

from shardyard.config.rules.check import check
from shardyard.config.rules.observe import services_of
from shardyard.config.schema.recipe import Recipe
from shardyard.config.validate import recipe_of
from shardyard.config.versions import EXPORTERS, check_packages, engines_for
from shardyard.errors import RecipeError, RequestError
from shardyard.trackers.service import PREFIXES, SERVICES, WORDS

SMALL = {"model": {"preset": "llama-tiny"}, "run": {"steps": 10}}


def recipe(**observe: object) -> Recipe:
    found = recipe_of({**SMALL, "observe": observe})
    check(found)
    return found


def test_nothing_is_sent_unless_it_is_asked_for() -> None:
    assert services_of(recipe()) == ()
    both = recipe(wandb={"project": "llamas"}, mlflow={"url": "https://mlflow.example:5000/a"})
    assert services_of(both) == ("wandb", "mlflow")


def test_tables_of_the_services_name_the_same() -> None:
    assert set(EXPORTERS) == set(SERVICES) == set(PREFIXES) == set(WORDS) == {"wandb", "mlflow"}


REFUSED = [
    ({"wandb": {"entity": "me"}}, r"observe\.wandb\.entity=me and no .*Give the project"),
    ({"wandb": {"url": "http://w"}}, r"observe\.wandb\.url=http://w and no .*Give the project"),
    ({"wandb": {"project": "a/b"}}, r"observe\.wandb\.project=a/b holds one of .* W&B refuses"),
    ({"wandb": {"project": "p" * 129}}, r"observe\.wandb\.project"),
    ({"wandb": {"project": "a", "url": "w.example"}}, r"observe\.wandb\.url.*http\(s\) address"),
    ({"mlflow": {"experiment": "e"}}, r"observe\.mlflow\.experiment=e and no .*Give the address"),
    ({"mlflow": {"url": "sqlite:///a.db"}}, r"observe\.mlflow\.url.*an http\(s\) address"),
    ({"mlflow": {"uri": "http://m"}}, r"observe\.mlflow\.uri.*has: url, experiment"),
    ({"mlflow": {"url": "http://me:pass@m"}}, r"observe\.mlflow\.url.*\(not shown\)"),
    ({"wandb": {"project": "a", "entity": "local-" + "0f" * 20}}, r"observe\.wandb\.entity"),
]


@pytest.mark.parametrize(("observe", "words"), REFUSED, ids=lambda each: str(each)[:40])
def test_what_makes_no_sense_or_is_a_secret_is_refused(
    observe: dict[str, object], words: str
) -> None:
    with pytest.raises(RecipeError, match=words) as refused:
        recipe(**observe)
    assert "me:pass" not in str(refused.value) and "0f0f" not in str(refused.value)


@pytest.mark.parametrize(
    ("observe", "package", "setting"),
    [
        ({"wandb": {"project": "a"}}, "wandb", "observe.wandb.project"),
        ({"mlflow": {"url": "http://m"}}, "mlflow-skinny", "observe.mlflow.url"),
    ],
    ids=["wandb", "mlflow"],
)
def test_a_package_that_is_missing_is_asked_for_by_its_setting(
    observe: dict[str, object], package: str, setting: str
) -> None:
    engines = engines_for(recipe(**observe))
    with pytest.raises(RequestError) as refused:
        check_packages(engines, lambda name: None if name == package else "999")
    words = str(refused.value)
    assert re.search(rf"{package}: none found, >=[\d.<,]+ required by {setting}", words)
    assert f"'{package}>=" in words.splitlines()[-1]
    assert package not in {engine.package for engine in engines_for(recipe())}
