"""The report's numbers against the run's own files."""

import json
import math
from pathlib import Path

import pytest

from shardyard.errors import RequestError
from shardyard.io.files import write_json
from shardyard.report.against_plan import memory_by_rank
from shardyard.report.page import tiles
from shardyard.report.run_data import read_run
from shardyard.report.summary import Summary, summarize
from shardyard.rundir.jsonl import EventWriter
from shardyard.rundir.layout import RunDir
from shardyard.rundir.lease import Lease
from tests.report.synthetic import RunWriter, resolved_run, write_whole_run


def summary_of(run: RunDir) -> Summary:
    return summarize(read_run(run))


def test_the_numbers_are_those_of_the_metrics_file(tmp_path: Path) -> None:
    run = write_whole_run(tmp_path)
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    steps = {line["step"]: line for line in lines if "eval" not in line}
    evaluations = [line["eval"] for line in lines if "eval" in line]
    summary = summary_of(run)
    assert summary.state == "finished"
    assert (summary.steps_done, summary.steps_planned) == (120, 120)
    assert summary.loss == steps[120]["loss"]
    assert (summary.skipped_steps, summary.loss_scale) == (0, None)
    assert "Skipped" not in summary.sentence()
    assert summary.tokens == steps[120]["tokens"]
    assert summary.eval_loss == evaluations[-1]["loss"]
    assert summary.scores["perplexity"] == pytest.approx(math.exp(evaluations[-1]["loss"]))
    per_byte = evaluations[-1]["bits_per_byte"]
    assert summary.scores["bits_per_byte"] == per_byte
    assert f"({per_byte:.3f} bits per byte)" in summary.sentence()
    assert f"bits per byte {per_byte:.3f}" in tiles(summary)[1][2]
    assert summary.unigram_entropy == 6.123
    assert summary.peak_memory_bytes == 471 * 2**20
    assert summary.restarts == 1
    assert summary.wall_s == pytest.approx(sum(summary.phases.values()))


def test_the_end_of_a_run_is_the_step_that_it_ended_at_and_no_lost_one(tmp_path: Path) -> None:
    """It was resumed on more ranks, with fewer steps for what was left."""
    writer = RunWriter(RunDir(tmp_path / "run"), resolved_run())
    writer.begin()
    writer.start()
    writer.steps(1, 90)  # and then killed
    writer.begin()
    writer.start(load_step=40)
    writer.steps(41, 65)
    for line in writer.lines:
        if line.get("attempt") == 1:
            line |= {"world_size": 4, "tokens": line["tokens"] * 2}
    run = writer.write()
    summary = summary_of(run)
    last, judged = writer.lines[-1], writer.lines[-6]
    assert (last["step"], judged["step"]) == (65, 60)
    assert (summary.steps_done, summary.loss, summary.tokens) == (65, last["loss"], last["tokens"])
    assert summary.world_size == 4
    assert summary.eval_loss == judged["eval"]["loss"]


def test_peaks_of_an_earlier_end_are_not_those_of_the_ranks_of_now(tmp_path: Path) -> None:
    writer = RunWriter(RunDir(tmp_path / "run"), resolved_run())
    writer.begin()
    writer.start()
    writer.steps(1, 3)
    writer.finish(3)
    writer.end(0, "finished")
    before = memory_by_rank(read_run(writer.write()))
    assert [row["peak_bytes"] for row in before] == [471 * 2**20, 466 * 2**20]
    writer.begin()
    writer.start(load_step=3)
    writer.steps(4, 5)
    rows = memory_by_rank(read_run(writer.write()))
    assert [row["peak_bytes"] for row in rows] == [470 * 2**20, 390 * 2**20]


def test_a_job_that_decoding_limits_is_called_so_beside_its_effective_time(tmp_path: Path) -> None:
    run = write_whole_run(tmp_path)
    assert summary_of(run).effective_words().endswith("waits between attempts.")
    event = {"t": 1.0, "kind": "data_limit", "attempt": 1, "generation": 0, "step": 9}
    with run.events.open("a") as events:
        events.write(json.dumps({**event, "reason": "decoding limits this job."}) + "\n")
    assert summary_of(run).effective_words().endswith("attempts. decoding limits this job.")


def test_prediction_and_measurement_stand_side_by_side_with_the_error(tmp_path: Path) -> None:
    rows = {row.name: row for row in summary_of(write_whole_run(tmp_path)).comparisons}
    # 2,361,024 parameters over two ranks; each 4 bytes of weight and 8 of optimizer
    parameters = rows["parameters, largest rank"]
    assert parameters.predicted == parameters.measured == 4 * 2_361_024 // 2
    assert parameters.error == 0
    peak = rows["peak memory, largest rank"]
    assert peak.measured == 471 * 2**20
    assert peak.predicted is not None and peak.error is not None
    assert peak.error == pytest.approx(peak.predicted / (471 * 2**20) - 1)
    step = rows["time of a step"]
    assert step.measured == 0.62
    assert step.predicted is None and step.error is None
    assert "without a peak" in step.note


