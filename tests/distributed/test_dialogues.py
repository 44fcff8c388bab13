"""Dialogues from a Hugging Face folder to a Hugging Face folder: losses, packing, export."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from shardyard.checkpoint.export import export
from shardyard.checkpoint.select import choose_checkpoint
from shardyard.config.schema.recipe import Recipe
from shardyard.data.prepare import prepare
from shardyard.models.random import key_of
from shardyard.rundir.attempt_files import read_resolved
from shardyard.rundir.jsonl import read_evaluations, read_steps
from shardyard.rundir.layout import RunDir
from tests.data.chat.folders import files_of, write
from tests.data.chat.stock import STOCK
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run, train_here

ROWS = [
    [
        {"role": "user", "content": f"What is {n} and {n}?" + " Think." * (n % 4)},
        {"role": "assistant", "content": f"It is {2 * n}."},
        *(
            [
                {"role": "user", "content": "Sure?"},
                {"role": "assistant", "content": f"Yes, {2 * n}, and not {2 * n + 1}."},
            ]
            if n % 3
            else []
        ),
    ]
    for n in range(20)
]
SEQ_LEN = 192


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a chat model's: weights, tokenizer, template."""
    folder = write(files_of(STOCK["chatml"]), tmp_path_factory.mktemp("model"))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=384, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def run(folder: Path, source: Path, sections: dict[str, Any], **data: Any) -> RunDir:
    """A run on the dialogues, ready to train."""
    folder.mkdir(exist_ok=True)
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"messages": row}) + "\n" for row in ROWS))
    settings = {
        "source": str(rows), "dir": str(folder / "data"), "format": "chat", "seq_len": SEQ_LEN,
        "tokenizer": str(source), "eval_fraction": 0.0, "workers": 1, **data,
    }  # fmt: skip
    recipe = Recipe.model_validate({"data": settings})
    corpus = Corpus(str(rows), str(folder / "data"), prepare(
        recipe, model_dir=source, progress=lambda *_: None
    ))  # fmt: skip
    base = {
        "model": {"preset": None, "path": str(source), "weights": "load"},
        "data": settings,
        "run": {"steps": 1},
        "optim": {"lr": 1e-9, "weight_decay": 0.0, "global_batch": 40, "warmup_steps": 0},
    }
    merged = {name: {**base.get(name, {}), **sections.get(name, {})} for name in {*base, *sections}}
    return make_run(folder / "run", corpus, merged)


def plain(source: Path, rows: list[list[dict[str, str]]] = ROWS) -> tuple[float, float]:
    """Loss and gradient norm of all answers, each dialogue for itself, by transformers alone."""
    model, tokenizer = (
        kind.from_pretrained(source) for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    after = len(tokenizer("\n", add_special_tokens=False)["input_ids"])  # what ends a turn
    total, number = torch.zeros(()), 0
    for row in rows:
        ids = tokenizer.apply_chat_template(row, return_dict=False)
        labels = [-100] * len(ids)
        for answer in range(1, len(row), 2):
            given = tokenizer.apply_chat_template(
                row[:answer], add_generation_prompt=True, return_dict=False
            )
            upto = len(tokenizer.apply_chat_template(row[: answer + 1], return_dict=False)) - after
            labels[len(given) : upto] = ids[len(given) : upto]
        logits = model(torch.tensor([ids])).logits[0, :-1]
        total = total + F.cross_entropy(logits, torch.tensor(labels[1:]), reduction="sum")
        number += sum(label >= 0 for label in labels[1:])
    torch.autograd.backward(total / number)
    squares = sum(float(each.grad.square().sum()) for each in model.parameters())
    return float(total.detach() / number), math.sqrt(squares)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.5, "top_k": 30}], ids=str)
def test_the_text_at_the_end_of_a_run_answers_the_prompt(
    tmp_path: Path, source: Path, sampling: dict[str, Any]
) -> None:
    told = {"generate_tokens": 12, "prompt": "What is 2 and 2?", **sampling}
    run_dir = run(tmp_path, source, {"task": told, "run": {"steps": 1}})
    run_on_ranks(train_here, 1, run_dir)
    prompt, answer = run_dir.sample.read_text().split("\n\n", 1)
    assert prompt == told["prompt"] and "<|im_" not in answer
    checkpoint = choose_checkpoint(RunDir(run_dir.path), "latest").path
    export(checkpoint, read_resolved(run_dir.resolved(0)), tmp_path / "export")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True, return_tensors="pt", return_dict=False,
    )  # fmt: skip
    known = set(tokenizer.get_vocab().values())  # the head has more rows, which are never drawn
    unknown = [token for token in range(model.config.vocab_size) if token not in known]
    if sampling:
        expected = _drawn(model, ids, unknown, tokenizer.eos_token_id, **sampling)
    else:
        expected = model.generate(ids, max_new_tokens=12, do_sample=False, suppress_tokens=unknown)
    expected = expected[0, ids.shape[1] :]
    assert answer == tokenizer.decode(expected, skip_special_tokens=True).strip()


def _drawn(
    model: LlamaForCausalLM, ids: Tensor, unknown: list[int], end: int, *, temperature: float,
    top_k: int,
) -> Tensor:  # fmt: skip
    """Twelve tokens drawn by a plain loop, in the run's order of random numbers."""
    draw = torch.Generator().manual_seed(key_of(Recipe().run.seed, "generate") % 2**63)
    for _ in range(12):
        with torch.no_grad():
            logits = model(ids).logits[0, -1]
        logits[unknown] = -torch.inf
        least = logits.sort(descending=True).values[top_k - 1]
        logits[logits < least] = -torch.inf
        token = torch.multinomial((logits / temperature).softmax(0), 1, generator=draw)
        ids = torch.cat([ids, token[None]], 1)
        if int(token) == end:
            break
    return ids


