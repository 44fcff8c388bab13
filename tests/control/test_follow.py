"""What a person sees of a run, from files written line by line."""

import json
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shardyard.control.follow import (
    AttemptReporter,
    LogView,
    Tail,
    describe_event,
    describe_scores,
    describe_step,
    follow,
    log_view,
    number_text,
)
from shardyard.rundir.jsonl import METRIC_KEYS, EventWriter, LineWriter
from shardyard.rundir.layout import RunDir
from tests.elastic.agents import Agents


def step_line(step: int, **values: Any) -> dict[str, Any]:
    known = {"step": step, "attempt": 1, "loss": 4.5, "step_time_s": 0.5, "tokens_per_s": 2048.0}
    return {**dict.fromkeys(METRIC_KEYS), **known, **values}


def test_a_collapsed_router_is_a_warning() -> None:
    event = {"kind": "router_collapsed", "step": 4, "reason": "A router has collapsed."}
    assert describe_event(event) == "warning: A router has collapsed."


class RecordingView:
    """Remembers what it was told to show."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.steps: list[tuple[int, float | None]] = []
        self.evaluations: list[tuple[int, float | None]] = []
        self.lines: list[str] = []
        self.order: list[str] = []
        """Steps and lines as they came."""

    def phase(self, words: str, *, is_logged: bool) -> None:  # noqa: ARG002
        self.phases.append(words)

    def step(self, line: dict[str, Any], *, step_s: float | None) -> None:
        self.steps.append((line["step"], step_s))
        self.order.append(f"step {line['step']}")

    def length(self, steps: int) -> None:
        """Told by the log itself."""

    def evaluation(self, step: int, scores: Mapping[str, float | None]) -> None:
        self.evaluations.append((step, scores["loss"]))

    def line(self, text: str) -> None:
        self.lines.append(text)
        self.order.append(text)

    def close(self) -> None:
        pass


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run-1")
    Agents(run, tmp_path).prepare()  # 3 steps
    return run


def write_short_run(run: RunDir) -> None:
    events = EventWriter(run.events, attempt=1, generation=0)
    events.write("attempt_started", workers=[], world_size=2)
    metrics = LineWriter(run.metrics)
    for step in (1, 2, 3):
        metrics.append(step_line(step))
    metrics.append({"step": 3, "epoch": 1.0, "eval": {"loss": 4.25}})
    events.write("checkpoint_durable", step=3)
    events.write("attempt_ended", reason="finished", exit_code=0)


def test_a_torn_line_is_read_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    tail = Tail(path)
    assert tail.read() == []
    text = json.dumps({"step": 1}) + "\n"
    path.write_text(text + '{"st')
    assert tail.read() == [{"step": 1}]
    path.write_text(text + '{"step": 2}\nnot json\n{"step": 3}\n')
    assert tail.read() == [{"step": 2}, {"step": 3}]
    assert tail.read() == []


def lines_of(
    run: RunDir, caplog: pytest.LogCaptureFixture, *, notes: deque[str] | None = None
) -> list[str]:
    """What is said of a run, as a program without a command line gets it."""
    caplog.set_level("INFO", "shardyard")
    follow(run, 1, None, view_factory=log_view, notes=notes)
    return [record.getMessage() for record in caplog.records]


def test_a_log_gets_plain_lines_for_the_last_step_and_for_events(
    run: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    write_short_run(run)
    assert lines_of(run, caplog, notes=deque(["hello"])) == [
        "starting workers",
        "hello",
        "loading",
        "step 3/3  loss 4.5  2.05 K tokens/s  500 ms/step",
        "step 3/3  evaluation loss 4.25",
        "checkpoint of step 3 is durable",
        "finished",
    ]  # log_every is 10, so of the steps only the last is shown


def test_an_evaluation_tells_its_loss_and_what_a_loss_does_not_tell() -> None:
    scores = {"loss": 0.5, "perplexity": 1.65, "bits_per_byte": 0.7, "top1": 0.75, "top5": 1.0}
    assert describe_scores(scores) == ["loss 0.5", "top1 0.75", "top5 1"]
    assert describe_scores({"loss": None}) == [f"loss {number_text(None)}"]


def test_sets_that_are_scored_by_themselves_are_shown_by_their_losses() -> None:
    view = RecordingView()
    story = AttemptReporter(1, LogView(view.line, 3, every=1))
    scores = {"code": {"loss": 1.5, "perplexity": 4.48}, "hard": {"loss": None}}
    line = {"step": 3, "epoch": 1.0, "eval": {"loss": 4.25}, "eval_sources": scores}
    story.report([], [step_line(3), line])
    assert view.lines[-1] == "step 3/3  evaluation loss 4.25  code/loss 1.5  hard/loss not finite"


def test_what_a_line_tells_is_not_told_again_as_a_phase(
    run: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    events = EventWriter(run.events, attempt=1, generation=0)
    events.write("attempt_started", workers=[], world_size=2)
    events.write("draining", node="n0", signal="SIGINT")
    events.write("attempt_ended", outcome="drained", reason="drained", exit_code=130)
    assert lines_of(run, caplog) == [
        "starting workers",
        "loading",
        "draining after SIGINT",
        "drained",
    ]


def test_a_restart_is_told_between_the_steps_before_and_after_it() -> None:
    view = RecordingView()
    lost = {"kind": "worker_lost", "rank": 1, "node": "n0", "cause": "killed by SIGKILL"}
    loaded = {"kind": "checkpoint_loaded", "step": 1}
    AttemptReporter(1, view).report(
        [{**lost, "attempt": 1, "generation": 0}, {**loaded, "attempt": 1, "generation": 1}],
        [step_line(1), step_line(2), step_line(2, generation=1)],
    )
    assert view.order == ["step 1", "step 2", "lost rank 1 on n0: killed by SIGKILL",
                          "continuing from step 1", "step 2"]  # fmt: skip


def test_other_attempts_are_left_out() -> None:
    view = RecordingView()
    story = AttemptReporter(2, view)
    story.report_event({"kind": "draining", "attempt": 1, "generation": 0, "signal": "SIGINT"})
    story.report_metrics(step_line(7))
    story.report_metrics({"step": 7, "epoch": 1.0, "eval": {"loss": 4.0}})
    story.report_metrics(step_line(8, attempt=2, step_time_s=0.25))
    story.report_metrics({"step": 8, "epoch": 1.0, "eval": {"loss": 3.0}})
    assert view.lines == [] and view.phases == ["starting workers"]
    assert view.steps == [(8, 0.25)]
    assert view.evaluations == [(8, 3.0)]


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (
            {"kind": "worker_lost", "rank": 1, "node": "n0", "cause": "killed by SIGKILL"},
            "lost rank 1 on n0: killed by SIGKILL",
        ),
        (
            {"kind": "worker_hung", "rank": 1, "node": "n0", "step": 7, "reason": "it sleeps"},
            "rank 1 on n0 hung in step 7: it sleeps",
        ),
        (
            {"kind": "worker_hung", "rank": None, "node": "n0", "step": 7, "reason": "a cut"},
            "all ranks hung in step 7: a cut",
        ),
        ({"kind": "rendezvous", "generation": 0, "world_size": 4}, None),
        ({"kind": "rendezvous", "generation": 1, "world_size": 4}, "restarted with 4 processes"),
        ({"kind": "draining", "signal": "SIGTERM"}, "draining after SIGTERM"),
        (
            {
                "kind": "checkpoint_loaded",
                "step": 5,
                "damaged": [{"step": 8, "reasons": ["rank-00000.safetensors is gone"]}],
            },
            "continuing from step 5; the checkpoint of step 8 is damaged and was passed over "
            "(rank-00000.safetensors is gone)",
        ),
        (
            {
                "kind": "checkpoint_loaded",
                "step": 5,
                "note": "latest is a folder",
                "lacked_buffers": ["buffer.norm.running_mean"],
            },
            "continuing from step 5; latest is a folder; it was written before buffers were saved, "
            "and lacks: buffer.norm.running_mean",
        ),
        (
            {"kind": "snapshots_left_out", "reason": "a node needs 2.0 GiB more host memory"},
            "no snapshots, checkpoints only: a node needs 2.0 GiB more host memory",
        ),
        (
            {
                "kind": "snapshot_not_copied",
                "node": "b",
                "node_rank": 1,
                "reason": "the next node does not take them: timed out",
            },
            "snapshots of node 1 (b) are only on that node: the next node does not take them: "
            "timed out",
        ),
        (
            {
                "kind": "snapshot_restored",
                "step": 5,
                "source": "neighbour",
                "snapshots_refused": [{"step": 6, "reason": "what rank 1 held differs"}],
            },
            "continuing from step 5, whose state was in another node's memory; the snapshot "
            "of step 6 is damaged and was passed over (what rank 1 held differs)",
        ),
        (
            {
                "kind": "straggler",
                "rank": 3,
                "node": "n1",
                "step": 70,
                "factor": 2.05,
                "compute_s": 0.41,
                "peers_s": 0.2,
                "is_over": False,
            },
            "rank 3 on n1 is a straggler, 2.0 times as slow: it computes 410 ms a step, its peers "
            "200 ms",
        ),
        (
            {
                "kind": "straggler",
                "rank": 3,
                "node": "n1",
                "step": 140,
                "factor": 1.0,
                "compute_s": 0.2,
                "peers_s": 0.2,
                "is_over": True,
            },
            "rank 3 on n1 is not a straggler any more: it computes 200 ms a step, its peers 200 ms",
        ),
        (
            {
                "kind": "straggler",
                "rank": 3,
                "node": "n1",
                "step": 70,
                "factor": 2.0,
                "compute_s": 0.4,
                "peers_s": 0.2,
                "is_over": False,
                "is_held_up": True,
                "stays": "elastic.min_nodes=2 needs all 2 nodes",
            },
            "rank 3 on n1 is a straggler, 2.0 times as slow: it computes 400 ms a step on average, "
            "held up now and then, its peers 200 ms; not left out: elastic.min_nodes=2 needs all 2 "
            "nodes",
        ),
        (
            {
                "kind": "straggler",
                "rank": 3,
                "node": "n1",
                "what": "stopped",
                "step": 70,
                "factor": 2.95,
                "stopped_share": 0.661,
                "is_over": False,
                "stays": "elastic.min_nodes=2 needs all 2 nodes",
            },
            "rank 3 on n1 is a straggler: its process is stopped now and then, 66% of the time "
            "(SIGSTOP, or job control); not left out: elastic.min_nodes=2 needs all 2 nodes",
        ),
        (
            {
                "kind": "straggler",
                "rank": 3,
                "node": "n1",
                "what": "stopped",
                "step": 170,
                "factor": 1.0,
                "stopped_share": 0.0,
                "is_over": True,
            },
            "rank 3 on n1 is not a straggler any more: its process is not paused any more",
        ),
        (
            {
                "kind": "straggler",
                "rank": 3,
                "node": "n1",
                "what": "data",
                "step": 70,
                "factor": 1.5,
                "compute_s": 0.3,
                "peers_s": 0.2,
                "is_over": False,
                "is_since_start": True,
            },
            "rank 3 on n1 is a straggler, 1.5 times as slow, since the start: it computes and "
            "waits for samples for 300 ms a step, its peers 200 ms",
        ),
        (
            {
                "kind": "slow_link",
                "ranks": [8, 9, 10, 11],
                "nodes": ["n1"],
                "step": 70,
                "factor": 2.5,
                "exchange_s": 0.05,
                "peers_s": 0.02,
                "is_over": False,
                "is_since_start": True,
            },
            "the link between ranks 8 to 11 on n1 is slow, 2.5 times as long, since the start: "
            "their collectives take 50 ms a step, those of their peers 20 ms",
        ),
        (
            {
                "kind": "slow_link",
                "ranks": [0, 8, 16, 24],
                "nodes": ["n0", "n1"],
                "step": 90,
                "factor": 1.0,
                "exchange_s": 0.02,
                "peers_s": 0.02,
                "is_over": True,
            },
            "the link between ranks 0, 8, ... 24 on n0, n1 is as quick as others again: their "
            "collectives take 20 ms a step, those of their peers 20 ms",
        ),
        (
            {
                "kind": "device_problem",
                "node": "n1",
                "node_rank": 1,
                "device": None,
                "problem": "slow_network",
                "cause": "its network links are set to 1 Gbit/s, its peers' to 100",
                "stays": "elastic.min_nodes=2 needs all 2 nodes",
            },
            "node n1: its network links are set to 1 Gbit/s, its peers' to 100; not left out: "
            "elastic.min_nodes=2 needs all 2 nodes",
        ),
        (
            {"kind": "node_left_out", "node": "b", "node_rank": 1, "cause": "3 losses in a row"},
            "node 1 (b) is left out: 3 losses in a row",
        ),
        (
            {"kind": "device_problem", "rank": 1, "node": "n0", "cause": "it computed other bits"},
            "rank 1 on n0 is odd: it computed other bits",
        ),
        (
            {"kind": "checkpoint_interval", "step": 90, "every": 1200},
            "a checkpoint every 1,200 steps from now on loses the least time",
        ),
        (
            {"kind": "checkpoint_abandoned", "step": 5, "reason": "rank 0: model.x holds NaN"},
            "step 5 was not saved: it is not finite (rank 0: model.x holds NaN)",
        ),
    ],
)
def test_an_event_is_told_in_one_line(event: dict[str, Any], text: str | None) -> None:
    assert describe_event(event) == text


def test_the_remaining_time_is_steps_left_times_time_per_step() -> None:
    assert describe_step(step_line(10), 130, 0.5)[-1] == "1 min left"  # 120 x 0.5 s
    assert describe_step(step_line(10), 130, 0.5)[1].endswith(" tokens/s")
    assert describe_step(step_line(10), 130, 0.5, "image")[1].endswith(" images/s")
    assert describe_step(step_line(10, loss=None), 130, None)[0] == "loss not finite"
    in_fp16 = step_line(10, loss_scale=65536.0, grad_norm=1.0)
    assert describe_step(in_fp16, 130, None)[1] == "loss scale 65,536"
    assert (
        describe_step(in_fp16 | {"grad_norm": None}, 130, None)[1] == "loss scale 65,536, skipped"
    )


def test_a_first_step_that_compiles_says_so_before_and_after() -> None:
    lines: list[str] = []
    story = AttemptReporter(0, LogView(lines.append, 100, every=1))
    story.report_event({"kind": "model_ready", "attempt": 0, "t": 1.0, "compiles": True})
    assert lines[-1].endswith(
        "first step, compiling the blocks (minutes, or seconds where torch has them)"
    )
    step = {"kind": "first_step", "attempt": 0, "t": 2.0, "step": 1, "seconds": 95.0}
    story.report_event({**step, "compile_s": 80.0})
    assert lines[-1] == (
        "the first step took 1 min 35 s, 1 min 20 s of it compilation; torch keeps it for restarts"
    )
    assert describe_event({**step, "compile_s": 0.4}) is None
    assert describe_event(step) is None


def test_a_run_that_became_larger_ends_sooner() -> None:
    lines: list[str] = []
    log = LogView(lines.append, 100, every=1)
    story = AttemptReporter(0, log)
    story.report_event({"kind": "model_ready", "attempt": 0, "t": 1.0, "last_step": 60})
    log.step({"step": 60, "loss": 1.0, "tokens_per_s": None}, step_s=1.0)
    assert lines[-1].startswith("step 60/60") and "left" not in lines[-1]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"is_end": False, "lines": None}, "MLflow accepts no data now: it was not reached."),
        ({"is_end": True, "lines": 1200}, "MLflow lacks 1,200 lines of it: it was not reached."),
        (
            {"is_end": True, "lines": None},
            "MLflow may not have all of the run: it was not reached.",
        ),
    ],
)
def test_what_a_service_does_not_take_is_told(fields: dict[str, Any], words: str) -> None:
    event = {"kind": "not_sent", "service": "mlflow", "reason": "it was not reached.", **fields}
    assert describe_event(event) == words
