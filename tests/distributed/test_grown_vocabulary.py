"""A model whose tokenizer has more tokens than it has rows trains as transformers' resized one."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardyard.checkpoint.export import export
from shardyard.config.schema.recipe import Recipe
from shardyard.data.prepare import prepare
from shardyard.rundir.attempt_files import read_resolved
from shardyard.rundir.jsonl import read_steps
from shardyard.rundir.layout import RunDir
from shardyard.tasks.base import task_class
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run, train_here
from tests.distributed.test_resume import train_until_killed
from tests.families.random_models import cases, theirs

BATCH, STEPS, RATE, ROWS = 4, 2, 0.5, 512
WORDS, SPECIAL = [", ", "= ", "self."], ["<|im_start|>", "<|tool|>"]
LORA = {"rank": 4, "targets": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "zero 3": (2, {"dp_shard": 2, "zero": 3}),
    "tp": (2, {"tp": 2}),
}


def _base(folder: Path, corpus: Corpus, *, is_tied: bool) -> Path:
    """A model's folder with the tokenizer of a corpus."""
    shape = replace(cases("llama")["plain"], vocab_size=ROWS, tie_word_embeddings=is_tied)
    theirs(shape).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).write_bytes((Path(corpus.facts.dir) / name).read_bytes())
    return folder


def _prepared(base: Path, corpus: Corpus) -> Corpus:
    """The same text in the tokens of the base's tokenizer, and of those that are added."""
    data = {
        "source": corpus.source, "dir": corpus.prepared, "workers": 1, "eval_fraction": 0.005,
        "add_tokens": WORDS, "add_special_tokens": SPECIAL,
    }  # fmt: skip
    recipe = Recipe.model_validate({"model": {"path": str(base)}, "data": data})
    facts = prepare(recipe, model_dir=base, progress=lambda *_: None, rows=ROWS)
    return Corpus(corpus.source, corpus.prepared, facts)


def _run(
    folder: Path, corpus: Corpus, base: Path, layout: str, *, steps: int = STEPS, lora: Any = None
) -> RunDir:
    processes, parallel = LAYOUTS[layout]
    sections = {
        "run": {"steps": steps},
        "model": {"preset": None, "path": str(base), "weights": "load", "lora": lora or {}},
        "data": {"tokenizer": "auto", "add_tokens": WORDS, "add_special_tokens": SPECIAL},
        "optim": {
            "name": "sgd", "lr": RATE, "weight_decay": 0.0, "grad_clip": None, "warmup_steps": 0,
            "schedule": "constant", "global_batch": BATCH, "micro_batch": 1,
        },
        "parallel": parallel,
        "cluster": {"devices": processes},
        "checkpoint": {"every": 1, "keep_last": steps},
    }  # fmt: skip
    return make_run(folder, corpus, sections)