def batch_of(run_dir: RunDir) -> int:
    """Samples of the training split."""
    return read_resolved(run_dir.resolved(0)).data.num_samples("train", SEQ_LEN)


@pytest.mark.parametrize(
    ("processes", "sections"),
    [
        (1, {}),
        (2, {"parallel": {"dp_shard": 2}}),  # one of them gets a micro-batch of padding
        pytest.param(2, {"parallel": {"tp": 2}}, marks=pytest.mark.system),
        pytest.param(2, {"parallel": {"pp": 2}}, marks=pytest.mark.system),
        pytest.param(2, {"parallel": {"cp": 2}}, marks=pytest.mark.system),
    ],
)
def test_packed_answers_have_the_loss_and_gradient_that_they_have_alone(
    tmp_path: Path, source: Path, processes: int, sections: dict[str, Any]
) -> None:
    first = run(tmp_path / "count", source, {}, pack="whole")
    optim = {"lr": 1e-9, "weight_decay": 0.0, "warmup_steps": 0, "global_batch": batch_of(first)}
    run_dir = run(
        tmp_path / "x",
        source,
        {**sections, "optim": optim, "cluster": {"devices": processes}},
        pack="whole",
    )
    run_on_ranks(train_here, processes, run_dir)
    (step,) = read_steps(run_dir.metrics)
    loss, norm = plain(source)
    near = 1e-6 if processes == 1 else 1e-5
    assert step["loss"] == pytest.approx(loss, rel=near)
    assert step["grad_norm"] == pytest.approx(norm, rel=near)
    data = read_resolved(run_dir.resolved(0)).data
    assert step["tokens"] == data.train_places
    assert step["targets"] == data.train_learnt


def test_perplexity_is_that_of_the_held_out_answers(tmp_path: Path, source: Path) -> None:
    sections: dict[str, Any] = {
        "optim": {"global_batch": 4, "micro_batch": 1},
        "cluster": {"devices": 2},
        "parallel": {"dp_shard": 2},
    }
    run_dir = run(tmp_path / "x", source, sections, pack="whole", eval_fraction=0.3)
    run_on_ranks(train_here, 2, run_dir)
    data = Path(read_resolved(run_dir.resolved(0)).data.dir)
    tokenizer = AutoTokenizer.from_pretrained(source)
    files = [file for file in data.glob("eval-*.bin") if file.suffixes == [".bin"]]
    text = "".join(tokenizer.decode(np.fromfile(file, "<u2")) for file in files)
    held_out = [row for row in ROWS if row[0]["content"] + "<|im_end|>" in text]
    assert 0 < len(held_out) < len(ROWS)
    loss, _ = plain(source, held_out)
    (found,) = read_evaluations(run_dir.metrics)
    assert found["eval"]["loss"] == pytest.approx(loss, rel=1e-6)
    assert found["eval"]["perplexity"] == pytest.approx(math.exp(loss), rel=1e-6)
    assert found["eval"].keys() == {"loss", "perplexity"}


def test_an_export_says_what_its_source_says(tmp_path: Path, source: Path) -> None:
    run_dir = run(tmp_path / "x", source, {}, pack="whole")
    run_on_ranks(train_here, 1, run_dir)
    checkpoint = choose_checkpoint(RunDir(run_dir.path), "latest").path
    export(checkpoint, read_resolved(run_dir.resolved(0)), tmp_path / "export")
    answers = []
    for folder in (source, tmp_path / "export"):
        model, tokenizer = (
            kind.from_pretrained(folder) for kind in (AutoModelForCausalLM, AutoTokenizer)
        )
        ids = tokenizer.apply_chat_template(
            ROWS[0][:1], add_generation_prompt=True, return_tensors="pt", return_dict=False
        )
        answers.append(model.generate(ids, max_new_tokens=12, do_sample=False).tolist())
    assert answers[0] == answers[1]


def test_a_template_that_was_named_is_exported(tmp_path: Path, source: Path) -> None:
    run_dir = run(tmp_path / "x", source, {}, chat_template="alpaca")
    run_on_ranks(train_here, 1, run_dir)
    checkpoint = choose_checkpoint(RunDir(run_dir.path), "latest").path
    export(checkpoint, read_resolved(run_dir.resolved(0)), tmp_path / "export")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    text = tokenizer.apply_chat_template(ROWS[0][:1], tokenize=False, add_generation_prompt=True)
    assert text.startswith("### Instruction:") and text.endswith("### Response:\n")


def test_a_step_without_any_answer_changes_nothing(tmp_path: Path, source: Path) -> None:
    optim = {"lr": 0.1, "global_batch": 1, "warmup_steps": 0}
    sections = {"optim": optim, "run": {"steps": 8}}
    run_dir = run(tmp_path / "x", source, sections, seq_len=6, eval_fraction=0.2)
    run_on_ranks(train_here, 1, run_dir)
    steps = read_steps(run_dir.metrics)
    empty = [step for step in steps if step["targets"] == 0]
    assert len(steps) == 8 and 0 < len(empty) < 8
    assert all(step["loss"] is None and step["grad_norm"] == 0 for step in empty)
    assert all(step["loss"] > 0 for step in steps if step not in empty)
