"""What TAB offers, and that it is quick: in real shells, see test_completion_shells.py."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from shardyard.cli import _VERBS, main
from shardyard.cli.completion import VARIABLE, WORDS, Completer, overrides, recipe, runs
from shardyard.config.optimizers import OPTIMIZERS
from shardyard.families.presets import PRESETS
from shardyard.hardware.catalogue import instance_names

NAMES: dict[Completer, str] = {recipe: "recipe", runs: "run", overrides: "overrides"}


class Tab:
    """What bash is offered for a line that ends at the cursor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, line: str, word: str | None = None) -> list[str]:
        """
        Args:
            word: What bash replaces; else what stands behind the last space, = or colon.
        """
        last = line.replace("=", " ").replace(":", " ").rpartition(" ")[2]
        for name, value in (("COMP_LINE", line), ("COMP_WORD", last if word is None else word)):
            self._monkeypatch.setenv(name, value)
        self._monkeypatch.setenv(VARIABLE, "bash_complete")
        assert main() == 0
        captured = self._capsys.readouterr()
        assert captured.err == ""
        return [line for line in captured.out.splitlines() if line]


@pytest.fixture
def tab(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Tab:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["shardyard"])
    return Tab(monkeypatch, capsys)


def test_verbs_are_offered_by_their_beginning(tab: Tab) -> None:
    assert tab("shardyard ") == [f"plain,{verb}" for verb in _VERBS]
    assert tab("shardyard re") == [f"plain,{verb}" for verb in _VERBS if verb.startswith("re")]
    assert tab("shardyard --ver") == ["plain,--version"]


def test_a_setting_is_offered_up_to_its_next_dot_and_then_its_values(tab: Tab) -> None:
    assert tab("shardyard plan opt") == ["part,optim."]
    assert "part,optim.lr=" in tab("shardyard plan optim.")
    assert tab("shardyard plan launch.slurm.par") == ["part,launch.slurm.partition="]
    assert tab("shardyard plan launch.kub") == ["part,launch.kubernetes."]
    assert "part,run.target.perplexity=" in tab("shardyard plan run.target.")


@pytest.mark.parametrize(
    ("word", "offered"),
    [
        ("optim.name=", list(OPTIMIZERS)),
        ("optim.name=adamw", [name for name in OPTIMIZERS if name.startswith("adamw")]),
        ("precision.compute=b", ["bf16"]),
        ("optim.nesterov=", ["true", "false"]),
        ("data.bos=", ["true", "false", "auto"]),
        ("model.preset=llama2-", [name for name in PRESETS if name.startswith("llama2-")]),
        ("task.name=mask", ["masked_lm"]),
        ("cluster.instance=p5.", [name for name in instance_names() if name.startswith("p5.")]),
        ("parallel.strategy=FULL", ["FULL_SHARD"]),
        ("data.source=py", ["python-stdlib"]),
        ("data.source=di", ["digits"]),
        ("run.steps=", []),
        ("nowhere.setting=", []),
    ],
)
def test_values_are_offered_where_their_list_ends(tab: Tab, word: str, offered: list[str]) -> None:
    """Bash ends words at =, and so replaces what stands behind it alone."""
    assert tab(f"shardyard train {word}") == [f"plain,{value}" for value in offered]


def test_a_quoted_word_is_replaced_whole(tab: Tab) -> None:
    line = 'shardyard plan "optim.name=adam'
    assert tab(line, word="optim.name=adam") == ["plain,optim.name=adamw"]


def test_recipe_files_and_folders_are_offered_before_settings(tab: Tab, tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    for name in ("recipes/big.yaml", "my model.yaml", "own.yml", "notes.txt", ".hidden.yaml"):
        (tmp_path / name).touch()
    assert tab("shardyard launch ")[:3] == [
        "plain,my\\ model.yaml",
        "plain,own.yml",
        "part,recipes/",
    ]
    assert tab("shardyard launch recipes/") == ["plain,recipes/big.yaml"]
    assert tab("shardyard launch own.yml data.source=note") == ["plain,notes.txt"]
    assert tab("shardyard launch own.yml model.path=rec") == ["part,recipes/"]


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("launch x.yaml --on sl", "plain,slurm"),
        ("launch x.yaml --on=kub", "plain,kubernetes"),
        ("prepare --on aws", "plain,aws-batch"),
        ("resume x --yes optim.na", "part,optim.name="),
        ("plan --json optim.na", "part,optim.name="),
        ("config --json precision.compute=b", "plain,bf16"),
        ("init --model qwen3-moe", "plain,qwen3-moe-tiny"),
        ("init --data py", "plain,python-stdlib"),
        ("init --where sl", "plain,slurm"),
    ],
)
def test_words_behind_options_are_offered_too(tab: Tab, line: str, offered: str) -> None:
    assert tab(f"shardyard {line}") == [offered]


