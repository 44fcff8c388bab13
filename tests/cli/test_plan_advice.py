"""`shardyard plan --details`: ranks, levers and techniques as a person reads them."""

import io
import json
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from shardyard.cli import main, plan
from shardyard.cli.progress import phases_progress
from shardyard.config.layout import Layout
from shardyard.control.plan import predict
from shardyard.io.terminal import logs_to_stderr
from shardyard.planner import dry_run as dry
from shardyard.planner.plan_diff import RunMeasurement
from shardyard.planner.ranks import RankPlacement
from shardyard.report.document import PageSection
from shardyard.report.plan.advice import advice_blocks, ranks_blocks, spans
from shardyard.report.terminal import show

ASKED = (
    "plan", "model.preset=llama2-7b", "cluster.nodes=2", "cluster.instance=p5.48xlarge",
    "run.steps=500", "optim.global_batch=64", "optim.micro_batch=1", "parallel.tp=8",
    "--layouts=0",
)  # fmt: skip


def shown(capsys: pytest.CaptureFixture[str], ranks: RankPlacement) -> list[str]:
    show([PageSection("ranks", "", ranks_blocks(ranks))])
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ([3], "3"),
        (range(8), "0-7"),
        ([0, 8], "0, 8"),
        (range(0, 64, 8), "0, 8, ..., 56"),
        ([0, 1, 4], "0, 1, 4"),
        ([*range(8), 20], "9 from 0 to 20"),
    ],
)
def test_numbers_are_told_in_few_words(numbers: list[int], words: str) -> None:
    assert spans(numbers) == words


def test_few_ranks_have_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    layout = Layout(dp_replicate=1, dp_shard=2, tp=2, pp=2, zero=3)
    lines = shown(capsys, RankPlacement(layout=layout, devices_per_node=4))
    assert [line.split() for line in lines[1:5]] == [
        ["axis", "ranks", "groups", "ranks", "of", "group", "0", "a", "group", "is"],
        ["pp", "2", "4", "0,", "4", "on", "2", "nodes"],
        ["dp_shard", "2", "4", "0,", "2", "inside", "a", "node"],
        ["tp", "2", "4", "0-1", "inside", "a", "node"],
    ]
    assert lines[6].split()[:6] == ["rank", "node", "device", "pp", "dp_shard", "tp"]
    assert [line.split() for line in lines[7:]] == [
        ["0", "0", "0", "0:0", "0:0", "0:0"],
        ["1", "0", "1", "1:0", "1:0", "0:1"],
        ["2", "0", "2", "2:0", "0:1", "1:0"],
        ["3", "0", "3", "3:0", "1:1", "1:1"],
        ["4", "1", "0", "0:1", "2:0", "2:0"],
        ["5", "1", "1", "1:1", "3:0", "2:1"],
        ["6", "1", "2", "2:1", "2:1", "3:0"],
        ["7", "1", "3", "3:1", "3:1", "3:1"],
    ]


def test_1024_ranks_have_a_line_a_node(capsys: pytest.CaptureFixture[str]) -> None:
    layout = Layout(dp_replicate=1, dp_shard=128, tp=8, zero=3)
    lines = shown(capsys, RankPlacement(layout=layout, devices_per_node=8))
    assert len(lines) <= 140
    assert max(map(len, lines)) <= 100
    second = next(line for line in lines if line.startswith("1 "))
    assert second.split() == ["1", "8-15", "0-7", "0-7:1", "1:0-7"]


def test_of_very_many_nodes_the_first_and_the_last_are_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    layout = Layout(dp_replicate=1, dp_shard=16384, tp=8, zero=3)
    lines = shown(capsys, RankPlacement(layout=layout, devices_per_node=8))
    assert len(lines) < 20
    assert lines[-2].startswith("...")
    assert lines[-1].startswith("16383  131064-131071")


def test_one_rank_has_no_axis(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, RankPlacement(layout=Layout(dp_replicate=1, dp_shard=1, zero=3),
                                devices_per_node=8))  # fmt: skip
    assert [line.split() for line in lines] == [[], ["rank", "node", "device"], ["0", "0", "0"]]