def test_without_a_peak_there_is_no_mfu_and_the_reason_is_said(tmp_path: Path) -> None:
    summary = summary_of(write_whole_run(tmp_path))
    assert summary.mfu is None
    assert "no peak is known for a CPU process" in summary.mfu_note


def test_mfu_is_given_in_both_conventions(tmp_path: Path) -> None:
    writer = RunWriter(RunDir(tmp_path / "run"), resolved_run(observe={"peak_tflops": 1.0}))
    writer.begin()
    writer.start()
    writer.steps(1, 5)
    for line in writer.lines:
        line["mfu"] = 0.30
    summary = summary_of(writer.write())
    assert summary.mfu is not None
    assert summary.mfu["full"] == 0.30
    # Llama of 4 blocks, width 192, 256 tokens: causal attention is 6 L d s less a token
    matmul = 6 * (4096 * 192 + 4 * (2 * 192 * 192 + 2 * 192 * 64 + 3 * 192 * 512))
    pairs = 4 * 192 * 256
    assert summary.mfu["causal"] == pytest.approx(
        0.30 * (matmul + 6 * pairs) / (matmul + 12 * pairs)
    )
    assert "observe.peak_tflops" in summary.mfu_note


def test_a_run_that_has_just_begun_has_a_summary(tmp_path: Path) -> None:
    writer = RunWriter(RunDir(tmp_path / "run"), resolved_run())
    writer.begin()
    summary = summary_of(writer.write())
    assert summary.steps_done == 0
    assert summary.loss is None
    assert summary.sentence().startswith("New: 0 of 120 steps")


def test_the_network_that_was_really_used_is_said(tmp_path: Path) -> None:
    writer = RunWriter(RunDir(tmp_path / "run"), resolved_run())
    writer.begin()
    run = writer.write()
    assert summary_of(run).network is None
    for transport in ("sockets", "carrier pigeons"):
        events = EventWriter(run.events, attempt=0, generation=0)
        events.write("network", transport=transport, said_by="NCCL")
        events.close()
        summary = summary_of(run)
        is_known = transport == "sockets"
        assert (summary.network is not None) is is_known
        assert ("Nodes talked over TCP sockets." in summary.sentence()) is is_known


def test_a_run_in_training_says_that_it_goes_on(tmp_path: Path) -> None:
    writer = RunWriter(RunDir(tmp_path / "run"), resolved_run())
    writer.begin()
    writer.start()
    writer.steps(1, 5)
    run = writer.write()
    lease = Lease(run.lease)
    assert summary_of(run).state == "running"
    assert "it continues" in summary_of(run).state_reason
    lease.close()
    assert summary_of(run).state == "lost"
    assert "without a word" in summary_of(run).state_reason


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    writer = RunWriter(RunDir(tmp_path / "run"), resolved_run())
    writer.begin()
    writer.start()
    writer.lose(after_s=1.0)
    writer.end(1, "rank 1 on laptop was lost (killed by SIGKILL)")
    summary = summary_of(writer.write())
    assert summary.state == "failed"
    assert "rank 1 on laptop" in summary.state_reason


def test_the_loss_of_a_skipped_step_is_not_a_number_and_does_not_break_the_report(
    tmp_path: Path,
) -> None:
    writer = RunWriter(RunDir(tmp_path / "run"), resolved_run())
    writer.begin()
    writer.start()
    writer.steps(1, 5)
    writer.lines[-1]["loss"] = None
    writer.lines[-1]["grad_norm"] = None
    writer.lines[-1]["loss_scale"] = 32768.0
    summary = summary_of(writer.write())
    assert summary.loss is None
    assert "Skipped as not finite: 1 step; loss scale at the end 32,768." in summary.sentence()


def test_files_of_another_version_are_left_out_and_not_guessed(tmp_path: Path) -> None:
    run = write_whole_run(tmp_path)
    for attempt in (0, 1):
        write_json(run.plan(attempt), {"version": 99})
        run.resolved(attempt).write_text("{torn")
    summary = summary_of(run)
    assert summary.comparisons == ()
    assert summary.steps_planned is None
    assert "plan.json is missing" in summary.mfu_note


def test_a_folder_without_any_attempt_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(RequestError, match=r"holds no attempt.*shardyard resume .*/run`"):
        read_run(RunDir(tmp_path / "run"))


def test_a_run_on_images_is_told_of_by_the_image(tmp_path: Path) -> None:
    run = write_whole_run(tmp_path)
    for attempt in run.attempts():
        path = run.resolved(attempt)
        path.write_text(path.read_text().replace('"causal_lm"', '"image_classification"'))
    summary = summary_of(run)
    assert summary.unit == "image"
    assert " images, in " in summary.sentence()
    assert " nats per image" in summary.sentence()
    assert tiles(summary)[2][0] == "images per second"
