"""`shardyard study`: sizes run one after the other, gone on with, held to a price, and refused."""

import fcntl
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from shardyard.cli import main
from shardyard.errors import EXIT_INTERRUPTED
from shardyard.launchers.base import JobState, JobStatus, LaunchRequest, Rendered
from shardyard.launchers.ledger import Ledger, Submission
from tests.cli.fake_launcher import FakeLauncher
from tests.cli.launched_runs import status

Captured = pytest.CaptureFixture[str]
RECIPE = (
    "model.preset=llama-tiny", "cluster.device=cpu", "cluster.devices=1", "data.seq_len=32",
    "optim.global_batch=8", "optim.micro_batch=1", "parallel.strategy=FULL_SHARD", "run.steps=500",
)  # fmt: skip
RENTED = ("cluster.instance=p5.48xlarge", "cluster.device=auto", "cluster.devices=auto")
STEP_S = {1: 1.0, 2: 0.55, 4: 0.35}
"""Of 8 samples, by nodes."""


@dataclass
class Training(FakeLauncher):
    """Its jobs have trained when they are submitted: a run's folder stands where it would."""

    statuses: list[JobStatus] = field(default_factory=lambda: [status(JobState.SUCCEEDED)])
    broken: set[int] = field(default_factory=set)
    """Sizes that fail."""
    usd: float = 0.0
    """What a run costs."""
    ran: list[str] = field(default_factory=list)
    before: Callable[[LaunchRequest], None] = lambda _: None

    def submit(self, rendered: Rendered, ledger: Ledger) -> Submission:
        asked = [each for each in self.submitted if each.run_id == rendered.run_id][-1]
        self.before(asked)
        self.ran.append(rendered.run_id)
        if asked.nodes not in self.broken:
            write_run(ledger.path.parent, asked, usd=self.usd)
        self.statuses = [
            status(JobState.FAILED if asked.nodes in self.broken else JobState.SUCCEEDED)
        ]
        return super().submit(rendered, ledger)


def write_run(folder: Path, asked: LaunchRequest, *, usd: float) -> None:
    """What a run leaves: events and a line for each step."""
    ranks, steps = asked.nodes * asked.devices_per_node, asked.recipe.run.steps
    assert steps is not None
    place = {"attempt": 1, "generation": 0}
    kinds: list[dict[str, Any]] = [
        {"kind": "attempt_started"},
        {"kind": "data_ready", "samples": 800, "seconds": 0.0},
        {"kind": "spent", "usd": usd, "usd_per_hour": 4.0 * asked.nodes},
        {"kind": "run_finished", "step": steps, "peak_bytes_by_rank": [2**20] * ranks},
    ]
    lines = []
    for step in range(1, steps + 1):
        seconds = STEP_S.get(asked.nodes, 1.0) * (1 + 0.01 * (step % 3)) + 5.0 * (step == 1)
        rates = {"samples_per_s": 8 / seconds, "tokens_per_s": 8 * 32 / seconds, "mfu": None}
        lines.append({"step": step, "step_time_s": seconds, "world_size": ranks, **rates, **place})
    written = {"events": [{"t": 1.0, **place, **each} for each in kinds], "metrics": lines}
    for name, content in written.items():
        text = "".join(json.dumps(each) + "\n" for each in content)
        (folder / f"{name}.jsonl").write_text(text)


def study(
    folder: Path,
    launcher: FakeLauncher,
    *words: str,
    sizes: str = "1,2,4",
    recipe: Sequence[str] = RECIPE,
) -> int:
    given = [f"run.dir={folder / 'runs'}", "run.id=first", *recipe]
    asked = ("--nodes", sizes, "--on", "fake", "--yes", "--steps", "20", *words)
    return main(("study", *given, *asked), launchers={"fake": launcher})


def table(folder: Path) -> list[dict[str, Any]]:
    content = json.loads((folder / "runs" / "first" / "table.json").read_text())
    rows: list[dict[str, Any]] = content["series"][0]["rows"]
    return rows


