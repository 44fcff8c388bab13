"""A run that starts from another's weights computes what those weights compute, in every layout."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from shardyard.checkpoint.load import load_tensors
from shardyard.config.load import load_recipe
from shardyard.control.continue_from import start_overrides
from shardyard.models.build import hf_config
from shardyard.rundir.attempt_files import read_resolved
from shardyard.rundir.jsonl import read_steps
from shardyard.rundir.layout import RunDir
from shardyard.tasks.base import task_class
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run, train_here
from tests.distributed.test_resume import train_until_killed
from tests.families.random_models import theirs

BATCH, STEPS, TOLERANCE = 4, 3, 1e-5
LORA = {"rank": 4, "alpha": 64.0, "targets": ["q_proj", "down_proj"]}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "dp": (2, {"strategy": "NO_SHARD"}),
    "zero 3": (2, {"dp_shard": 2, "zero": 3}),
    "tp": (2, {"tp": 2}),
}


def _optim(rate: float) -> dict[str, Any]:
    return {
        "name": "sgd", "lr": rate, "weight_decay": 0.0, "schedule": "constant", "warmup_steps": 0,
        "global_batch": BATCH, "micro_batch": 1,
    }  # fmt: skip


def _source(
    folder: Path, corpus: Corpus, model: dict[str, Any], parallel: dict[str, Any]
) -> RunDir:
    """A finished run of two processes, as it lies in a folder of runs."""
    sections = {
        "run": {"steps": 2},
        "model": model,
        "optim": _optim(1.0),
        "parallel": parallel,
        "cluster": {"devices": 2},
        "checkpoint": {"every": 1, "keep_last": 2},
    }
    run_dir = make_run(folder, corpus, sections)
    run_on_ranks(train_here, 2, run_dir)
    return run_dir


def _continued(
    folder: Path, corpus: Corpus, model: dict[str, Any], start: list[str], layouts: Sequence[str]
) -> list[Any]:
    """First batch and losses of runs that start there, with other rates and lengths of samples."""
    found = []
    for name in layouts:
        processes, parallel = LAYOUTS[name]
        recipe = load_recipe([{"model": model}], start)
        sections = {
            "run": {"steps": STEPS},
            "model": recipe.model.model_dump(),
            "data": {"seq_len": 16},
            "optim": _optim(0.5),
            "parallel": parallel,
            "cluster": {"devices": processes},
            "checkpoint": {"every": 1},
        }
        run_dir = make_run(folder / name, corpus, sections)
        run_on_ranks(train_here, processes, run_dir)
        losses = [line["loss"] for line in read_steps(run_dir.metrics)]
        if processes == 1:
            _check_kill(run_dir, make_run(folder / "killed", corpus, sections))
        source, *_ = task_class("causal_lm").open_data(read_resolved(run_dir.resolved(0)))
        found.append((source.micro_batch(range(BATCH), BATCH), losses))
    return found


def _check_kill(whole: RunDir, parts: RunDir) -> None:
    """Killed in the last step and resumed, the run ends in the same bits."""
    with pytest.raises(RuntimeError, match="ended without an answer"):
        run_on_ranks(train_until_killed, 1, parts, True, (STEPS - 1) * BATCH + 2)
    assert STEPS not in parts.checkpoint_steps()
    run_on_ranks(train_here, 1, parts)
    steps = [
        [(line["step"], line["loss"]) for line in read_steps(r.metrics)] for r in (whole, parts)
    ]
    assert steps[0] == steps[1] and len(steps[0]) == STEPS
    manifests = [
        json.loads((r.checkpoint(STEPS) / "manifest.json").read_text()) for r in (whole, parts)
    ]
    assert manifests[0]["files"] == manifests[1]["files"]


def _plain_loss(model: Any, batch: Any) -> float:
    with torch.no_grad():
        logits = model(input_ids=batch["tokens"]).logits
    return float(F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten()))


def _check(found: list[Any], expected: float) -> None:
    first = found[0][1]
    assert first[0] == pytest.approx(expected, rel=TOLERANCE)
    assert first[-1] < first[0]
    for _, losses in found:
        assert losses == pytest.approx(first, rel=TOLERANCE)


def test_the_first_loss_is_that_of_the_checkpoint_by_itself(corpus: Corpus, tmp_path: Path) -> None:
    source = _source(tmp_path / "src", corpus, {"preset": "llama-tiny"}, {"tp": 2})
    words = [f"run.dir={tmp_path}", "run.from=src@1"]
    start = start_overrides([{"model": {"preset": "llama-tiny"}}], words)
    assert "run.from=src@1" in start
    found = _continued(tmp_path / "new", corpus, {"preset": "llama-tiny"}, start, [*LAYOUTS])
    resolved = read_resolved(source.resolved(0))
    assert resolved.shape is not None
    plain = LlamaForCausalLM(hf_config(resolved.shape))
    params: dict[str, Any] = {f"model.{n}": p.detach() for n, p in plain.named_parameters()}
    load_tensors(source.checkpoint(1), params, allow_extra=True)
    _check(found, _plain_loss(plain.eval(), found[0][0]))


def test_adapters_are_continued_and_may_be_merged(corpus: Corpus, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shape = read_resolved(
        make_run(tmp_path / "shape", corpus, {"model": {"preset": "llama-tiny"}}).resolved(0)
    ).shape
    assert shape is not None
    theirs(shape).save_pretrained(base)
    model = {"preset": None, "path": str(base), "lora": LORA}
    source = _source(tmp_path / "src", corpus, model, {"dp_shard": 2, "zero": 3})
    words = [f"run.dir={tmp_path}", "run.from=src"]

    start = start_overrides([{"model": model}], words)
    adapter = source.exports / "step-00000002-float32-adapter"
    assert f"model.lora.path={adapter}" in start and f"model.path={base}" in start
    found = _continued(tmp_path / "new", corpus, model, start, ["one process", "tp"])

    others = {**model, "lora": {**LORA, "rank": 2}}
    merged = start_overrides([{"model": others}], words)
    assert f"model.path={source.exports / 'step-00000002-float32-merged'}" in merged
    assert not any(each.startswith("model.lora") for each in merged)
    plain = AutoModelForCausalLM.from_pretrained(source.exports / "step-00000002-float32-merged")
    _check(found, _plain_loss(plain, found[0][0]))
    apart = _plain_loss(AutoModelForCausalLM.from_pretrained(base), found[0][0])
    assert abs(apart - found[0][1][0]) > 100 * TOLERANCE, "the adapters do something"

    again = start_overrides([{"model": {"path": str(adapter)}}], [])  # the folder by itself
    assert {f"model.path={base}", f"model.lora.path={adapter}", "model.lora.rank=4"} <= {*again}
    names = json.dumps(LORA["targets"])
    assert f"model.lora.targets={names}" in again and "model.lora.alpha=64.0" in again
