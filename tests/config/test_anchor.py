"""A recipe's relative paths start in the current folder, once and for all."""

from pathlib import Path

import pytest

from shardyard.config.load import load_recipe
from shardyard.config.paths import make_paths_absolute

HERE = "/here"


def anchored(monkeypatch: pytest.MonkeyPatch, folder: Path, *overrides: str) -> dict[str, object]:
    monkeypatch.chdir(folder)
    recipe = make_paths_absolute(load_recipe([], ["model.preset=llama-tiny", *overrides]))
    return recipe.model_dump(exclude_unset=True)


CASES = [
    (["data.source=./text"], "data", {"source": f"{HERE}/text"}),
    (["data.source=../text/*.txt"], "data", {"source": "/text/*.txt"}),
    (["data.eval_source=[a, s3://b/c]"], "data", {"eval_source": (f"{HERE}/a", "s3://b/c")}),
    (["data.source=[a, /b/c]"], "data", {"source": (f"{HERE}/a", "/b/c")}),
    (["data.source=python-stdlib"], "data", {"source": "python-stdlib"}),
    (["data.tokenizer=owner/name"], "data", {"tokenizer": "owner/name"}),
    (["data.tokenizer=auto"], "data", {"tokenizer": "auto"}),
    (["data.chat_template=chatml"], "data", {"chat_template": "chatml"}),
    (["data.chat_template=a.jinja"], "data", {"chat_template": f"{HERE}/a.jinja"}),
    (["data.tokenizer=there"], "data", {"tokenizer": f"{HERE}/there"}),
    (["data.dir=prepared"], "data", {"dir": f"{HERE}/prepared"}),
    (["run.dir=runs", "run.steps=2"], "run", {"dir": f"{HERE}/runs", "steps": 2}),
    (["model.path=there"], "model", {"preset": "llama-tiny", "path": f"{HERE}/there"}),
    (["cluster.file=ours.yaml"], "cluster", {"file": f"{HERE}/ours.yaml"}),
    ([], "run", None),  # what was not given is not written down as if it had been
]


@pytest.mark.parametrize(("overrides", "section", "content"), CASES)
def test_a_relative_path_becomes_absolute(
    overrides: list[str],
    section: str,
    content: dict[str, object] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = tmp_path / "here"
    (here / "there").mkdir(parents=True)
    found = anchored(monkeypatch, here, *overrides).get(section)
    assert str(found).replace(str(here), HERE).replace(str(tmp_path), "") == str(content)


def test_a_folder_whose_name_looks_like_a_glob_is_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "[a]"
    (here / "text").mkdir(parents=True)
    assert anchored(monkeypatch, here, "data.source=text")["data"] == {"source": f"{here}/text"}
    assert anchored(monkeypatch, here, "data.source='*.txt'")["data"] == {"source": f"{here}/*.txt"}