def test_details_show_levers_with_settings_and_techniques_with_reasons(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*ASKED, "--details"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (lever, technique) = [line for line in lines if line.startswith("recompute full ")]
    assert lever.endswith("memory.recompute=full") and "%" in lever and "$" in lever
    assert "of activations off each device" in technique and " of recompute (" in technique
    (now, _) = [line for line in lines if line.startswith("this recipe ")]
    assert "fits" in now
    (experts,) = [line for line in lines if line.startswith("expert parallel")]
    assert "the model has no experts" in experts
    (off,) = [line for line in lines if line.startswith("tensor parallel 8 is used")]
    assert "parallel.tp=" in off
    assert not any(line.startswith("measured ") for line in lines)


def test_without_details_nothing_of_it_is_planned(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("shardyard.control.suggestions.advise")
    assert main([*ASKED]) == 0
    assert "technique" not in capsys.readouterr().out


def test_json_has_all_of_it_where_details_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--json"]) == 0
    assert "advice" not in json.loads(capsys.readouterr().out)
    assert main([*ASKED, "--details", "--json"]) == 0
    advice = json.loads(capsys.readouterr().out)["advice"]
    assert sorted(advice) == ["levers", "measured", "ranks", "techniques"]
    assert advice["ranks"][9]["axes"] == {
        "dp_shard": {"group": 1, "place": 1},
        "tp": {"group": 1, "place": 1},
    }


def test_what_a_run_measured_stands_beside_what_was_planned(
    capsys: pytest.CaptureFixture[str],
) -> None:
    advice = predict([], *ASKED[1:-1], layouts=0, details=True).advice
    assert advice is not None
    run = RunMeasurement(
        run_id="r1", steps=19, step_s=2.5, tokens_per_s=1e5, memory_bytes=30 * 2**30
    )
    (full,) = [change for change in advice.levers if change.name == "recompute full"]
    unsaid = replace(run, run_id="r2", memory_bytes=None)
    levers = tuple(
        replace(change, measured=unsaid) if change is full else change for change in advice.levers
    )
    show(advice_blocks(replace(advice, measured=run, levers=levers), is_narrow=False))
    lines = capsys.readouterr().out.splitlines()
    place = next(number for number, line in enumerate(lines) if line.startswith("measured "))
    now, recomputed = lines[place + 1 : place + 3]
    assert now.startswith("this recipe") and "2.5 s" in now and "30.0 GiB" in now
    assert now.endswith("r1, median of 19 steps")
    assert recomputed.startswith("recompute full") and recomputed.endswith("r2, median of 19 steps")


# --- how far a dry run is -----------------------------------------------------------------------


def test_a_pipe_gets_a_line_a_phase(capsys: pytest.CaptureFixture[str]) -> None:
    with logs_to_stderr(), phases_progress() as told:
        told("starting torch", 0, 0)
        told("forward, micro-batch 1 of 2", 1, 9)
    assert capsys.readouterr().err.splitlines() == [
        "dry run: starting torch",
        "dry run 2/9: forward, micro-batch 1 of 2",
    ]


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    monkeypatch.setattr("shardyard.cli.progress.Console", lambda **_: console)
    with phases_progress() as told:
        told("starting torch", 0, 0)
        told("backward, micro-batch 1 of 2", 3, 9)
    assert "3/9" in out.getvalue() and "backward, micro-batch 1 of 2" in out.getvalue()


ANSWER = {"moments": [], "attention": "flash", "micro_batches": 1, "seconds": 0.1, "torch": "2"}
PROGRAM = (
    'import json; print(json.dumps({"phase": "forward", "done": 1, "of": 9})); '
    f"print('''{json.dumps(ANSWER)}''')"
)


@pytest.mark.heavy
@pytest.mark.parametrize("words", [("--json",), ()])
def test_json_is_silent_while_the_model_is_dry_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    real = dry._output

    def answered(_program: object, request: str, told: dry.OnPhase) -> str:
        return real((sys.executable, "-c", PROGRAM), request, told)

    monkeypatch.setattr(dry, "_output", answered)
    monkeypatch.setattr(plan, "dry_run_section", lambda *_: PageSection("dry-run", "", []))
    sharded = [word for word in ASKED if word != "parallel.tp=8"]
    assert main([*sharded, "--dry-run-model", *words]) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("dry run")]
    assert told == ([] if words else ["dry run: starting torch", "dry run 2/9: forward"])
