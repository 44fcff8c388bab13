"""Every wrong situation of launching that is really made to happen: one table.

Each row is a function that brings the situation about through the command line, with what must be
said: where and what, and the next step. docs/errors.md is made from it.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from shardyard.cli import main
from shardyard.errors import StorageError
from shardyard.launchers.ledger import Ledger, LedgerEntry


class Desk:
    """Where a user sits: a folder of runs, an environment, a command line."""

    on = "local"
    recipe: tuple[str, ...] = ()

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.folder, self.environ, self._capsys = folder, monkeypatch, capsys
        self.runs = folder / "runs"
        self.said = ""
        """What the last command printed, stdout and stderr."""
        self.launchers: dict[str, Any] | None = None

    def shardyard(self, *words: str) -> int:
        """Run a command; returns its exit code."""
        code = main(words, launchers=self.launchers)
        said = self._capsys.readouterr()
        self.said = said.out + said.err
        return code

    def launch(self, *words: str) -> int:
        """Launch the recipe, with what is to be different, as run ``first``."""
        options = [word for word in words if word.startswith("--")]
        settings = [word for word in words if not word.startswith("--")]
        asked = options if "--dry-run" in options else ["--yes", *options]
        return self.shardyard("launch", *self._recipe(settings), "--on", self.on, *asked)

    def doctor(self, *words: str) -> int:
        """Look at the target."""
        return self.shardyard("doctor", *self._recipe(list(words)), "--on", self.on)

    def launched(self, *words: str) -> None:
        """Launch, and be sure of it: the situation comes after."""
        assert self.launch(*words) == 0, self.said

    def steer(self, verb: str, *words: str) -> int:
        """A verb about run ``first``."""
        return self.shardyard(verb, "first", *words, "--runs-dir", str(self.runs))

    def outside(self) -> set[str]:
        """Names of what there is outside the run's folder, as the ledger would name it."""
        return set()

    def in_ledgers(self) -> set[str]:
        """Names and kinds that the runs' ledgers still hold."""
        entries: list[LedgerEntry] = []
        for path in self.runs.glob("*/ledger.jsonl"):
            with suppress(StorageError):  # damaged, which is some situations
                entries += Ledger(path).live()
        return {entry.name for entry in entries} | {entry.kind for entry in entries}

    def _recipe(self, changes: list[str]) -> list[str]:
        given = {word.partition("=")[0] for word in changes}
        base = [f"run.dir={self.runs}", "run.id=first", *self.recipe]
        return [word for word in base if word.partition("=")[0] not in given] + changes


@dataclass(frozen=True, kw_only=True)
class Situation:
    """One wrong situation, and what must be said."""

    what: str
    exit_code: int
    says: str
    """Literal words: where and what."""
    do: str
    """Literal words: the next step; empty: nothing is to be done."""
    happen: Callable[[Any], int]


@dataclass
class Situations:
    """Those of one launcher."""

    launcher: str
    rows: list[Situation] = field(default_factory=list)

    def row(
        self, what: str, exit_code: int, *, says: str, do: str
    ) -> Callable[[Callable[[Any], int]], Callable[[Any], int]]:
        """Add a function that makes it happen and returns the last command's exit code."""

        def add(happen: Callable[[Any], int]) -> Callable[[Any], int]:
            self.rows.append(
                Situation(what=what, exit_code=exit_code, says=says, do=do, happen=happen)
            )
            return happen

        return add


LISTS = (
    "wrong_anywhere",
    "wrong_paths",
    "wrong_hub",
    "wrong_slurm",
    "wrong_kubernetes",
    "wrong_monitoring",
    "wrong_aws_batch",
    "wrong_prices",
    "wrong_bench",
    "wrong_study",
    "wrong_compare",
    "wrong_profile",
    "wrong_batch_queue",
    "wrong_cluster",
    "wrong_adopt",
    "wrong_import",
)


def all_situations() -> Iterator[tuple[str, Situation]]:
    """Launcher and situation, in the order of the page."""
    for name in LISTS:
        found: Situations = import_module(f"tests.launchers.{name}").SITUATIONS
        for row in found.rows:
            yield found.launcher, row
