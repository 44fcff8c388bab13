"""Text generated during training: transformers' own of the same step, and without any effect."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardyard.checkpoint.bitwise_compare import compare_bits
from shardyard.checkpoint.export import export
from shardyard.rundir.attempt_files import read_resolved
from shardyard.rundir.jsonl import EventWriter, read_lines
from shardyard.rundir.layout import RunDir
from shardyard.train.hooks import Hooks
from shardyard.train.loop import FINISHED
from shardyard.train.run import train
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run, prepare_corpus

PROMPTS = ["def ", "import json\n\nclass"]
TOKENS = 6
TEXT: dict[str, Any] = {"generate_tokens": TOKENS, "prompts": PROMPTS, "generate_every": 2}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return prepare_corpus(tmp_path_factory.mktemp("corpus"))


def _train(run_dirs: list[RunDir]) -> None:
    for run_dir in run_dirs:
        is_first = torch.distributed.get_rank() == 0
        events = EventWriter(run_dir.events, attempt=0, generation=0) if is_first else None
        hooks = Hooks(generation=0, drain_requested=lambda: False, events=events)
        assert train(run_dir, 0, hooks) == FINISHED


def trained(
    folder: Path, corpus: Corpus, tasks: list[dict[str, Any]], sections: dict[str, Any]
) -> list[RunDir]:
    """Runs that differ only in their tasks, with dropout and a checkpoint every two steps."""
    base = {
        "checkpoint": {"every": 2, "keep_last": 9}, "model": {"dropout": 0.1},
        "optim": {"micro_batch": 2}, **sections,
    }  # fmt: skip
    processes = sections.get("cluster", {}).get("devices", 1)
    runs = [
        make_run(folder / str(number), corpus, {**base, "task": task})
        for number, task in enumerate(tasks)
    ]
    run_on_ranks(_train, processes, runs)
    return runs


def transformers_text(run_dir: RunDir, step: int, prompt: str, folder: Path) -> str:
    """Greedy continuation of a prompt by a checkpoint that was exported."""
    export(run_dir.checkpoint(step), read_resolved(run_dir.resolved(0)), folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    known = set(tokenizer.get_vocab().values())  # the head has more rows, which are never drawn
    unknown = [token for token in range(model.config.vocab_size) if token not in known]
    model.generation_config.eos_token_id = None  # running text continues after a document
    ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)])
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False,
        suppress_tokens=unknown, pad_token_id=0,
    )  # fmt: skip
    return str(tokenizer.decode(found[0], skip_special_tokens=True)).removeprefix(prompt)


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"cluster": {"devices": 2}, "parallel": {"zero": 3}},
        *(
            pytest.param({"cluster": {"devices": 2}, "parallel": each}, marks=pytest.mark.system)
            for each in ({"zero": 1}, {"zero": 2}, {"tp": 2}, {"pp": 2}, {"cp": 2})
        ),
        pytest.param({"optim": {"name": "schedule_free_adamw"}}, marks=pytest.mark.system),
    ],
    ids=str,
)
def test_texts_are_those_of_transformers_and_training_is_as_without_them(
    tmp_path: Path, corpus: Corpus, sections: dict[str, Any]
) -> None:
    shown, plain = trained(tmp_path, corpus, [TEXT, {}], sections)
    found = compare_bits(shown, plain)
    assert found.outcome == "equal", found.why
    lines = list(read_lines(shown.samples))
    assert [(line["step"], line["prompt"]) for line in lines] == [
        (step, prompt) for step in (2, 4) for prompt in PROMPTS
    ]
    for number, line in enumerate(lines):
        text = transformers_text(shown, line["step"], line["prompt"], tmp_path / f"hf-{number}")
        assert line["text"] == text
    assert shown.sample.read_text() == PROMPTS[0] + lines[2]["text"]
    assert not plain.samples.exists()
    told = [each for each in read_lines(shown.events) if each["kind"] == "generated"]
    assert [(each["step"], each["seconds"] > 0) for each in told] == [(2, True), (4, True)]
    assert json.dumps(told[1]["texts"][0]["text"]) == json.dumps(lines[2]["text"])


def test_text_can_come_with_each_validation_and_always_comes_at_the_end(
    tmp_path: Path, corpus: Corpus
) -> None:
    at_each = {"generate_tokens": 2, "generate_every": "validation", "eval_every_steps": 3}
    shown, last = trained(tmp_path, corpus, [at_each, {"generate_tokens": 2}], {})
    assert [line["step"] for line in read_lines(shown.samples)] == [3, 4]
    assert [line["step"] for line in read_lines(last.samples)] == [4]
    assert shown.sample.read_text() == last.sample.read_text()
