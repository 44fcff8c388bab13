"""What is refused before anything of a run on this machine is made."""

from pathlib import Path

import pytest

from shardyard.control.request import Request
from shardyard.control.train import first_attempt
from shardyard.errors import RequestError, ShardyardError, StorageError


def asked(runs: Path, *words: str) -> Request:
    recipe = ["model.preset=llama-tiny", f"run.dir={runs}", "cluster.device=cpu", *words]
    return Request.read(recipe, runs_here=True)


def test_a_run_that_is_there_is_not_begun_again(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "recipe.yaml").write_text("{}")
    with pytest.raises(RequestError, match=r"run.id='a' exists already in .*shardyard resume"):
        first_attempt(asked(tmp_path, "run.id=a"))


@pytest.mark.parametrize(
    ("runs", "words", "kind", "why"),
    [
        ("file", (), StorageError, "is a file, not a folder"),
        ("runs", ("cluster.nodes=2",), RequestError, "cluster.nodes=2 but this verb trains on one"),
    ],
)
def test_what_this_machine_cannot_do_is_told_before_it_is_looked_at(
    tmp_path: Path, runs: str, words: tuple[str, ...], kind: type[ShardyardError], why: str
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(kind, match=why):
        first_attempt(asked(tmp_path / runs, *words))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
