"""An evaluation's numbers beside transformers', over the whole held-out split."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from shardyard.checkpoint.export import export
from shardyard.checkpoint.select import choose_checkpoint
from shardyard.rundir.attempt_files import read_resolved
from shardyard.rundir.jsonl import EventWriter, read_evaluations, read_lines
from shardyard.rundir.layout import RunDir
from shardyard.train.hooks import Hooks
from shardyard.train.run import train
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run

SEQ_LEN = 32


def _plain_loss(run_dir: RunDir, folder: Path) -> tuple[float, int]:
    """Of the newest checkpoint over the files of the held-out split, window by window."""
    resolved = read_resolved(run_dir.resolved(0))
    export(choose_checkpoint(run_dir, "latest").path, resolved, folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    data = Path(resolved.data.dir)
    dtype = json.loads((data / "manifest.json").read_text())["dtype"]
    files = sorted(file for file in data.glob("eval-*.bin") if file.suffixes == [".bin"])
    tokens = torch.from_numpy(np.concatenate([np.fromfile(f, dtype) for f in files]).astype(int))
    total, number = 0.0, 0
    for start in range(0, len(tokens) - 1, SEQ_LEN):
        window = tokens[start : start + SEQ_LEN + 1]
        with torch.no_grad():
            logits = model(window[None, :-1]).logits[0]
        total += float(F.cross_entropy(logits.double(), window[1:], reduction="sum"))
        number += len(window) - 1
    return total / number, number


def _train(run_dir: RunDir, attempt: int) -> str:
    events = None
    if dist.get_rank() == 0:
        events = EventWriter(run_dir.events, attempt=attempt, generation=0)
    hooks = Hooks(generation=0, drain_requested=lambda: False, events=events)
    return train(run_dir, attempt, hooks)


def test_a_resize_changes_neither_the_validation_set_nor_its_loss(
    corpus: Corpus, tmp_path: Path
) -> None:
    """On one process, then on three, which do not divide the windows."""
    run_dir = RunDir(tmp_path / "run")
    for attempt, processes in enumerate((1, 3)):
        sections: dict[str, dict[str, Any]] = {
            "run": {"steps": attempt + 1},
            "optim": {"lr": 1e-9, "micro_batch": 2 + attempt, "warmup_steps": 0, "decay_steps": 9,
                      "global_batch": 12},
            "cluster": {"devices": processes},
        }  # fmt: skip
        previous = read_resolved(run_dir.resolved(0)) if attempt else None
        make_run(run_dir.path, corpus, sections, attempt=attempt, previous=previous)
        run_on_ranks(_train, processes, run_dir, attempt)
    loss, number = _plain_loss(run_dir, tmp_path / "export")
    assert [each["targets"] for each in read_lines(run_dir.events) if "targets" in each] == (
        [number] * 2
    )
    found = read_evaluations(run_dir.metrics)
    assert [line["step"] for line in found] == [1, 2]
    for line in found:
        assert line["eval"]["loss"] == pytest.approx(loss, rel=1e-6)
        assert line["eval"]["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
