"""`shardyard launch`: shows, refuses, asks, submits; creates nothing that is not written down."""

import json
import os
import pty
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from shardyard.cli import main
from shardyard.config.load import load_recipe
from shardyard.control.submission import launcher_named
from shardyard.errors import AccessError, CapacityError
from shardyard.launchers.base import JobState
from shardyard.launchers.ledger import Ledger
from tests.cli.fake_launcher import FakeLauncher, fake_that_can
from tests.cli.launched_runs import launch, status
from tests.processor_time import times_the_reference

Captured = pytest.CaptureFixture[str]
RENTED = ("cluster.device=auto", "cluster.devices=auto", "cluster.instance=p5.48xlarge")


@pytest.fixture
def fake() -> FakeLauncher:
    return FakeLauncher()


def test_a_dry_run_prints_exactly_the_request_and_creates_nothing(
    tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    assert launch(tmp_path, fake, "--dry-run") == 0
    captured = capsys.readouterr()
    assert captured.out == fake.render(fake.submitted[0]).text
    assert "plan: llama-tiny" in captured.err
    assert not (tmp_path / "runs").exists()
    assert fake.created == set()


def test_a_dry_run_in_json_has_the_request_its_objects_and_the_plan(
    tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    assert launch(tmp_path, fake, "--dry-run", "--json") == 0
    content = json.loads(capsys.readouterr().out)
    assert [entry["kind"] for entry in content["objects"]] == ["service", "job"]
    assert content["plan"]["samples_per_step"] == 8


def test_a_submission_prints_run_job_and_what_to_type_next(
    tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    assert launch(tmp_path, fake, "--yes") == 0
    out = capsys.readouterr().out
    assert "run: first" in out
    assert "job: 8 (sy-first) on fake" in out
    for verb in ("watch", "status", "logs", "cancel"):
        assert f"shardyard {verb} " in out
    run = tmp_path / "runs" / "first"
    assert fake.created == {"fake service", "fake job"}
    assert [entry.kind for entry in Ledger(run / "ledger.jsonl").live()] == [
        "fake service",
        "fake job",
    ]
    recipe = load_recipe([run / "recipe.yaml"])
    assert (recipe.run.id, recipe.run.name, recipe.run.dir) == (
        "first", "small", str(tmp_path / "runs"),
    )  # fmt: skip
    request = fake.submitted[0]
    assert (request.nodes, request.devices_per_node) == (2, 2)
    assert request.run_dir == str(run)
    assert request.recipe_text == (run / "recipe.yaml").read_text()


def test_tags_and_owner_are_in_the_ledger(tmp_path: Path, fake: FakeLauncher) -> None:
    assert launch(tmp_path, fake, "run.tags={team: nlp}", "--yes") == 0
    (job,) = Ledger(tmp_path / "runs" / "first" / "ledger.jsonl").jobs()
    assert job.details["tags"] == "team=nlp"
    assert job.details["owner"] == pwd.getpwuid(os.geteuid()).pw_name


def test_the_nodes_may_see_the_folder_elsewhere(tmp_path: Path, fake: FakeLauncher) -> None:
    assert launch(tmp_path, fake, "--dry-run", "launch.run_dir=/shared/runs/") == 0
    assert fake.submitted[0].run_dir == "/shared/runs/first"


def test_relative_paths_start_here_where_the_nodes_see_this_machine(
    tmp_path: Path, fake: FakeLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    assert launch(tmp_path, fake, "--dry-run", "data.source=texts") == 0
    assert fake.submitted[0].recipe.data.source == str(tmp_path / "texts")


def test_a_rented_cluster_shows_memory_and_price_before_it_is_asked(
    tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    assert launch(tmp_path, fake, "--dry-run", *RENTED, "optim.global_batch=16") == 0
    err = capsys.readouterr().err
    assert "memory: fits" in err
    assert "price: $110.08 an hour" in err  # 2 x $55.04, as of the catalogue
    assert fake.submitted[0].cluster is not None
    assert fake.submitted[0].devices_per_node == 8


@pytest.mark.parametrize(
    ("instance", "words"),
    [
        ("p3.16xlarge", "V100 16GB has compute capability 7.0, and torch's wheels for CUDA 12.8 a"),
        ("g4dn.12xlarge", None),
        ("p5.48xlarge", None),
    ],
)
def test_a_device_that_torch_has_no_code_for_is_said(
    instance: str, words: str | None, tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    machines = ("cluster.device=auto", "cluster.devices=auto", f"cluster.instance={instance}")
    assert launch(tmp_path, fake, "--dry-run", "cluster.nodes=1", *machines) == 0
    said = capsys.readouterr().err
    assert ("warning: " in said) is (words is not None)
    assert words is None or f"warning: {words}" in said


def test_without_a_terminal_and_without_yes_nothing_is_submitted(
    tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    assert launch(tmp_path, fake) == 2
    err = capsys.readouterr().err
    assert "this is not a terminal" in err
    assert "--dry-run" in err and "--yes" in err
    assert not (tmp_path / "runs").exists()


def test_a_plan_that_does_not_fit_is_refused_unless_it_is_forced(
    tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    large = (*RENTED, "model.preset=llama3.1-405b", "optim.global_batch=16")
    assert launch(tmp_path, fake, "--yes", *large) == 2
    err = capsys.readouterr().err
    assert "the plan does not fit" in err and "--force" in err
    assert not (tmp_path / "runs").exists()
    assert launch(tmp_path, fake, "--dry-run", *large) == 2
    captured = capsys.readouterr()
    assert "error: the plan does not fit" in captured.err
    assert captured.out.startswith("# 2 x 8")
    assert launch(tmp_path, fake, "--dry-run", "--force", *large) == 0
    assert capsys.readouterr().out.startswith("# 2 x 8")
    assert launch(tmp_path, fake, "--yes", "--force", *large) == 0


SEVEN_BILLION = (
    *RENTED, "model.preset=llama2-7b", "cluster.nodes=1", "optim.global_batch=64",
    "optim.micro_batch=8",
)  # fmt: skip


@pytest.mark.parametrize(
    ("seq_len", "share", "refused", "warned"),
    [
        (1024, (0.5, 0.92), False, False),
        (1280, (0.92, 1.0), False, True),
        (1408, (1.0, 1.08), True, False),
    ],
)
def test_a_layout_fits_in_a_launch_where_it_fits_in_a_plan(
    seq_len: int,
    share: tuple[float, float],
    refused: bool,
    warned: bool,
    tmp_path: Path,
    fake: FakeLauncher,
    capsys: Captured,
) -> None:
    words = (*SEVEN_BILLION, f"data.seq_len={seq_len}")
    code = 2 if refused else 0
    assert launch(tmp_path, fake, "--dry-run", "--json", *words) == code
    shown = capsys.readouterr()
    plan = json.loads(shown.out)["plan"]
    assert share[0] < plan["device_bytes"] / plan["memory_limit_bytes"] < share[1]
    assert launch(tmp_path, fake, "--yes", *words) == code
    said = capsys.readouterr().err
    for err in (shown.err, said):
        assert ("warning: memory is tight: " in err) is warned
        assert ("error: the plan does not fit: " in err) is refused


def test_a_price_above_the_limit_is_refused(
    tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    long = (*RENTED, "optim.global_batch=16", "run.steps=100000000")
    assert launch(tmp_path, fake, "--yes", "--max-usd", "1", *long) == 2
    assert "above launch.max_usd=1" in capsys.readouterr().err
    assert launch(tmp_path, fake, "--yes", "launch.max_usd=2", *long) == 2
    assert "above launch.max_usd=2" in capsys.readouterr().err
    assert launch(tmp_path, fake, "--yes", "launch.max_usd=2", "--max-usd", "1e9", *long) == 0
    asked = load_recipe([tmp_path / "runs" / "first" / "recipe.yaml"])
    assert asked.launch.max_usd == 1e9  # reaches the nodes, which hold the run to it


def test_a_limit_without_a_price_can_be_lifted(
    tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    limited = ("--yes", "launch.max_usd=50", "launch.time_limit=2h")
    assert launch(tmp_path, fake, *limited) == 2
    assert "on machines that cost nothing, set launch.max_usd=null." in capsys.readouterr().err
    assert launch(tmp_path, fake, *limited, "launch.max_usd=null") == 0


def test_this_machine_costs_nothing_whatever_its_launcher_is_called(
    tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    assert launch(tmp_path, fake, "--dry-run") == 0
    assert "price: of the run not known" in capsys.readouterr().err
    assert launch(tmp_path, fake_that_can(is_this_machine=True), "--dry-run") == 0
    assert "price" not in capsys.readouterr().err


def test_a_price_that_the_nodes_would_not_know_is_no_limit(
    tmp_path: Path, capsys: Captured
) -> None:
    machine = tmp_path / "ours.yaml"
    machine.write_text(
        "accelerator: H100 SXM\ndevices_per_node: 8\nnetwork_gbps: 3200\nusd_per_node_hour: 40\n"
    )
    far = fake_that_can(shares_folder=False)
    ours = ("cluster.device=auto", "cluster.devices=auto", f"cluster.file={machine}")
    words = (*ours, "optim.global_batch=16", "launch.run_dir=/runs", "launch.max_usd=1e9")
    assert launch(tmp_path, far, "--yes", *words) == 2
    assert "the price is in cluster.file, which the nodes of fake" in capsys.readouterr().err
    assert launch(tmp_path, FakeLauncher(), "--yes", *words) == 0


def test_a_time_limit_bounds_the_price_of_a_run_without_a_known_length(
    tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    endless = (*RENTED, "optim.global_batch=16", "run.steps=null", "launch.time_limit=2h")
    assert launch(tmp_path, fake, "--yes", "--max-usd", "220", *endless) == 2
    assert "$220.16" in capsys.readouterr().err  # 2 h x $110.08
    assert launch(tmp_path, fake, "--yes", "--max-usd", "221", *endless) == 0
    assert "by its time limit at most $220.16" in capsys.readouterr().err


def test_machines_that_are_only_counted_are_launched_without_a_prediction(
    tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    assert launch(tmp_path, fake, "--yes", "cluster.device=auto") == 0
    assert "no prediction: cluster.device=auto" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "overrides", "words"),
    [
        ({"needs_image": True}, (), "launch.image: is not set, and fake runs containers"),
        ({"shares_folder": False}, (), "launch.run_dir: is not set, and the nodes of fake do"),
        ({"secrets": ()}, ("secrets.HF_TOKEN=env",), "jobs of fake cannot read HF_TOKEN"),
    ],
)
def test_what_a_launcher_cannot_do_is_refused_with_what_to_give(
    changes: dict[str, object],
    overrides: tuple[str, ...],
    words: str,
    tmp_path: Path,
    capsys: Captured,
) -> None:
    fake = fake_that_can(**changes)
    assert launch(tmp_path, fake, "--yes", *overrides) == 2
    assert words in capsys.readouterr().err
    assert fake.submitted == []


def test_a_run_is_not_launched_twice(tmp_path: Path, fake: FakeLauncher, capsys: Captured) -> None:
    assert launch(tmp_path, fake, "--yes") == 0
    assert launch(tmp_path, fake, "--yes") == 2
    err = capsys.readouterr().err
    assert "run.id='first' exists already" in err and "as fake job 8" in err
    assert "shardyard status" in err
    assert len(Ledger(tmp_path / "runs" / "first" / "ledger.jsonl").jobs()) == 1


@pytest.mark.parametrize(("error", "code"), [(CapacityError("none"), 3), (AccessError("no"), 4)])
def test_a_refusal_before_anything_was_created_leaves_no_run(
    error: CapacityError | AccessError, code: int, tmp_path: Path, fake: FakeLauncher
) -> None:
    fake.refuses = error
    assert launch(tmp_path, fake, "--yes") == code
    assert not (tmp_path / "runs" / "first").exists()


def test_a_half_created_request_stands_in_the_ledger_and_says_how_it_is_removed(
    tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    fake.refuses, fake.refuses_after = CapacityError("the queue is gone."), 1
    assert launch(tmp_path, fake, "--yes") == 3
    err = capsys.readouterr().err
    assert "shardyard teardown " in err and "the queue is gone." in err
    ledger = Ledger(tmp_path / "runs" / "first" / "ledger.jsonl")
    assert [entry.kind for entry in ledger.live()] == ["fake service"]


def test_follow_prints_the_output_and_returns_the_jobs_exit_code(
    tmp_path: Path, fake: FakeLauncher
) -> None:
    fake.statuses = [status(JobState.DRAINED)]
    assert launch(tmp_path, fake, "--yes", "--follow") == 143


def test_output_and_json_do_not_go_together(tmp_path: Path, fake: FakeLauncher) -> None:
    assert launch(tmp_path, fake, "--yes", "--follow", "--json") == 2
    assert fake.created == set()


@pytest.mark.heavy
def test_on_a_terminal_it_asks_and_no_submits_nothing(tmp_path: Path) -> None:
    """A process of its own on a pseudo-terminal, with the launcher of the test."""
    program = (
        "import sys; from pathlib import Path; "
        "from tests.cli.fake_launcher import FakeLauncher; from tests.cli.launched_runs import "
        "launch; sys.exit(launch(Path(sys.argv[1]), FakeLauncher()))"
    )
    for answer, code in ((b"n\n", 130), (b"y\n", 0)):
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path)],
            stdin=theirs, stdout=subprocess.DEVNULL, stderr=theirs, cwd=Path(__file__).parents[2],
        )  # fmt: skip
        os.close(theirs)
        os.write(ours, answer)
        seen = b""
        try:
            while chunk := os.read(ours, 4096):
                seen += chunk
        except OSError:  # Linux: the other end is closed
            pass
        os.close(ours)
        assert process.wait(30) == code
        assert b"submit it?" in seen
        assert (tmp_path / "runs" / "first").exists() == (code == 0)


@pytest.mark.heavy
def test_a_dry_run_answers_at_once(tmp_path: Path) -> None:
    """A second on an idle machine is 3.5 to 4 times the reference."""
    program = (
        "import sys, tempfile; from pathlib import Path; "
        "from tests.cli.fake_launcher import FakeLauncher; from tests.cli.launched_runs import "
        "launch; folder = Path(tempfile.mkdtemp(dir=sys.argv[1])); "
        "sys.exit(launch(folder, FakeLauncher(), '--dry-run'))"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    folder = Path(__file__).parents[2]
    subprocess.run(command, check=True, capture_output=True, cwd=folder)
    assert times_the_reference(command, folder) <= 6


@pytest.mark.parametrize(
    ("typed", "name"), [("k8s", "kubernetes"), ("eks", "kubernetes"), ("batch", "aws-batch")]
)
def test_a_launcher_answers_to_the_names_that_people_type(typed: str, name: str) -> None:
    assert launcher_named(typed).name == name


def test_launch_without_a_launcher_lists_them(capsys: Captured) -> None:
    assert main(["launch", "model.preset=llama-tiny"]) == 2
    talk = capsys.readouterr().err
    assert "--on is missing" in talk and "local, slurm, kubernetes, aws-batch" in talk
    assert "For example: shardyard launch model.preset=llama-tiny --on slurm" in talk