@pytest.mark.heavy
def test_each_size_is_run_and_the_table_has_their_efficiencies(
    tmp_path: Path, capsys: Captured
) -> None:
    fake = Training()
    assert study(tmp_path, fake) == 0
    assert fake.ran == ["first-n1", "first-n2", "first-n4"]
    rows = table(tmp_path)
    assert [row["origin"] for row in rows] == ["measured"] * 3
    assert [row["run_id"] for row in rows] == fake.ran
    found = [row["efficiency"] for row in rows]
    assert found == pytest.approx([1.0, 1 / 2 / 0.55, 1 / 4 / 0.35], rel=1e-3)
    assert all(
        row["efficiency_low"] < row["efficiency"] < row["efficiency_high"] for row in rows[1:]
    )
    assert rows[0]["epoch_s"] == pytest.approx(100, rel=0.02)
    assert rows[0]["usd_per_run"] == pytest.approx(
        4 * 500 * rows[0]["epoch_s"] / 100 / 3600, rel=0.1
    )
    captured = capsys.readouterr()
    assert "| 2 | 2 | measured |" in captured.out and "strong scaling" in captured.out
    names = {"table.md", "table.csv", "table.json", "study.html", "study.json"}
    assert names <= {each.name for each in (tmp_path / "runs" / "first").iterdir()}


@pytest.mark.heavy
def test_called_again_it_runs_no_size_again_and_a_new_size_alone(tmp_path: Path) -> None:
    fake = Training()
    assert study(tmp_path, fake, sizes="1,2") == 0
    before = table(tmp_path)
    assert study(tmp_path, fake, sizes="1,2") == 0
    assert table(tmp_path) == before and len(fake.ran) == 2
    assert study(tmp_path, fake, sizes="1,2,4") == 0
    assert fake.ran == ["first-n1", "first-n2", "first-n4"]


@pytest.mark.heavy
def test_killed_in_the_middle_it_goes_on_with_the_job_that_runs(
    tmp_path: Path, capsys: Captured
) -> None:
    fake = Training()
    asked: list[str] = []

    class Interrupted(Training):
        def status(self, job: Submission) -> JobStatus:
            asked.append(job.run_id)
            if job.run_id == "first-n2":
                raise KeyboardInterrupt
            return super().status(job)

    assert study(tmp_path, Interrupted()) == EXIT_INTERRUPTED
    assert "skips sizes that are done" in capsys.readouterr().err
    assert [row["origin"] for row in table(tmp_path)] == ["measured", "not run", "not run"]
    finished = tmp_path / "runs" / "first-n2" / "events.jsonl"
    whole = finished.read_text()
    finished.write_text(whole.replace("run_finished", "evaluated"))  # it still trains
    running = iter([JobState.RUNNING, JobState.RUNNING])

    class GoesOn(Training):
        def status(self, job: Submission) -> JobStatus:
            state = next(running, None) if job.run_id == "first-n2" else None
            if job.run_id == "first-n2" and state is None:
                finished.write_text(whole)
            return status(state or JobState.SUCCEEDED)

    fake = GoesOn()
    assert study(tmp_path, fake) == 0
    assert fake.ran == ["first-n4"]
    assert [row["origin"] for row in table(tmp_path)] == ["measured"] * 3
    assert "runs already as job 8; it is followed" in capsys.readouterr().err


@pytest.mark.heavy
def test_a_failed_size_is_said_and_tried_again_the_next_time(
    tmp_path: Path, capsys: Captured
) -> None:
    fake = Training(broken={2})
    assert study(tmp_path, fake) == 1
    rows = table(tmp_path)
    assert [row["origin"] for row in rows] == ["measured", "failed", "measured"]
    assert "shardyard logs" in rows[1]["note"] and rows[1]["efficiency"] is None
    assert "2 nodes failed: its job did not end well (failed: so it is)" in capsys.readouterr().out
    fake.broken.clear()
    assert study(tmp_path, fake) == 0
    assert fake.ran == ["first-n1", "first-n2", "first-n4", "first-n2-try2"]
    assert [row["origin"] for row in table(tmp_path)] == ["measured"] * 3


