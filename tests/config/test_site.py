"""Site files: what they may hold, which wins, where each value is said to come from."""

from pathlib import Path

import pytest

from shardyard.config import site
from shardyard.config.fingerprint import may_change
from shardyard.config.load import dump_recipe, load_recipe
from shardyard.config.origins import origin_of
from shardyard.config.rules.check import load_checked_recipe
from shardyard.config.schema.reference import settings
from shardyard.config.site import may_be_of_site, site_files
from shardyard.errors import RecipeError, RequestError


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Places of the three files; none is there yet."""
    home = tmp_path / "home"
    (home / ".config").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(site, "_MACHINE", tmp_path / "etc.yaml")
    monkeypatch.delenv("SHARDYARD_SITE")
    return {
        "machine": tmp_path / "etc.yaml",
        "user": home / ".config/shardyard.yaml",
        "named": tmp_path / "named.yaml",
    }


def test_there_need_not_be_any(files: dict[str, Path]) -> None:
    assert site_files() == []
    assert load_recipe(with_site=True) == load_recipe()
    assert "origins" not in dump_recipe(load_recipe([], ["run.steps=3"], with_site=True))
    assert not files["machine"].exists()


def test_a_later_one_wins_and_the_recipe_wins_over_all(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, file in enumerate(files.values()):
        texts = [f"launch:\n  time_limit: {number + 1}h", "  image: a", "  run_dir: /runs"]
        file.write_text("\n".join(texts[: 3 - number]) + "\n")
    monkeypatch.setenv("SHARDYARD_SITE", str(files["named"]))

    recipe = load_recipe([{"launch": {"run_dir": "/mine"}}], with_site=True)

    launch = recipe.launch
    assert (launch.time_limit, launch.image, launch.run_dir) == ("3h", "a", "/mine")
    assert recipe.run.origins == {
        "launch.time_limit": f"{files['named']}, line 2",
        "launch.image": "~/.config/shardyard.yaml, line 3",
    }
    assert origin_of(recipe, "launch.run_dir") is None
    assert site_files() == list(files.values())


def test_mappings_are_merged_key_by_key(files: dict[str, Path]) -> None:
    files["machine"].write_text("run: {tags: {team: nlp, project: old}}\nlaunch: {env: {A: 1}}\n")
    recipe = load_recipe(
        [{"run": {"tags": {"project": "new"}}}], ["launch.env.B=2"], with_site=True
    )

    assert recipe.run.tags == {"team": "nlp", "project": "new"}
    assert recipe.launch.env == {"A": "1", "B": "2"}
    assert origin_of(recipe, "run.tags") == f"team from site file {files['machine']}, line 1"


def test_a_run_keeps_what_the_site_gave(files: dict[str, Path], tmp_path: Path) -> None:
    files["machine"].write_text("launch:\n  image: a\n  time_limit: 1h\n")
    asked = tmp_path / "recipe.yaml"
    asked.write_text(dump_recipe(load_recipe([], ["run.steps=3"], with_site=True)))
    files["machine"].write_text("launch: {image: b}\n")

    again = load_recipe([asked], ["launch.time_limit=2h"], of_run=True)

    assert again.launch.image == "a"
    assert again.run.origins == {"launch.image": f"{files['machine']}, line 2"}


def test_none_reads_no_file(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    files["machine"].write_text("launch: {image: a}\n")
    monkeypatch.setenv("SHARDYARD_SITE", "none")
    assert load_recipe(with_site=True).launch.image is None


def test_a_named_file_must_be_there(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDYARD_SITE", str(files["named"]))
    with pytest.raises(RequestError, match=r"named\.yaml does not exist.*SHARDYARD_SITE=none"):
        load_recipe(with_site=True)


def test_errors_name_file_and_line(files: dict[str, Path]) -> None:
    files["user"].write_text(
        "launch:\n  imge: a\n  run_dir: runs\n  kubernetes:\n    ttl_s: x\noptim:\n  lr: 3\n"
        "run:\n  tags:\n    Team: a\n"
    )
    with pytest.raises(RecipeError) as error:
        load_checked_recipe([], ["model.preset=llama-tiny", "data.source=a.txt"], with_site=True)

    found = {problem.path: problem.text for problem in error.value.problems}
    lines = {path: text.rpartition(", line ")[2].rstrip(")") for path, text in found.items()}
    assert lines == {
        "launch.imge": "2",
        "launch.kubernetes.ttl_s": "5",
        "launch.run_dir": "3",
        "optim.lr": "7",
        "run.tags": "10",
    }
    assert all("~/.config/shardyard.yaml" in text for text in found.values())
    assert "Move it to the recipe" in found["optim.lr"]


@pytest.mark.parametrize("text", ["- a\n", "launch: {image: a\n", "launch: \x00\n"])
def test_a_file_that_holds_no_sections_is_named(files: dict[str, Path], text: str) -> None:
    files["user"].write_text(text)
    with pytest.raises(RequestError, match=r"site file .*shardyard\.yaml"):
        load_recipe(with_site=True)


def test_no_setting_of_a_site_changes_what_is_learnt() -> None:
    allowed = [name for name in settings() if may_be_of_site(name)]
    assert all(map(may_change, allowed))
    assert {"launch.image", "run.tags", "cluster.file"} <= set(allowed)
    others = (
        "run.name run.id run.seed model.preset data.source optim.lr parallel.tp precision.compute"
    )
    assert not any(map(may_be_of_site, [*others.split(), "cluster.nodes", "cluster.devices"]))


LIMITS = "limits:\n  max_nodes: 4\n  max_usd: 500\n  instances: [p5.48xlarge]\n"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["cluster.nodes=5"], "cluster.nodes=5 is above limits.max_nodes=4 of site file {file}, "
                              "line 2. Set cluster.nodes=4."),
        (["elastic.max_nodes=9"], "elastic.max_nodes=9 is above limits.max_nodes=4"),
        (["launch.max_usd=501"], "=501 is above limits.max_usd=500 of site file {file}, line 3. "
                                 "Set launch.max_usd=500."),
        (["cluster.instance=g5.xlarge"], "=g5.xlarge is not among limits.instances=p5.48xlarge of "
                                         "site file {file}, line 4. Set cluster.instance=p5.48xl"),
    ],
)  # fmt: skip
def test_a_recipe_beyond_a_limit_is_rejected_by_name(
    files: dict[str, Path], settings: list[str], said: str
) -> None:
    files["machine"].write_text(LIMITS)
    files["user"].write_text("limits: {max_nodes: 400}\n")  # limits of all files hold
    load_checked_recipe([], ["model.preset=llama-tiny", "cluster.nodes=4"], with_site=True)
    with pytest.raises(RecipeError) as error:
        load_checked_recipe([], ["model.preset=llama-tiny", *settings], with_site=True)
    assert said.format(file=files["machine"]) in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("limits: {max_node: 4}", "limits.max_node: is no limit. There are max_nodes, max_usd"),
        ("limits: {max_nodes: many}", "limits.max_nodes='many' is not a whole number from 1"),
        ("limits: {max_usd: 0}", "limits.max_usd=0 is not a number above 0"),
        ("limits: {instances: p5}", "limits.instances='p5' is not a list of instance types"),
        ("limits: {launchers: []}", "limits.launchers=[] is not a list of launchers"),
        ("limits: 3", "limits: is not a mapping. Write limits such as limits: {max_nodes: 8}"),
    ],
)
def test_a_wrong_limit_is_named(files: dict[str, Path], text: str, said: str) -> None:
    files["machine"].write_text(f"{text}\n")
    with pytest.raises(RecipeError) as error:
        load_recipe(with_site=True)
    assert said in str(error.value) and f"({files['machine']}, line 1)" in str(error.value)
