"""Sinks: the file, and TensorBoard files that TensorBoard reads."""

import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from shardyard.observe.metrics import open_sinks
from shardyard.rundir.jsonl import METRIC_KEYS, read_evaluations, read_steps
from shardyard.rundir.layout import RunDir

STEP = {**dict.fromkeys(METRIC_KEYS), "step": 1, "loss": 2.5}
EVALUATION = {
    "step": 1, "epoch": 0.1, "eval": {"loss": 2.4, "perplexity": float("inf")},
    "eval_sources": {"code": {"loss": 1.5}},
}  # fmt: skip


def test_lines_go_to_the_file_and_not_into_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the log any line that a training prints could pass for one; node 0 marks them."""
    run_dir = RunDir(tmp_path)
    (sink,) = open_sinks(run_dir, tensorboard=False)
    sink.write(STEP)
    sink.write(EVALUATION)
    sink.close()
    assert read_steps(run_dir.metrics) == [STEP]
    # JSON has no infinity: null
    assert read_evaluations(run_dir.metrics)[0]["eval"] == {"loss": 2.4, "perplexity": None}
    assert capsys.readouterr().out == ""


@pytest.mark.filterwarnings("default")  # tensorboard's own imports warn
def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    sinks = open_sinks(run_dir, tensorboard=True)
    for sink in sinks:
        sink.write(STEP)
        sink.write(EVALUATION)
        sink.write_texts(2, [{"prompt": "def", "text": " main"}])
        sink.close()
    events = EventAccumulator(str(run_dir.tensorboard)).Reload()
    assert events.Scalars("train/loss")[0].value == pytest.approx(2.5)
    assert events.Scalars("eval/loss")[0].step == 1
    assert events.Scalars("eval/code/loss")[0].value == pytest.approx(1.5)
    (text,) = events.Tensors("generated/0/text_summary")
    assert text.step == 2 and text.tensor_proto.string_val == [b"def\n\n     main\n"]
    assert "train/mfu" not in events.Tags()["scalars"]  # null is no point of a curve


@pytest.mark.filterwarnings("default")
def test_tensorboard_shows_steps_that_were_done_again_once(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for first, last, loss in ((1, 6, 9.0), (4, 5, 2.0)):
        sinks = open_sinks(run_dir, tensorboard=True, after_step=first - 1)
        for sink in sinks:
            for step in range(first, last + 1):
                sink.write({**STEP, "step": step, "loss": loss})
            sink.close()
        if first == 1:
            time.sleep(1.1)  # its files are named by the second, and read in that order
    shown = EventAccumulator(str(run_dir.tensorboard)).Reload().Scalars("train/loss")
    assert [point.step for point in shown] == [1, 2, 3, 4, 5]
    assert [point.value for point in shown] == [9.0, 9.0, 9.0, 2.0, 2.0]