def _reference(base: Path, run: RunDir) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """Losses and weights of each step of plain SGD on transformers' resized model."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model.resize_token_embeddings(ROWS + len(WORDS) + len(SPECIAL), mean_resizing=True)
    with torch.no_grad():  # around the mean transformers draws, by 1e-4.5 of the deviation
        for module in (model.get_input_embeddings(), model.get_output_embeddings()):
            mean = module.weight[:ROWS].mean(dim=0).expand(len(WORDS) + len(SPECIAL), -1)
            torch.testing.assert_close(module.weight[ROWS:], mean, rtol=0, atol=1e-5)
            module.weight[ROWS:] = mean
    source, *_ = task_class("causal_lm").open_data(read_resolved(run.resolved(0)))
    losses, weights = [], []
    for step in range(STEPS):
        batch = source.micro_batch(range(step * BATCH, (step + 1) * BATCH), BATCH)
        logits = model(input_ids=batch["tokens"]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
        model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for param in model.parameters():
                param -= RATE * param.grad
        losses.append(loss.item())
        weights.append({name: each.detach().clone() for name, each in model.state_dict().items()})
        assert (batch["tokens"] >= ROWS).any(), "the new tokens are in the text"
    return losses, weights


def _losses(run: RunDir) -> list[float]:
    return [line["loss"] for line in read_steps(run.metrics)]


@pytest.mark.parametrize(
    "is_tied", [False, pytest.param(True, marks=pytest.mark.system)], ids=["head", "tied"]
)
def test_added_tokens_train_as_in_transformers_in_each_layout(
    corpus: Corpus, tmp_path: Path, is_tied: bool
) -> None:
    base = _base(tmp_path / "base", corpus, is_tied=is_tied)
    grown = _prepared(base, corpus)
    assert grown.facts.vocab_size == ROWS + 5
    for layout in LAYOUTS:
        run = _run(tmp_path / layout, grown, base, layout)
        run_on_ranks(train_here, LAYOUTS[layout][0], run)
        if layout == "one process":
            losses, weights = _reference(base, run)
        assert _losses(run) == pytest.approx(losses, rel=1e-5), layout
        for step, expected in enumerate(weights, start=1):
            out = tmp_path / f"{layout} {step}"
            export(run.checkpoint(step), read_resolved(run.resolved(0)), out)
            # After one step the weights differ by the rate times the gradients.
            ours = AutoModelForCausalLM.from_pretrained(out).state_dict()
            assert ours.keys() == expected.keys()
            for name, param in ours.items():
                torch.testing.assert_close(param, expected[name], rtol=1e-5, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert len(tokenizer) == ROWS + 5
    assert tokenizer.convert_tokens_to_ids([*SPECIAL, *WORDS]) == [*range(ROWS, ROWS + 5)]
    assert json.loads((out / "config.json").read_text())["vocab_size"] == ROWS + 5


@pytest.mark.parametrize("lora", [None, LORA], ids=["whole", "adapters"])
def test_a_killed_run_with_new_rows_resumes_to_the_same_bits(
    corpus: Corpus, tmp_path: Path, lora: Any
) -> None:
    base = _base(tmp_path / "base", corpus, is_tied=False)
    grown = _prepared(base, corpus)
    whole, parts = (
        _run(tmp_path / name, grown, base, "one process", steps=3, lora=lora) for name in ("a", "b")
    )
    run_on_ranks(train_here, 1, whole)
    with pytest.raises(RuntimeError, match="ended without an answer"):
        run_on_ranks(train_until_killed, 1, parts, True, 2 * BATCH + 2)
    assert 1 in parts.checkpoint_steps() and 3 not in parts.checkpoint_steps()
    run_on_ranks(train_here, 1, parts)
    assert _losses(whole) == _losses(parts)
    files = [
        json.loads((run.checkpoint(3) / "manifest.json").read_text())["files"]
        for run in (whole, parts)
    ]
    assert files[0] == files[1]


@pytest.mark.parametrize(
    "is_tied", [False, pytest.param(True, marks=pytest.mark.system)], ids=["head", "tied"]
)
def test_adapters_with_trained_embeddings_are_those_of_peft(
    corpus: Corpus, tmp_path: Path, is_tied: bool
) -> None:
    pytest.importorskip("peft", reason="the dev extra has it")
    from peft import AutoPeftModelForCausalLM

    base = _base(tmp_path / "base", corpus, is_tied=is_tied)
    grown = _prepared(base, corpus)
    ends = ["embed_tokens"] if is_tied else ["embed_tokens", "lm_head"]
    lora = {**LORA, "modules_to_save": ends}
    found: dict[str, list[float]] = {}
    for layout in LAYOUTS:
        run = _run(tmp_path / layout, grown, base, layout, lora=lora)
        run_on_ranks(train_here, LAYOUTS[layout][0], run)
        found[layout] = _losses(run)
        assert found[layout] == pytest.approx(found["one process"], rel=1e-5), layout
    resolved = read_resolved(run.resolved(0))
    for step in (1, 2):
        export(run.checkpoint(step), resolved, tmp_path / f"adapter {step}")
    export(run.checkpoint(2), resolved, tmp_path / "merged", merged=True)
    first, second = (
        AutoPeftModelForCausalLM.from_pretrained(tmp_path / f"adapter {step}", is_trainable=True)
        for step in (1, 2)
    )
    source, *_ = task_class("causal_lm").open_data(resolved)
    batch = source.micro_batch(range(BATCH, 2 * BATCH), BATCH)
    logits = first(input_ids=batch["tokens"]).logits
    loss = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
    assert loss.item() == pytest.approx(found["tp"][1], rel=1e-5)
    loss.backward()  # type: ignore[no-untyped-call]
    after, trained = dict(second.named_parameters()), 0
    for name, param in first.named_parameters():
        moved = param if param.grad is None else param - RATE * param.grad
        torch.testing.assert_close(after[name], moved, rtol=1e-5, atol=1e-5)
        trained += param.numel() if param.requires_grad else 0
    rows = ROWS + len(WORDS) + len(SPECIAL)
    assert trained == len(ends) * rows * 64 + 2 * 4 * (64 + 64), "and adapters of two blocks"
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        expected = second(input_ids=batch["tokens"]).logits
        ours = merged(input_ids=batch["tokens"]).logits
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
