"""Dialogues prepared as data: what is kept, what is told of them, and what is refused."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardyard.cli.prepare import _rows
from shardyard.config.data_choices import CHAT_TEMPLATES
from shardyard.config.resolved import DatasetMetadata
from shardyard.config.schema.recipe import Recipe
from shardyard.control.attempt import split_lines
from shardyard.data.prepare import prepare
from shardyard.data.shards import LEARNT, TokenShards, verify
from shardyard.errors import RequestError, SourceError
from tests.data.chat.folders import files_of, write
from tests.data.chat.stock import STOCK

ROWS = [{"prompt": f"What is {n} + {n}?", "completion": f"It is {2 * n}."} for n in range(40)]


def prepared(folder: Path, rows: list[Any] = ROWS, **data: Any) -> DatasetMetadata:
    (folder / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "source": str(folder / "x.jsonl"), "dir": str(folder / "out"), "format": "chat",
        "tokenizer": "train", "vocab_size": 300, "workers": 1, "eval_fraction": 0.2,
    }  # fmt: skip
    recipe = Recipe.model_validate({"data": {**settings, **data}})
    return prepare(recipe, model_dir=None, progress=lambda *_: None)


def test_dialogues_are_documents_without_further_ends(tmp_path: Path) -> None:
    tokenizer = write(files_of(STOCK["qwen2.5"]), tmp_path / "tokenizer")
    facts = prepared(tmp_path, tokenizer=str(tokenizer))
    verify(Path(facts.dir))
    assert (facts.bos_token, facts.train_bytes) == (None, None)
    shards = TokenShards(Path(facts.dir), "train", vocab_size=facts.vocab_size)
    ids, learnt = (shards.read(0, shards.num_tokens, column) for column in (None, LEARNT))
    assert facts.train_learnt is not None and learnt.sum() == facts.train_learnt
    assert len(shards.document_starts) == facts.train_documents < len(ROWS)
    begin = ids[0]
    assert all(ids[start] == begin for start in shards.document_starts)  # <|im_start|>
    shares = np.bincount(ids[learnt != 0]) / learnt.sum()
    entropy = -sum(share * math.log(share) for share in shares if share)
    assert facts.unigram_entropy == pytest.approx(entropy)  # of what the loss counts
    told = dict(_rows(facts))
    assert told["rows"] == "chat: prompt and completion"
    assert told["carry loss"] == (
        f"{facts.train_learnt / facts.train_tokens:.1%} of the training tokens, "
        f"{facts.train_learnt:,}"
    )


def test_mapped_keys_are_part_of_what_is_prepared(tmp_path: Path) -> None:
    rows = [{"frage": row["prompt"], "antwort": row["completion"]} for row in ROWS]
    mapped = prepared(
        tmp_path, rows, chat_template="chatml", keys={"prompt": "frage", "completion": "antwort"}
    )
    asked = prepared(
        tmp_path, rows, chat_template="chatml", keys={"question": "frage", "answer": "antwort"}
    )
    plain = prepared(tmp_path, chat_template="chatml")
    assert mapped.dir != asked.dir
    assert (mapped.chat_rows, asked.chat_rows) == ("prompt and completion", "question and answer")
    assert mapped.train_learnt == asked.train_learnt == plain.train_learnt
    assert mapped.unigram_entropy == plain.unigram_entropy


def test_a_named_template_is_kept_with_the_data(tmp_path: Path) -> None:
    facts = prepared(tmp_path, chat_template="chatml")
    assert "<|im_start|>" in (Path(facts.dir) / "chat_template.jinja").read_text()
    other = prepared(tmp_path, chat_template="alpaca")
    every = prepared(tmp_path, chat_template="alpaca", loss_on="all")
    assert len({facts.dir, other.dir, every.dir}) == 3
    assert every.train_learnt == every.train_tokens


def test_a_template_of_ones_own_is_a_file_known_by_its_content(tmp_path: Path) -> None:
    file, copied = tmp_path / "mine.jinja", tmp_path / "copied.jinja"
    for each in (file, copied):
        each.write_text(CHAT_TEMPLATES["alpaca"].replace("Response", "Antwort"))
    of_file = prepared(tmp_path, chat_template=str(file))
    assert "### Antwort" in (Path(of_file.dir) / "chat_template.jinja").read_text()
    assert prepared(tmp_path, chat_template=str(copied)).dir == of_file.dir
    file.write_text(CHAT_TEMPLATES["alpaca"])
    assert prepared(tmp_path, chat_template=str(file)).dir != of_file.dir
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(
        RequestError, match=r"mine\.jinja cannot be read: .* Save it as text in UTF-8"
    ):
        prepared(tmp_path, chat_template=str(file))


def test_a_tokenizer_without_a_template_is_told_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"has no chat template.*Set data\.chat_template"):
        prepared(tmp_path)


def test_a_share_that_cannot_be_right_is_refused_and_can_be_allowed(tmp_path: Path) -> None:
    rows = [
        {"prompt": " ".join(str(7919**3 * (n + word)) for word in range(300)), "completion": "b"}
        for n in range(40)
    ]
    with pytest.raises(RequestError, match=r"answers are 0\.\d+% of the tokens .*widen data\.loss"):
        prepared(tmp_path, rows, chat_template="alpaca")
    facts = prepared(tmp_path, rows, chat_template="alpaca", loss_share=(0.0, 0.5))
    assert facts.train_learnt is not None and facts.train_learnt > 0


def test_a_wrong_row_is_told_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"x\.jsonl:1: the row is of no known shape"):
        prepared(tmp_path, [{"text": "a"}], chat_template="alpaca")
    rows = [*ROWS, {"messages": [{"role": "tool", "content": "a"}, *_answer()]}]
    with pytest.raises(SourceError, match=r"x\.jsonl:41: the chat template does not render .*mess"):
        prepared(tmp_path, rows, chat_template="alpaca")


def _answer() -> list[dict[str, str]]:
    return [{"role": "assistant", "content": "b"}]


def test_dialogues_that_the_template_rejects_are_counted_and_left_out_if_asked(
    tmp_path: Path,
) -> None:
    files = files_of(STOCK["qwen2.5"])
    template = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "[{{ m.role }}] {{ m.content }}<|im_end|>{% endfor %}"
    )
    tokenizer = write({**files, "chat_template.jinja": template.encode()}, tmp_path / "tokenizer")
    asked = [{"role": "user", "content": "Hi"}]
    answer = [{"role": "assistant", "content": "Hello, what is it?"}]
    wrong = {"messages": asked + asked + answer}
    rows = [{"messages": [*asked, {**answer[0], "content": f"Hi {n}"}]} for n in range(38)]
    rows[3:3], rows[20:20] = [wrong], [wrong]
    message = (
        r"x\.jsonl:4: the chat template does not render this dialogue: roles must alternate\. The "
        r"chat template rejects 2 of 40 dialogues \(5\.00%\), and data\.max_rejected is 0\. To "
        r"leave them out, set data\.max_rejected=0\.05; else"
    )
    with pytest.raises(SourceError, match=message):
        prepared(tmp_path, rows, tokenizer=str(tokenizer))
    facts = prepared(tmp_path, rows, tokenizer=str(tokenizer), max_rejected=0.05)
    assert facts.train_documents + facts.eval_documents == 38
    assert split_lines(facts) == ["left out: 2 of 40 dialogues, which the chat template rejects"]
    with pytest.raises(SourceError, match=r"rejects 2 of 40 dialogues"):  # prepared by now
        prepared(tmp_path, rows, tokenizer=str(tokenizer))
    with pytest.raises(SourceError, match=r"rejects 1 of 1 dialogues.*Choose another template"):
        prepared(tmp_path, [wrong], tokenizer=str(tokenizer), max_rejected=1)
