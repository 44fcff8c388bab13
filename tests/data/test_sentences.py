"""Where sentences end, and that a text of any form is cut in time that grows with it."""

import json
import time
from pathlib import Path

import pytest

from shardyard.config.load import load_recipe
from shardyard.data.prepare import prepare
from shardyard.data.sentence_pairs import BEGINS, NO_SENTENCE, SENTENCE, WITHIN, split_sentences
from shardyard.data.shards import TokenShards


@pytest.mark.parametrize(
    "text",
    [
        "It is late.| Then he left.",
        'He said: "It is late."| Then he left... and came back.| "Why?" she asked.',
        "Mr. Smith met J. R. R. Tolkien, e.g. in No. 5 (see Fig. 3).| He left.",
        "This line\ngoes on (really!) here.| What?!| Yes.",
        "A title|\n\nA text.| More",
        "Things:|\n- one|\n- two.| More|\n  2. Then 3.5 of foo.bar runs.",
        "東京は日本の首都です。|「はい。」|そうです。",
        "यह है।| वह है।| هل هذا؟| نعم.",
        "Das gilt z. B. hier, bzw. dort.| Ende.",
        "No end",
        "   \n ",
        "",
    ],
)
def test_a_text_is_cut_behind_its_sentences(text: str) -> None:
    expected = [part for part in text.split("|") if part]
    assert list(split_sentences(text.replace("|", ""))) == expected


@pytest.mark.heavy
@pytest.mark.parametrize("part", [".", ".)", "a.", "\n", " ", "a. ", "\n ", '."', "1.\n", "- "])
def test_a_text_of_any_form_is_cut_in_time_that_grows_with_it(part: str) -> None:
    seconds = {}
    for times in (20_000, 160_000):
        text = part * times
        began = time.process_time()
        assert "".join(split_sentences(text)) == text
        seconds[times] = time.process_time() - began
    assert seconds[160_000] < 24 * seconds[20_000] + 0.5  # 8 times the length


def test_prepared_data_say_of_each_token_whether_a_sentence_begins(tmp_path: Path) -> None:
    texts = ("The cat sat. The mat lay! ", "A dog ran.\n\nIt barked", " ")
    lines = [json.dumps({"text": text}) for text in texts]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    recipe = load_recipe(
        overrides=[
            "model.preset=bert-tiny",
            f"data.source={tmp_path}/a.jsonl",
            f"data.dir={tmp_path}/prepared",
            "data.format=sentences",
            "data.tokenizer_kind=wordpiece",
            "data.vocab_size=300",
            "data.eval_fraction=0",
            "data.workers=1",
        ]
    )
    facts = prepare(recipe, model_dir=None, progress=lambda *_: None)
    shards = TokenShards(Path(facts.dir), "train")
    marks = shards.read(0, shards.num_tokens, SENTENCE)
    begins = (marks == BEGINS).sum()
    assert begins == 4
    for start in shards.document_starts:
        assert marks[start] == NO_SENTENCE  # [CLS]
    assert (marks == NO_SENTENCE).sum() == 2 * 3  # and [SEP], of three documents
    assert set(marks.tolist()) == {WITHIN, BEGINS, NO_SENTENCE}
