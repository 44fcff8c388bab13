"""What an extra brings, where it is not installed: told before anything starts, or done without."""

import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from shardyard.cli import main
from tests.cli.fake_launcher import FakeLauncher
from tests.cli.launched_runs import launch
from tests.report.synthetic import write_whole_run

ROOT = Path(__file__).parents[2]
RECIPE = (
    "model.preset=llama-tiny", "run.steps=10", "optim.global_batch=8", "cluster.device=cpu",
    "cluster.devices=2", "run.id=first", "observe.tensorboard=true",
)  # fmt: skip
WORDS = "tensorboard: none found, >=2.17 required by observe.tensorboard=true"
MEND = "python -m pip install 'tensorboard>=2.17'"


@pytest.fixture
def no_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(package: str) -> str:
        if package == "tensorboard":
            raise PackageNotFoundError(package)
        return version(package)

    monkeypatch.setattr("shardyard.config.versions.version", find)


@pytest.mark.usefixtures("no_tensorboard")
@pytest.mark.parametrize("words", [("train",), ("launch", "--on", "local", "--yes")], ids=str)
def test_tensorboard_that_is_asked_for_is_missed_before_anything_is_made(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verb, *options = words
    assert main([verb, *RECIPE, f"run.dir={tmp_path / 'runs'}", *options]) == 2
    said = capsys.readouterr().err
    assert WORDS in said and MEND in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.heavy
@pytest.mark.usefixtures("no_tensorboard")
@pytest.mark.parametrize("on", [(), ("--on", "local")], ids=str)
def test_the_doctor_of_a_recipe_misses_what_it_asks_for(
    on: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *RECIPE, f"run.dir={tmp_path}", *on]) == 1
    assert "required by observe.tensorboard=true" in " ".join(capsys.readouterr().out.split())


@pytest.mark.usefixtures("no_tensorboard")
def test_nodes_with_a_python_of_their_own_are_not_asked_from_here(tmp_path: Path) -> None:
    assert launch(tmp_path, FakeLauncher(), "--yes", "observe.tensorboard=true") == 0


@pytest.mark.heavy
def test_pages_are_written_where_matplotlib_never_was(tmp_path: Path) -> None:
    run, page = write_whole_run(tmp_path), tmp_path / "plan.html"
    plan = ("plan", "model.preset=llama2-7b", "cluster.instance=p5.48xlarge", "run.steps=10",
            "--offers", f"--page={page}")  # fmt: skip
    code = (
        "import sys; sys.modules['matplotlib'] = None; from shardyard.cli import main; "
        "from shardyard.planner import instance_search; "
        "instance_search.instance_names = lambda: ('p5.48xlarge', 'p4d.24xlarge'); "
        f"sys.exit(main(['report', {str(run.path)!r}]) or main({plan!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    warnings = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 2
    for warning in warnings:
        assert "matplotlib is not installed" in warning
        assert warning.endswith("so the page has no pictures. Install it: pip install "
                                "'shardyard[plots]'")  # fmt: skip
    for text in (run.report_html.read_text(), page.read_text()):
        assert "<svg" not in text and "so the page has no pictures" in text
    assert "What can be rented" in page.read_text() and "Memory of one rank" in page.read_text()


def test_every_extra_is_on_the_page_and_the_demo_installs_what_its_report_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs/compatibility.md").read_text()
    for name in project["optional-dependencies"]:
        assert name in ("dev", "docs") or f"| `{name}` | " in page, name
    assert "-e '.[plots]'\n" in (ROOT / "Makefile").read_text()
