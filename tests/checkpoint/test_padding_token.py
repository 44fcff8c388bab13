"""The padding token of exported classifiers, by which transformers finds a sample's last token."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from shardyard.checkpoint.export_files import _padding


@pytest.mark.parametrize(("sample", "padding"), [("<s> $A", "</s>"), ("<s> $A </s>", "<s>")])
def test_padding_is_not_the_token_that_ends_a_sample(
    sample: str, padding: str, tmp_path: Path
) -> None:
    ids = {"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [("<s>", 1), ("</s>", 2)]
    tokenizer.post_processor = processors.TemplateProcessing(single=sample, special_tokens=ends)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(tmp_path)
    assert _padding(tmp_path, {}) == {"pad_token_id": ids[padding]}
    assert _padding(tmp_path, {"pad_token_id": 3}) == {}
