"""The padding token of exported classifiers, by which transformers finds a sample's last token."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from shardyard.checkpoint.export_files import _padding

IDS = {"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3, "an": 4, "answer": 5}


def _write_tokenizer(folder: Path, sample: str, **further: str) -> None:
    tokenizer = Tokenizer(models.WordLevel(IDS, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [("<s>", 1), ("</s>", 2)]
    tokenizer.post_processor = processors.TemplateProcessing(single=sample, special_tokens=ends)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", **further
    ).save_pretrained(folder)


@pytest.mark.parametrize(("sample", "padding"), [("<s> $A", "</s>"), ("<s> $A </s>", "<s>")])
def test_padding_is_not_the_token_that_ends_a_sample(
    sample: str, padding: str, tmp_path: Path
) -> None:
    _write_tokenizer(tmp_path, sample)
    assert _padding(tmp_path, {}) == {"pad_token_id": IDS[padding]}
    assert _padding(tmp_path, {"pad_token_id": 3}) == {}


@pytest.mark.parametrize(
    ("end", "padding"),
    [("</s>", "<s>"), ("</s> a", "</s>"), ("", "<s>")],
    ids=["the end token", "text behind it", "no token"],
)
def test_padding_is_not_the_token_that_ends_a_dialogue(
    end: str, padding: str, tmp_path: Path
) -> None:
    """Also where the model's own padding is that token, which many chat models have."""
    template = f"{{% for m in messages %}}{{{{ m.content }}}} {end}{{% endfor %}}"
    _write_tokenizer(tmp_path, "<s> $A", chat_template=template, pad_token="</s>")
    found = _padding(tmp_path, {"pad_token_id": 2}, of_dialogues=True)
    assert found.get("pad_token_id", 2) == IDS[padding]
    assert AutoTokenizer.from_pretrained(tmp_path).pad_token == padding
