"""Names that packages add: found, imported when they are used, checked, and told apart."""

import sys
from pathlib import Path

import click
import pytest

from shardyard import plugins
from shardyard.cli import main
from shardyard.config.load import dump_recipe, load_recipe
from shardyard.config.resolved import settings_in, unflatten
from shardyard.config.rules.check import load_checked_recipe
from shardyard.config.schema.plugin_sections import recipe_with_defaults
from shardyard.config.schema.recipe import Recipe
from shardyard.config.tasks import TASKS, task_row
from shardyard.config.versions import plug_ins_of
from shardyard.control.doctor import plug_in_findings
from shardyard.data.formats import format_named, format_of
from shardyard.data.stores.base import store_of
from shardyard.errors import RecipeError, RequestError, StorageError
from shardyard.families.presets import PRESETS
from shardyard.families.registry import family_of
from shardyard.io import terminal
from shardyard.launchers.base import launcher_class
from shardyard.launchers.ledger import Ledger
from shardyard.launchers.registry import LAUNCHERS
from tests.plug_in.packages import Packages, forget

MODEL = "model.preset=llama-tiny"


def refused(*overrides: str) -> str:
    """What is said of a recipe that is wrong."""
    with pytest.raises(RecipeError) as error:
        load_checked_recipe([], [MODEL, *overrides])
    return str(error.value)


@pytest.mark.usefixtures("packages")
def test_names_of_ours_ask_no_package_and_wrong_values_neither() -> None:
    load_checked_recipe([], [MODEL, "task.name=causal_lm", "launch.slurm.partition=a"])
    refused("optim.lr=-1", "task.prompt_=x", "launch.imge=x")
    launcher_class("slurm")
    assert plugins._claims.cache_info().currsize == 0


def test_a_package_is_imported_when_its_name_is_used_and_not_before(packages: Packages) -> None:
    for name in ("one", "two"):
        points = {"tasks": {name: f"of_{name}:ROW"}, "launchers": {name: f"of_{name}:Launcher"}}
        packages.add(name, points, **{f"of_{name}": "ROW = 1\n"})
    assert "unknown task 'on'. Did you mean one?" in refused("task.name=on")
    refused("launch.ones.partition=a")
    assert {"of_one", "of_two"} & sys.modules.keys() == set()
    refused("task.name=one")
    assert "of_one" in sys.modules and "of_two" not in sys.modules


@pytest.mark.usefixtures("letters")
def test_a_wrong_name_is_told_with_the_nearest_and_all_that_there_are() -> None:
    names = ", ".join([*TASKS, "vowels (shardyard-letters 1.0)"])
    said = f"Did you mean vowels? Available: {names}"
    assert said in refused("task.name=vowel")
    with pytest.raises(
        RequestError, match=r"unknown launcher 'papermail'. Did you mean paper-mail"
    ):
        launcher_class("papermail")


@pytest.mark.usefixtures("letters")
def test_settings_of_a_package_are_checked_as_ours_are() -> None:
    said = refused(
        "task.name=vowels", "task.vowels.at_leest=1", "task.vowels.at_least=9",
        "launch.paper_mail.speed=fast", "launch.paper_mail.to=1e3",
    )  # fmt: skip
    assert said.splitlines()[1:] == [
        "  task.vowels.at_leest: unknown setting. Did you mean task.vowels.at_least?",
        "  launch.paper_mail.speed='fast' is not slow or express. (How fast it goes.)",
        "  task.vowels.at_least=9 is not a whole number from 1 to 8. (Vowels that a token must "
        "hold.)",
    ]


@pytest.mark.usefixtures("letters")
def test_what_a_package_says_of_its_settings_is_told_under_their_section() -> None:
    said = refused("launch.paper_mail.speed=express")
    assert "  launch.paper_mail: speed=express needs 2 stamps." in said


@pytest.mark.usefixtures("packages")
def test_settings_of_what_is_not_installed_name_what_is_missing() -> None:
    said = refused("launch.paper_mail.to=me", "task.name=vowels", "task.vowels.at_least=2")
    words = "unknown setting, and no installed package adds a"
    assert f"launch.paper_mail: {words} launcher " in said
    assert f"task.vowels: {words} task " in said
    assert "task.name=vowels: unknown task 'vowels'. Available: causal_lm, masked_lm, " in said


def test_what_a_run_was_asked_is_read_where_the_package_is_not(
    letters: Packages, tmp_path: Path
) -> None:
    overrides = [MODEL, "launch.paper_mail.to=me", "launch.paper_mail.labels={a.b: c}"]
    recipe = load_recipe([], overrides)
    file = tmp_path / "recipe.yaml"
    file.write_text(dump_recipe(recipe))
    assert load_recipe([file]) == recipe
    for info in letters.folder.glob("*.dist-info"):
        info.rename(tmp_path / "gone")
    forget()
    assert load_recipe([file], of_run=True) == recipe
    with pytest.raises(RecipeError, match=r"launch.paper_mail: unknown setting, and no "):
        load_recipe([file])


