"""What is refused before anything of a run on this machine is made."""

from pathlib import Path

import pytest

from shardyard.config.schema.recipe import Recipe
from shardyard.control.attempt import Attempt
from shardyard.control.request import Request
from shardyard.control.train import begin, first_attempt, next_attempt
from shardyard.errors import RequestError, SetUpError, ShardyardError, StorageError
from shardyard.rundir.layout import RunDir
from shardyard.rundir.lease import Lease
from tests.report.synthetic import LAPTOP, resolved_run


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


def test_an_interface_that_is_not_there_is_named_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # launch.env outranks it
    request = asked(tmp_path / "runs", "launch.env={GLOO_SOCKET_IFNAME: eth9}")
    with pytest.raises(SetUpError, match="GLOO_SOCKET_IFNAME=eth9: interface"):
        first_attempt(request)
    assert not (tmp_path / "runs").exists()


def test_of_two_that_begin_one_run_at_once_the_second_changes_nothing(tmp_path: Path) -> None:
    def attempt(seed: int) -> Attempt:
        recipe = Recipe.model_validate({"run": {"seed": seed}})
        run_dir = RunDir(tmp_path / "a")
        return Attempt(
            run_dir=run_dir, number=0, requested=recipe, resolved=resolved_run(), machine=LAPTOP
        )

    begun = begin(attempt(1))
    before = begun.run_dir.recipe.read_text()
    with pytest.raises(RequestError, match="is being trained already"):
        begin(attempt(2))
    assert begun.lease is not None
    begun.lease.close()
    with pytest.raises(RequestError, match="exists already"):
        begin(attempt(2))
    assert begun.run_dir.recipe.read_text() == before
    assert len(begun.run_dir.events.read_text().splitlines()) == 1


def test_a_resume_is_refused_before_it_reads_or_writes_while_another_goes_on(
    tmp_path: Path,
) -> None:
    run = RunDir(tmp_path / "a")
    lease = Lease(run.lease)
    run.recipe.write_text("not: [a recipe")
    with pytest.raises(RequestError, match="is being trained already"):
        next_attempt(run, ())
    lease.close()
    with pytest.raises(ShardyardError, match="is not closed: add"):
        next_attempt(run, ())
    Lease(run.lease).close()  # given back with the error
