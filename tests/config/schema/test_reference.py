"""Every setting has its sentence."""

from shardyard.config.schema.base import Section
from shardyard.config.schema.recipe import Recipe
from shardyard.config.schema.reference import sections, settings
from shardyard.launchers.registry import LAUNCHERS


def is_section(name: str) -> bool:
    section, key = name.split(".")
    content = getattr(Recipe(), section)
    fields = {field.alias or each: each for each, field in type(content).model_fields.items()}
    return isinstance(getattr(content, fields[key]), Section)


def test_every_setting_of_the_schema_is_listed() -> None:
    dumped = Recipe().model_dump()
    names = {f"{section}.{key}" for section, keys in dumped.items() for key in keys} | {
        "phases",
        "secrets",
    }
    nested = {name for name in names if name.count(".") == 1 and is_section(name)}
    launchers = {f"launch.{name.replace('-', '_')}" for name in LAUNCHERS} - {"launch.local"}
    beside = {"observe.profile", "observe.wandb", "observe.mlflow"}
    assert nested == {*launchers, *beside, "launch.side", "model.lora", "data.images"}
    for section, key in (name.split(".") for name in nested):
        names |= {f"{section}.{key}.{inner}" for inner in dumped[section][key]}
    assert set(settings()) == names - nested
    assert [section.name for section in sections()] == list(dumped)


def test_every_setting_and_section_has_a_whole_sentence() -> None:
    without = [name for name, setting in settings().items() if not setting.sentence.endswith(".")]
    assert without == []
    assert [
        s.name for s in sections() if not s.sentence and s.name not in ("phases", "secrets")
    ] == []


def test_types_and_bounds_are_said_in_words() -> None:
    said = {name: setting.accepts for name, setting in settings().items()}
    assert said["optim.lr"] == "a number above 0, or auto"
    assert said["optim.micro_batch"] == "a whole number of at least 1, or auto"
    assert said["run.seed"] == "a whole number of at least 0"
    assert said["model.dropout"] == "a number from 0 to below 1, or auto"
    assert said["checkpoint.keep_best"] == "true or false"
    assert said["parallel.zero"] == "1, 2 or 3, or auto"
    assert said["data.source"] == "text, or a list, each text"