def test_names_that_would_act_on_a_terminal_are_not_offered(tab: Tab, tmp_path: Path) -> None:
    (tmp_path / "a\x1b[2J.yaml").touch()
    (tmp_path / "a\nplain,rm.yaml").touch()
    assert tab("shardyard plan a") == []


def make_run(folder: Path, *, step: int | None = None, age_s: float = 0) -> None:
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text("model: {preset: llama-tiny}\n")
    if step is not None:
        (folder / "metrics.jsonl").write_text(json.dumps({"step": step, "loss": 3.0}) + "\n")
    for path in (*folder.iterdir(), folder):
        os.utime(path, (1e9 - age_s, 1e9 - age_s))


def test_runs_are_offered_newest_first_with_their_state(tab: Tab, tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "old", age_s=60)
    make_run(tmp_path / "runs" / "new", step=7)
    (tmp_path / "runs" / "no-run").mkdir()
    assert tab("shardyard status ") == ["plain,new", "plain,old"]
    assert tab("shardyard resume o") == ["plain,old"]
    assert tab("shardyard resume old optim.na") == ["part,optim.name="]
    assert tab("shardyard status new ") == []
    assert [(item.value, item.help) for item in runs("", {})] == [
        ("new", "new, step 7"), ("old", "new"),
    ]  # fmt: skip


def test_runs_are_looked_for_where_an_option_says_they_are(tab: Tab, tmp_path: Path) -> None:
    make_run(tmp_path / "elsewhere" / "far")
    assert tab("shardyard status ") == []
    assert tab("shardyard status --runs-dir elsewhere ") == ["plain,far"]
    assert tab("shardyard status elsewhere/") == ["part,elsewhere/far/"]


def test_a_damaged_run_is_offered_without_its_state(tmp_path: Path) -> None:
    make_run(tmp_path / "broken")
    (tmp_path / "broken" / "events.jsonl").mkdir()
    assert [item.value for item in runs("", {"runs_dir": tmp_path})] == ["broken"]


def test_what_goes_wrong_offers_nothing_and_says_nothing(
    tab: Tab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("no prompt is the place for this")

    monkeypatch.setattr("shardyard.cli.completion._settings", broken)
    assert tab("shardyard plan optim.") == []


@pytest.mark.parametrize("verb", WORDS)
def test_the_words_of_a_verb_are_its_arguments(verb: str) -> None:
    command: click.Command = importlib.import_module(f"shardyard.cli.{verb}").command
    arguments = [each for each in command.params if isinstance(each, click.Argument)]
    ours = [NAMES[completer] for completer in WORDS[verb]]
    assert [each.name for each in arguments][: len(ours)] == ours


def test_every_verb_with_a_run_or_a_recipe_has_its_words() -> None:
    for verb in _VERBS:
        command = importlib.import_module(f"shardyard.cli.{verb}").command
        takes = {each.name for each in command.params if isinstance(each, click.Argument)}
        assert verb in WORDS or not takes & {"run", "recipe"}, verb


def test_another_shell_is_told_which_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, "tcsh_source")
    assert main() == 2
    assert "=tcsh_source: there is completion for bash, zsh, fish, by `eval" in (
        capsys.readouterr().err
    )


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("line", "never"),
    [
        ("shardyard pl", {"pydantic", "yaml", "numpy", "torch", "shardyard.cli.plan"}),
        ("shardyard status q", {"pydantic", "yaml", "numpy", "torch", "shardyard.cli.status"}),
        ("shardyard plan optim.na", {"numpy", "torch", "shardyard.cli.plan", "shardyard.plan"}),
        ("shardyard plan optim.name=ad", {"numpy", "torch", "shardyard.cli.plan"}),
    ],
)
def test_little_is_imported_while_somebody_waits(
    line: str, never: set[str], tmp_path: Path
) -> None:
    program = (
        "import sys\nfrom shardyard.cli import main\nsys.argv = ['shardyard']\nmain()\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    environ = {**os.environ, VARIABLE: "bash_complete", "COMP_LINE": line, "COMP_WORD": line[-2:]}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environ, cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout or "status" in line
    assert set(done.stderr.split()) & never == set()