@pytest.mark.parametrize(
    ("hold", "given", "batches"),
    [
        ("global-batch", (), [(None, 8), (None, 8)]),
        ("batch-per-device", (), [(4, "auto"), (4, "auto")]),
        ("", ("optim.global_batch=auto", "optim.batch_per_device=3"), [(3, "auto"), (3, "auto")]),
    ],
)
def test_what_is_held_reaches_the_nodes(
    tmp_path: Path, hold: str, given: tuple[str, ...], batches: list[tuple[Any, Any]]
) -> None:
    fake = FakeLauncher()
    asked = ("--hold", hold) if hold else ()
    assert study(tmp_path, fake, *given, *asked, "--dry-run", sizes="2,4") == 0
    found = [each.recipe for each in fake.submitted]
    assert [each.cluster.nodes for each in found] == [2, 4]
    assert [(each.optim.batch_per_device, each.optim.global_batch) for each in found] == batches
    assert {each.run.steps for each in found} == {20}
    assert not (tmp_path / "runs").exists()


@pytest.mark.heavy
def test_the_sum_is_held_to_a_price(tmp_path: Path, capsys: Captured) -> None:
    fake = Training(usd=2.0)
    words = (*RENTED, "optim.global_batch=64", "run.steps=500")
    assert study(tmp_path, fake, *words, "--max-usd", "0.01") == 2
    assert "the sizes that are left are predicted to cost" in capsys.readouterr().err
    assert fake.ran == []
    assert study(tmp_path, fake, *words, "--max-usd", "100") == 0
    limits = [each.recipe.launch.max_usd for each in fake.submitted if each.recipe.launch.max_usd]
    # less with each run that was paid, and always less a drain
    assert limits == sorted(limits, reverse=True) and 0 < limits[-1] < limits[0] < 100
    assert table(tmp_path)[0]["origin"] == "measured"


@pytest.mark.heavy
def test_a_size_is_not_begun_once_too_little_is_left(tmp_path: Path) -> None:
    fake = Training(usd=95.0)
    words = (*RENTED, "optim.global_batch=64")
    assert study(tmp_path, fake, *words, "--max-usd", "100") == 0
    assert fake.ran == ["first-n1"]
    rows = table(tmp_path)
    assert [row["origin"] for row in rows] == ["measured", "not run", "not run"]
    assert "left of --max-usd 100" in rows[1]["note"]


def test_a_price_that_is_not_known_cannot_be_held_to(tmp_path: Path, capsys: Captured) -> None:
    assert study(tmp_path, Training(), "--max-usd", "5") == 2
    assert "the price of 1, 2, 4 nodes is not known" in capsys.readouterr().err


@pytest.mark.heavy
def test_another_study_under_the_same_id_is_refused(tmp_path: Path, capsys: Captured) -> None:
    fake = Training()
    assert study(tmp_path, fake, sizes="1,2") == 0
    assert study(tmp_path, fake, "optim.global_batch=16", sizes="1,2") == 2
    assert "batch=8 there, 16 now" in capsys.readouterr().err
    assert study(tmp_path, fake, "optim.lr=1e-3", sizes="1,2") == 2
    assert "the recipe, or the launcher" in capsys.readouterr().err