@pytest.mark.usefixtures("letters")
def test_a_run_writes_down_every_setting_of_its_task() -> None:
    recipe = load_checked_recipe([], [MODEL, "task.name=vowels", "task.vowels.at_least=2"])
    whole = recipe_with_defaults(recipe)
    flat = settings_in(whole.model_dump(mode="json"))
    assert flat["task.vowels.at_least"] == 2 and flat["task.vowels.letters"] == "aeiou"
    assert Recipe.model_validate(unflatten(flat)).task == whole.task
    assert "letters" not in dump_recipe(recipe)
    assert [each.to_json()["distribution"] for each in plug_ins_of(recipe, None)] == [
        "shardyard-letters"
    ]
    assert plug_ins_of(load_recipe([], [MODEL]), PRESETS["llama-tiny"].shape) == []


@pytest.mark.usefixtures("letters")
def test_settings_of_a_task_that_is_not_the_run_s_are_refused() -> None:
    said = refused("task.vowels.at_least=2")
    assert "task.vowels: holds settings of a task, and task.name=causal_lm does not read" in said


BROKEN = {
    "raises": ("1 / 0\n", "cannot be loaded from of_raises:ROW: ZeroDivisionError: division by"),
    "exits": ("raise SystemExit(3)\n", "cannot be loaded from of_exits:ROW: SystemExit: 3"),
    "lacks": ("", "cannot be loaded from of_lacks:ROW: AttributeError: module 'of_lacks' has no"),
    "kind": ("ROW = {}\n", r"\(of_kind:ROW\) is dict, not a shardyard.config.tasks.TaskRow"),
    "settings": (
        "from shardyard.config.tasks import TaskRow\n"
        "ROW = TaskRow(code='', prepare='', metrics={'loss': 1}, is_causal=True, settings=int)\n",
        "has settings=<class 'int'>, which is not a subclass of",
    ),
    "metrics": (
        "from shardyard.config.tasks import TaskRow\n"
        "ROW = TaskRow(code='', prepare='', metrics={}, is_causal=True)\n",
        "has no loss as its first metric",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_package_is_named_once_and_breaks_nothing_else(
    packages: Packages, name: str
) -> None:
    source, words = BROKEN[name]
    packages.add(f"pack-{name}", {"tasks": {name: f"of_{name}:ROW"}}, **{f"of_{name}": source})
    with pytest.raises(RequestError, match=words) as error:
        load_checked_recipe([], [MODEL, f"task.name={name}", f"task.{name}.weight=1"])
    assert f"the task '{name}' of pack-{name} 1.0 " in str(error.value)
    assert f"uninstall pack-{name}" in str(error.value)
    load_checked_recipe([], [MODEL])
    assert main(["config", "--schema"]) == 0
    (found,) = plug_in_findings()
    assert found.verdict == "warning" and f"pack-{name} 1.0" in found.what


def test_an_error_in_the_code_of_a_package_is_named_as_its_own(
    packages: Packages, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "def ROW():\n    raise ZeroDivisionError('division by zero')\n"
    packages.add("pack-late", {"tasks": {"late": "of_late:ROW"}}, of_late=source)
    late = plugins.load_object(plugins.plug_in_named("tasks", "late"), "of_late:ROW")
    foreign, own = click.Command("a", callback=late), click.Command("b", callback=lambda: 1 / 0)
    assert terminal.run(foreign, []) == 1
    said = capsys.readouterr().err
    assert "It was raised in the task 'late' of pack-late 1.0" in said and "bug of" not in said
    assert terminal.run(own, []) == 1
    assert "This is a bug of shardyard" in capsys.readouterr().err


def test_a_launcher_that_lacks_something_is_told_what(letters: Packages) -> None:
    letters.add(
        "couriers",
        {"launchers": {name: f"of_couriers:{name.title()}" for name in ("bike", "car", "van")}},
        of_couriers="from letters.launcher import PaperMail\n"
        "class Bike:\n    name = 'bike'\n    def render(self, request): ...\n"
        "class Car(PaperMail): ...\n"
        "Van = PaperMail()\n",
    )
    with pytest.raises(
        RequestError, match=r"couriers 1.0 .* has no capabilities, forms, node_paths, "
    ):
        launcher_class("bike")
    with pytest.raises(RequestError, match=r"calls itself 'paper-mail': the ledger would not find"):
        launcher_class("car")
    with pytest.raises(RequestError, match=r"\(of_couriers:Van\) is .* not a class"):
        launcher_class("van")


def test_a_name_that_is_ours_or_claimed_twice_is_told_with_its_packages(
    packages: Packages,
) -> None:
    row = "from shardyard.config.tasks import TASKS\nROW = TASKS['masked_lm']\n"
    packages.add("first", {"tasks": {"twice": "of_first:ROW"}}, of_first=row)
    both = {"tasks": {"twice": "of_first:ROW", "causal_lm": "of_first:ROW"}}
    packages.add("second", both, version="2.0")
    said = refused("task.name=twice")
    assert "the task 'twice' is added by first 1.0 and by second 2.0, and which one is" in said
    assert task_row("causal_lm").is_causal
    told = [found.what for found in plug_in_findings()]
    assert any(
        "'causal_lm' of second 2.0 is not used: the name is Shardyard's" in text for text in told
    )


def test_metadata_that_cannot_be_read_breaks_no_other_package(letters: Packages) -> None:
    letters.add("torn", "[shardyard.tasks]\nno equals sign\n")
    load_checked_recipe([], [MODEL, "task.name=vowels"])
    first, *others = plug_in_findings()
    assert first.what.startswith("the entry points of torn 1.0 cannot be read: ")
    assert [found.verdict for found in others] == ["ok"] * 5


def test_a_section_that_is_our_own_setting_is_told(
    letters: Packages, capsys: pytest.CaptureFixture[str]
) -> None:
    letters.add("posters", {"tasks": {"prompt": "letters.row:ROW"}})
    assert main(["config", "--schema"]) == 0
    assert (
        "settings that cannot be given: task.prompt is Shardyard's own"
    ) in capsys.readouterr().err


@pytest.mark.usefixtures("letters")
def test_the_schema_shows_sections_of_packages_after_ours(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["config", "--schema"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "task.vowels: Predict the tokens that hold vowels, and no others. (the task " in shown
    assert "launch.paper_mail.stamps 1 a whole number from 1 to 4 Stamps on the letter." in shown
    assert main(["config", "--schema", "--json"]) == 0
    assert '"package": "shardyard-letters 1.0"' in capsys.readouterr().out


@pytest.mark.usefixtures("letters")
def test_a_ledger_holds_a_package_s_lines_to_its_forms(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.intend("letter", "a", launcher="paper-mail")
    with pytest.raises(StorageError, match="paper-mail has no kind='letter'"):
        ledger.live()


def test_our_own_launchers_are_whole() -> None:
    from shardyard.launchers.base import _launcher_error

    errors = {name: _launcher_error(launcher_class(name), name) for name in LAUNCHERS}
    assert errors == dict.fromkeys(LAUNCHERS, "")


def test_a_preset_of_a_package_begins_with_its_family_and_asks_no_other(letters: Packages) -> None:
    letters.add("heli", {"families": {"heli": "of_heli:F"}}, of_heli="1 / 0\n")
    recipe = load_checked_recipe([], ["model.preset=helium-mini"])
    assert [each.name for each in plug_ins_of(recipe, PRESETS["helium-mini"].shape)] == ["helium"]
    assert "of_heli" not in sys.modules
    assert "model.preset=helium-maxi is not a preset" in refused("model.preset=helium-maxi")
    with pytest.raises(RequestError, match=r"the model family 'heli' of heli 1.0 cannot be loaded"):
        load_checked_recipe([], ["model.preset=heli-mini"])


def test_a_family_of_a_package_is_one_and_has_its_own_name(letters: Packages) -> None:
    names = {"helium2": "letters.family:HELIUM", "olmo9": "letters.row:ROW"}
    letters.add("others", {"families": names})
    with pytest.raises(RequestError, match=r"is of model type 'helium', and has to be named like"):
        family_of("helium2")
    with pytest.raises(RequestError, match=r"is TaskRow, not a shardyard.families.family.Family"):
        family_of("olmo9")
    with pytest.raises(RequestError, match=r"unknown model family 'heliu'. Did you mean helium"):
        family_of("heliu")


@pytest.mark.usefixtures("letters")
def test_a_scheme_of_a_package_is_read_and_an_unknown_one_is_told_with_all() -> None:
    recipe = load_checked_recipe([], [MODEL, "data.source=letters://shelf"])
    assert [each.name for each in plug_ins_of(recipe, None)] == ["letters"]
    said = refused("data.source=notes://shelf")
    assert "Available: s3, http, https, gs," in said and "letters (shardyard-letters 1.0)" in said
    assert "may be a password" in refused("data.source=letters://me:secret@shelf")


def test_a_broken_scheme_and_a_broken_suffix_are_told_with_their_package(letters: Packages) -> None:
    letters.add(
        "shelves",
        {"sources": {"shelf": "of_shelf:ROW", "half": "of_shelf:HALF", ".shf": "of_shelf:ROW"}},
        of_shelf="from shardyard.config.sources import Scheme\n"
        "ROW, HALF = 1, Scheme(code='of_shelf:Half')\n"
        "class Half:\n    def find(self, entry, *, own): ...\n",
    )
    assert "the data source 'shelf' of shelves 1.0" in refused("data.source=shelf://a")
    with pytest.raises(RequestError, match=r"half:// is read by .*Half'>, which has no open "):
        store_of("half://a")
    assert format_of("a.shf", "by_suffix") == ".shf" and format_of("a.ltr", "text") == ".ltr"
    assert format_named(".ltr").suffixes == (".ltr",)
    with pytest.raises(RequestError, match=r"is int, not a shardyard.data.formats.Format"):
        format_named(".shf")
