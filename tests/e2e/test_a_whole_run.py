"""One run from text to a fine-tuned model, and every verb that looks at it."""

import json
import shutil
from pathlib import Path

import pytest

from shardyard.rundir.jsonl import read_steps
from tests.e2e.shardyard import Answer, Place


def test_config_and_plan_tell_of_a_run_before_it_exists(place: Place) -> None:
    config = place.run("config", "tiny.yaml", "--json").json
    assert config["settings"]["parallel.zero"]["value"] == 3
    assert "FULL_SHARD" in config["settings"]["parallel.zero"]["reason"]
    assert "optim" in place.run("config", "tiny.yaml").out

    plan = place.run("plan", "tiny.yaml", "--json").json
    assert (plan["samples_per_step"], plan["tokens_per_step"]) == (6, 6 * 32)
    assert place.run("plan", "tiny.yaml").out.startswith("plan: llama-tiny")


def test_a_run_answers_in_json_and_talks_elsewhere(place: Place, base: Answer) -> None:
    assert base.code == 0
    assert (base.json["state"], base.json["steps_done"], base.json["outcome"]) == (
        "finished", 24, "finished",
    )  # fmt: skip
    assert Path(base.json["report_html"]).is_file() and Path(base.json["checkpoint"]).is_dir()
    told = base.err.splitlines()
    assert told[0].startswith("plan: llama-tiny") and "FULL_SHARD over 2" in told[0]
    steps = [line.split()[1] for line in told if line.startswith("step ") and "tokens/s" in line]
    assert steps == [f"{step}/24" for step in range(1, 25)]
    assert told[-1] == "finished" and "ended" not in told
    assert place.state("base") == "finished"
    assert json.loads(place.run("report", "base", "--json").out)["state"] == "finished"


def test_a_run_is_looked_at_from_anywhere(place: Place, base: Answer, tmp_path: Path) -> None:
    assert base.code == 0
    there = str(place.run_dir("base").path)
    assert place.run("report", there, cwd=tmp_path).out.split() == [
        f"{there}/report.html", f"{there}/report.md",
    ]  # fmt: skip
    listed = place.run("runs", "--runs-dir", str(Path(there).parent), cwd=tmp_path)
    assert "base" in listed.out
    finished = place.run("resume", there, "--json", cwd=tmp_path)
    assert (finished.code, finished.json["steps_done"]) == (0, 24)
    assert "is finished: step 24 of 24" in finished.json["message"]


def test_a_run_goes_on_without_the_text_it_was_prepared_from(place: Place, base: Answer) -> None:
    assert base.code == 0
    text = place.folder / "text"
    away = text.rename(place.folder / "away")
    try:
        longer = place.run("resume", "base", "run.steps=30", "--dry-run")
    finally:
        away.rename(text)
    assert longer.out == "base would continue from step 24 of 30\n"


def test_what_has_been_done_is_not_done_over(place: Place, base: Answer) -> None:
    assert base.code == 0
    again = place.run("train", "tiny.yaml", "run.id=base")
    assert (again.code, again.out) == (2, "")
    assert "run.id='base' exists already" in again.err and "`shardyard resume base`" in again.err

    changed = place.run("resume", "base", "optim.lr=0.5", "data.seq_len=16")
    assert changed.code == 2 and "has 2 problems" in changed.err
    assert "optim.lr: 0.01 -> 0.5 changes what is learnt." in changed.err

    shorter = place.run("resume", "bas", "run.steps=3")
    assert shorter.code == 0 and "such as run.steps=48" in shorter.out


def test_an_export_comes_back_as_the_start_of_another_run(place: Place, base: Answer) -> None:
    assert base.code == 0
    first, second = place.folder / "first", place.folder / "second"
    exported = place.run("export", "base", "--to", "first", "--json")
    assert exported.code == 0
    repeated = place.run("export", "base", "--to", "first")
    assert repeated.code == 0 and "had exported already" in repeated.out
    refused = place.run("export", "base", "--to", "first", "--dtype", "bfloat16")
    assert refused.code == 2 and "Give another folder, or remove that one." in refused.err

    # far smaller steps than the weights: what is written later must be near what was read
    tuned = place.run(
        "train", "tiny.yaml", "model.preset=null", "model.path=first", "run.id=tuned",
        "run.steps=2", "optim.lr=1e-5", "optim.weight_decay=0", "optim.warmup_steps=0",
        "cluster.devices=1", "--json",
    )  # fmt: skip
    assert tuned.code == 0, tuned.err
    resolved = json.loads(place.run_dir("tuned").resolved(0).read_text())
    data_dir = Path(resolved["data"]["dir"])
    assert resolved["settings"]["data.tokenizer"]["value"] == str(first)
    assert (data_dir / "tokenizer.json").read_bytes() == (first / "tokenizer.json").read_bytes()
    begun = read_steps(place.run_dir("tuned").metrics)[0]["loss"]
    assert begun == pytest.approx(base.json["eval_loss"], abs=0.5)  # of random weights: 6.2

    assert place.run("export", "tuned", "--to", "second").code == 0
    _compare_weights(first, second, steps=2, lr=1e-5)
    _compare_logits(second, place.run_dir("tuned").checkpoint(2))
    shutil.rmtree(second)


def _compare_weights(first: Path, second: Path, *, steps: int, lr: float) -> None:
    """AdamW moves a weight by at most about lr a step: |m| / sqrt(v) <= sqrt of its step count."""
    from safetensors.torch import load_file

    before, after = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert before.keys() == after.keys()
    moved = max(float((after[name] - before[name]).abs().max()) for name in before)
    assert 0 < moved <= 2 * steps * lr


def _compare_logits(folder: Path, checkpoint: Path) -> None:
    """An export opens with transformers and computes what the checkpoint's weights compute."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = AutoTokenizer.from_pretrained(folder)(
        "def main() -> None:", return_tensors="pt"
    ).input_ids
    assert 1 < ids.shape[1] < 19 and int(ids.max()) < 512

    by_hand = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval()
    saved = load_file(checkpoint / "rank-00000.safetensors")
    weights = {
        name.removeprefix("model."): tensor
        for name, tensor in saved.items()
        if name.startswith("model.")
    }
    by_hand.load_state_dict(weights, strict=not by_hand.config.tie_word_embeddings)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, by_hand(ids).logits)