def test_two_commands_never_work_on_one_study(tmp_path: Path, capsys: Captured) -> None:
    folder = tmp_path / "runs" / "first"
    folder.mkdir(parents=True)
    with (folder / "study.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert study(tmp_path, Training()) == 2
    assert "another command works on study first already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "give RECIPE and --nodes"),
        (("model.preset=llama-tiny",), "--nodes is missing"),
        (("model.preset=llama-tiny", "--nodes", "1,2"), "give --on LAUNCHER"),
        (("model.preset=llama-tiny", "--nodes", "1,2", "--on", "fake", "--predict"), "give --on"),
        (("model.preset=llama-tiny", "--nodes", "one,two"), "is not a list of numbers of nodes"),
        (("model.preset=llama-tiny", "--nodes", "1,1"), "names a size twice"),
        (("--table", "x.csv", "--on", "fake"), "--table is a published study"),
        (("--table", "x.csv", "--nodes", "1"), "--nodes and --predict are of a RECIPE"),
        (("model.preset=llama-tiny", "--nodes", "1", "--predict", "--max-usd", "5"), "leave --max"),
        (
            ("model.preset=llama-tiny", "--nodes", "1", "--predict", "--runs-dir", "x"),
            " a recipe says it by run.dir",
        ),
        (
            ("model.preset=llama-tiny", "--nodes", "1,2", "--predict", "--extrapolate", "2"),
            "--nodes and --extrapolate both name 2",
        ),
        (
            (
                "model.preset=llama-tiny",
                "--nodes",
                "1",
                "--predict",
                "--table",
                "a",
                "--table",
                "b",
            ),
            "compared with one published table",
        ),
    ],
)
def test_options_that_say_two_things_or_too_little_are_refused(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch, words: Any, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(("study", *words), launchers={"fake": FakeLauncher()}) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(("sizes", "named"), [("1,2,4", "4"), ("1,2", None)])
def test_sizes_that_share_the_cores_of_this_machine_are_named(
    sizes: str,
    named: str | None,
    tmp_path: Path,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    given = (f"run.dir={tmp_path}", *RECIPE, "--nodes", sizes, "--on", "local", "--dry-run")
    assert main(("study", *given)) == 0
    told = capsys.readouterr().err
    assert (f"This machine has 2 cores: the processes of size {named} share" in told) == bool(named)
    assert ("Leave it out of --nodes, or run on more machines" in told) == bool(named)


@pytest.mark.parametrize(("sizes", "threads"), [("1,2,4", 2), ("1,2", 4), ("8,16", 1)])
def test_processes_of_every_size_have_equally_many_threads(
    sizes: str,
    threads: int,
    tmp_path: Path,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a process alone has all cores, and an efficiency says how cores are shared."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    given = (f"run.dir={tmp_path}", *RECIPE, "--nodes", sizes, "--on", "local", "--dry-run")
    assert main(("study", *given)) == 0
    shown = capsys.readouterr()
    assert f"Every process of every size has {threads} thread" in shown.err
    written = re.findall(r"OMP_NUM_THREADS\W+(\d+)", shown.out)
    assert written.count(str(threads)) == len(written) >= len(sizes.split(","))


def test_a_batch_that_devices_cannot_share_is_refused(tmp_path: Path, capsys: Captured) -> None:
    assert study(tmp_path, FakeLauncher(), "--hold", "batch-per-device", sizes="3,6") == 2
    assert "8 samples on 3 devices, which is not a whole number" in capsys.readouterr().err


_EACH = ("data.seq_len", "optim.global_batch", "run.steps")
PHASES = (
    *(word for word in RECIPE if not word.startswith(_EACH)),
    "phases=[{run: {steps: 5}, data: {seq_len: 16}, optim: {global_batch: 16}}, "
    "{run: {steps: 7}, data: {seq_len: 32}, optim: {global_batch: 8}}]",
)


@pytest.mark.heavy
def test_phases_are_studied_each_by_itself(tmp_path: Path, capsys: Captured) -> None:
    launcher = Training(usd=1.0)
    assert study(tmp_path, launcher, "--json", sizes="1,2", recipe=PHASES) == 0
    ids = [f"first-phase-{phase}-n{nodes}" for phase in (1, 2) for nodes in (1, 2)]
    assert launcher.ran == ids
    shapes = [(each.recipe.data.seq_len, each.recipe.optim.global_batch, len(each.recipe.phases))
              for each in launcher.submitted if each.run_id in ids]  # fmt: skip
    assert set(shapes) == {(16, 16, 0), (32, 8, 0)}
    first, second = json.loads(capsys.readouterr().out)
    assert Path(second["folder"]).name == "first-phase-2"
    runs_s = [each["series"][0]["rows"][0]["run_s"] for each in (first, second)]
    assert runs_s[0] / runs_s[1] == pytest.approx(5 * 16 / (7 * 8))  # samples of each phase


@pytest.mark.heavy
def test_the_limit_holds_for_all_phases_in_sum(tmp_path: Path, capsys: Captured) -> None:
    rented = (*PHASES, *RENTED)
    assert study(tmp_path, Training(), "--dry-run", sizes="1", recipe=rented) == 0
    said = capsys.readouterr().err
    one, two = (float(usd) for usd in re.findall(r"price of 1 sizes: about \$([\d.]+)", said))
    limit = f"--max-usd={max(one, two) + min(one, two) / 2:.4f}"
    assert study(tmp_path, Training(), limit, sizes="1", recipe=rented) == 2
    assert "the sizes that are left are predicted to cost" in capsys.readouterr().err
    assert not list((tmp_path / "runs").glob("first-phase-1*"))


@pytest.mark.heavy
def test_the_bert_recipe_and_its_table_are_predicted_phase_by_phase(
    tmp_path: Path, capsys: Captured
) -> None:
    root = Path(__file__).parents[2]
    words = (
        "study", str(root / "examples/sources/s4-bert-large.yaml"), f"run.dir={tmp_path}",
        "--predict", "--nodes", "1,8", "--json", "--table",
        str(root / "benchmarks/groundtruth/scaling/s4-bert-large.csv"),
    )  # fmt: skip
    assert main(words) == 0
    series = json.loads(capsys.readouterr().out)["series"]
    assert [each["name"] for each in series] == [f"s4-bert-large, phase {n}" for n in (1, 2)]
    first, second = (
        [row["predicted_tokens_per_s"] for row in each["rows"] if row["predicted_tokens_per_s"]]
        for each in series
    )
    assert len(first) == len(second) == 2 and first[0] != second[0]


@pytest.mark.heavy
def test_a_predicted_imagenet_study_has_epochs(tmp_path: Path, capsys: Captured) -> None:
    recipe = Path(__file__).parents[2] / "examples/sources/s2-resnet50.yaml"
    words = ("study", str(recipe), f"run.dir={tmp_path}", "--predict", "--nodes", "1,2", "--json")
    assert main(words) == 0
    (series,) = json.loads(capsys.readouterr().out)["series"]
    for row in series["rows"]:
        assert row["epoch_s"] == pytest.approx(1_281_167 / row["samples_per_s"])
        assert row["run_s"] == pytest.approx(90 * row["epoch_s"])


def test_nobody_is_asked_without_a_terminal(tmp_path: Path, capsys: Captured) -> None:
    given = [f"run.dir={tmp_path / 'runs'}", "run.id=first", *RECIPE]
    words = ("study", *given, "--nodes", "1,2", "--on", "fake")
    assert main(words, launchers={"fake": FakeLauncher()}) == 2
    assert "Add --yes to do it" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.heavy
def test_a_prediction_stands_beside_what_was_published(tmp_path: Path, capsys: Captured) -> None:
    root = Path(__file__).parents[2]
    words = (
        "study", str(root / "examples/sources/s4-bert-1.5b.yaml"), f"run.dir={tmp_path}",
        "--predict", "--nodes", "1,8,16", "--json", "--table",
        str(root / "benchmarks/groundtruth/scaling/s4-bert-1.5b.csv"),
    )  # fmt: skip
    assert main(words) == 0
    (series,) = json.loads(capsys.readouterr().out)["series"]
    for row, published in zip(series["rows"][1:], (0.851, 0.827), strict=True):
        assert row["efficiency"] == pytest.approx(published, abs=5e-4)
        low, high = row["predicted_efficiency_low"], row["predicted_efficiency_high"]
        # within 5 points of what was measured, or the band and what is open are said
        assert low - 0.05 <= row["efficiency"] <= high
    said = " ".join(series["remarks"])
    assert said.count("what is open leaves") == 2 and "the network between nodes" in said


@pytest.mark.heavy
def test_the_first_source_lies_in_the_band(tmp_path: Path, capsys: Captured) -> None:
    """87 % on 16 p5.48xlarge; model, batch and baseline are ours, the source states none."""
    words = (
        "study", "model.preset=llama2-7b", "cluster.instance=p5.48xlarge", "data.seq_len=2048",
        "optim.batch_per_device=3", "optim.micro_batch=3", "memory.recompute=full",
        "precision.compute=bf16", "parallel.strategy=FULL_SHARD", "run.steps=1000",
        f"run.dir={tmp_path}", "--predict", "--nodes", "1,16", "--json",
    )  # fmt: skip
    assert main(words) == 0
    (series,) = json.loads(capsys.readouterr().out)["series"]
    row = series["rows"][-1]
    assert row["predicted_efficiency_low"] < 0.87 < row["predicted_efficiency_high"]
    assert "what is open leaves" in " ".join(series["remarks"])


@pytest.mark.heavy
def test_a_plan_beside_a_table_without_its_size_is_refused(
    tmp_path: Path, capsys: Captured
) -> None:
    path = tmp_path / "t.csv"
    path.write_text("accelerators,samples_per_s\n8,1\n16,2\n")
    words = ("study", *RECIPE, *RENTED, "optim.global_batch=64", f"run.dir={tmp_path}")
    assert main((*words, "--predict", "--nodes", "1,4", "--table", str(path))) == 2
    assert "has no row of 32 accelerators" in capsys.readouterr().err
