"""Rows with a preferred and a rejected answer: their shapes, wrong ones, and samples."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardyard.config.schema.recipe import Recipe
from shardyard.config.tasks import task_row
from shardyard.data.byte_ranges import TextSection
from shardyard.data.preference.rows import AnswerPair, pair_text
from shardyard.data.preference.samples import AnswerPairs, PackedPairs, RatedPairs, pairs_class
from shardyard.data.readers.columns import TextOf
from shardyard.data.shards import LEARNT, TokenShards
from shardyard.data.text_datasets import prepare_text
from shardyard.data.tokenizer import TextEncoder
from shardyard.errors import RequestError, ShardyardError, SourceError
from tests.data.chat.folders import encoded, files_of
from tests.data.chat.stock import STOCK

SYSTEM, ASK = {"role": "system", "content": "s"}, {"role": "user", "content": "a?"}
GOOD, BAD = {"role": "assistant", "content": "b."}, {"role": "assistant", "content": "c."}
READ = {**GOOD, "weight": 0}


def pair_of(row: object) -> dict[str, Any]:
    pair: dict[str, Any] = json.loads(pair_text(row, "x:1"))
    return pair


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "a?", "chosen": "b.", "rejected": "c.", "score": 3}, [ASK]),
        ({"question": "a?", "system": "s", "chosen": "b.", "rejected": "c."}, [SYSTEM, ASK]),
        ({"prompt": [SYSTEM, ASK], "chosen": [GOOD], "rejected": BAD}, [SYSTEM, ASK]),
        ({"prompt": [ASK, GOOD, ASK], "chosen": "b.", "rejected": "c."}, [ASK, READ, ASK]),
        ({"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, [ASK]),
        # as UltraFeedback has it
        ({"prompt": "a?", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, [ASK]),
        (
            {"prompt": "a?", "system": "s", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
            [SYSTEM, ASK],
        ),
        ({"chosen": [ASK, GOOD, ASK, GOOD], "rejected": [ASK, GOOD, ASK, BAD]}, [ASK, READ, ASK]),
        # as LLaMA-Factory has it
        (
            {"conversations": [{"from": "human", "value": "a?"}],
             "chosen": {"from": "gpt", "value": "b."}, "rejected": {"from": "gpt", "value": "c."}},
            [ASK],
        ),
        (
            {"instruction": "a?", "input": "x", "chosen": "b.", "rejected": "c."},
            [{"role": "user", "content": "a?\n\nx"}],
        ),
    ],
)  # fmt: skip
def test_rows_become_two_dialogues_of_one_prompt(
    row: dict[str, Any], prompt: list[dict[str, Any]]
) -> None:
    assert pair_of(row) == {"prompt": prompt, "chosen": [GOOD], "rejected": [BAD]}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "a?", "chosen": "b."}, "the row has no rejected; its keys: chosen, prompt"),
        ({"chosen": "b.", "rejected": "c."}, "the row has no prompt; its keys: chosen, rejected"),
        ([1], "a JSON list, not an object"),
        ({"prompt": "a?", "chosen": "", "rejected": "c."}, "an answer is empty"),
        ({"prompt": "a?", "chosen": 3, "rejected": "c."}, "'chosen' holds 3, not a list"),
        ({"prompt": "a?", "chosen": [ASK], "rejected": [ASK]}, "'chosen' has no answer"),
        ({"chosen": [ASK, GOOD, ASK], "rejected": [ASK, GOOD, SYSTEM]}, "'chosen' has no answer"),
        ({"prompt": "a?", "chosen": [ASK, GOOD], "rejected": "c."}, "'chosen' is a whole dialogue"),
        (
            {"prompt": "z?", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
            "do not have the row's prompt in what they begin with",
        ),
        (
            {"conversations": [{"from": "me", "value": "a"}], "chosen": "b.", "rejected": "c."},
            "turn 1 is from \"me\"",
        ),
    ],
)  # fmt: skip
def test_a_wrong_row_is_rejected_with_its_place(row: object, said: str) -> None:
    with pytest.raises(SourceError, match=r"^x:1: ") as error:
        pair_text(row, "x:1")
    assert said in str(error.value)


def test_other_keys_are_mapped_also_those_of_turns() -> None:
    keys = (("chosen", "good"), ("content", "said"), ("prompt", "frage"), ("rejected", "bad"))
    row = {"frage": "a?", "good": [{"role": "assistant", "said": "b."}], "bad": "c."}
    text = TextOf(whole_row="shardyard.data.preference.rows:pair_text", keys=keys)(row, "x:1")
    assert json.loads(text)["chosen"] == [GOOD]


def test_both_answers_have_the_tokens_and_the_loss_of_dialogues() -> None:
    row = {"prompt": "a?", "chosen": "b.", "rejected": "c."}
    section = TextSection(pair_text(row, "x:1"), begins=True, ends=True, location="x:1")
    pair = AnswerPair(TextEncoder(files_of(STOCK["chatml"]), name="chatml")).encode(section)
    alone = [encoded("chatml", {"messages": [ASK, answer]})[0] for answer in (GOOD, BAD)]
    assert [(each.ids, each.columns) for each in pair] == [
        (each.ids, each.columns) for each in alone
    ]
    assert all(each.is_whole for each in pair)


def _prepared(
    tmp_path: Path, rows: list[dict[str, Any]], task: str = "preference", **data: Any
) -> PackedPairs:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {
        "source": str(path), "dir": str(tmp_path / "prepared"), "format": "preference_pairs",
        "chat_template": "chatml", "vocab_size": 300, "tokenizer": "train", "eval_fraction": 0.0,
        "add_special_tokens": ("<|im_start|>", "<|im_end|>"), "seq_len": 256, **data,
    }  # fmt: skip
    recipe = Recipe.model_validate({"task": {"name": task}, "data": given})
    facts = prepare_text(recipe, model_dir=None, progress=lambda *_: None)
    assert facts.train_documents == 2 * len(rows) and facts.unigram_entropy == 0.0
    found = pairs_class(task_row(task))(
        TokenShards(Path(facts.dir), "train"), seq_len=given["seq_len"],
        too_long=recipe.data.too_long, columns=(LEARNT,) if task == "preference" else (),
    )  # fmt: skip
    assert facts.train_samples == found.num_samples and facts.too_long == found.num_too_long
    return found


ROWS = [
    {"prompt": f"What is {number}?", "chosen": f"It is {number}." * (1 + number % 4),
     "rejected": "No." * (1 + number % 3)}
    for number in range(20)
]  # fmt: skip


@pytest.mark.heavy
def test_each_pair_is_in_one_sample_with_both_answers(tmp_path: Path) -> None:
    pairs = _prepared(tmp_path, ROWS)
    assert isinstance(pairs, AnswerPairs)
    pairs.reference = np.arange(40.0).reshape(20, 2)
    seen = []
    for index in range(pairs.num_samples):
        sample = pairs.sample(index, 0)
        numbers = sample.fields["pairs"]
        numbers = numbers[numbers >= 0]
        seen += numbers.tolist()
        documents = sample.fields["documents"]
        assert (documents[: sample.length] >= 0).all() and (documents[sample.length :] < 0).all()
        assert sorted(set(documents[: sample.length])) == list(range(2 * len(numbers)))
        assert (sample.fields["positions"][documents == 1][0]) == 0
        expected = np.arange(40.0).reshape(20, 2)[numbers]
        assert (sample.fields["reference"][: len(numbers)] == expected).all()
        learnt = sample.fields[LEARNT][1:] != 0
        assert all(learnt[documents == each].any() for each in range(2 * len(numbers)))
    assert sorted(seen) == list(range(20)) and pairs.num_samples < 20


@pytest.mark.heavy
def test_a_reward_is_read_at_the_last_token_of_each_dialogue(tmp_path: Path) -> None:
    pairs = _prepared(tmp_path, ROWS, task="reward")
    assert isinstance(pairs, RatedPairs)
    shards, seen = pairs._shards, 0
    for index in range(pairs.num_samples):
        sample = pairs.sample(index, 0)
        assert {*sample.fields} == {"tokens", "positions", "pairs", "reads"}
        numbers = pairs.numbers[pairs.units_of(index)]
        seen += len(numbers)
        for number, ends in zip(numbers, sample.fields["reads"], strict=False):
            for document, end in zip((2 * number, 2 * number + 1), ends, strict=True):
                whole = shards.document_at(int(shards.document_starts[document]))
                tokens = shards.read(whole.start, whole.stop)
                begin = end + 1 - len(tokens)
                assert (sample.fields["tokens"][begin : end + 1] == tokens).all()
                assert sample.fields["positions"][[begin, end]].tolist() == [0, len(tokens) - 1]
    assert seen == 20 and pairs.num_samples < 20
    fitting = int(pairs._sizes.sum(axis=1).max())
    with pytest.raises(RequestError, match=rf"Set data.seq_len={fitting}, or"):
        _prepared(tmp_path, ROWS, task="reward", seq_len=fitting - 1)


@pytest.mark.heavy
def test_pairs_that_do_not_fit_are_rejected_cut_or_dropped(tmp_path: Path) -> None:
    rows = [*ROWS, {"prompt": "a?", "chosen": "word " * 400, "rejected": "No."}]
    with pytest.raises(RequestError, match=r"=preference_pairs: 1 of 21 pairs .* data.too_lo"):
        _prepared(tmp_path, rows)
    assert len(_prepared(tmp_path, rows, too_long="drop").numbers) == 20
    cut = _prepared(tmp_path, rows, too_long="cut")
    assert len(cut.numbers) == 21
    at = next(i for i in range(cut.num_samples) if 20 in cut.numbers[cut.units_of(i)])
    assert cut.sample(at, 0).length == 256, "only the longer answer was cut"
    # where the prompt fills the room, no answer is left to learn
    lost = [*ROWS, {"prompt": "word " * 400, "chosen": "Yes.", "rejected": "No."}]
    assert len(_prepared(tmp_path, lost, too_long="cut").numbers) == 20


@pytest.mark.heavy
def test_a_template_that_changes_earlier_answers_rejects_pairs_of_several(tmp_path: Path) -> None:
    path = tmp_path / "turns.jinja"
    path.write_text(
        "{% for m in messages %}{% if loop.last or m.role == 'user' %}<{{ m.role }}>"
        "{{ m.content }}</s>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    rows = [{"chosen": [ASK, GOOD, ASK, GOOD], "rejected": [ASK, BAD, ASK, BAD]}] * 3
    with pytest.raises(ShardyardError, match="chat template"):
        _prepared(tmp_path, rows, chat_template=str(path))
