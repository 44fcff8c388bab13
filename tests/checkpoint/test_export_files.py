"""An export keeps what its source folder said, and changes only what training changed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from shardyard.checkpoint.export_files import (
    ExportFiles,
    changed_config,
    find_export_files,
    write_export_files,
)
from shardyard.config.model.source import read_shape
from shardyard.config.resolved import DatasetMetadata, Resolved
from shardyard.config.rules.custom_module import require_shape
from shardyard.config.schema.recipe import Recipe
from shardyard.errors import RequestError

CONFIG = {
    "_name_or_path": "somebody/chat",
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": [3, 4],
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 172,
    "max_position_embeddings": 256,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 64, "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
    "vocab_size": 96,
    "something_new": {"kept": ["as", "it", "is"]},
}  # fmt: skip
"""In the form of Llama 3.1's."""

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
WORDS = {"<s>": 1, "<end>": 3, "<eot>": 4, "hello": 5, "<user>": 6}


def write_tokenizer(folder: Path, words: dict[str, int], **config: Any) -> None:
    folder.mkdir(exist_ok=True)
    vocabulary = {f"t{number}": number for number in range(96)}
    taken = {number: word for word, number in words.items()}
    vocabulary = {taken.get(number, word): number for word, number in vocabulary.items()}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    tokenizer.add_special_tokens([word for word in words if word.startswith("<")])
    tokenizer.save(str(folder / "tokenizer.json"))
    content = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A chat model's folder, with code and weights of other kinds in it."""
    folder = tmp_path / "chat"
    write_tokenizer(folder, WORDS, bos_token="<s>", eos_token="<end>")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    ends = {"bos_token_id": 1, "eos_token_id": [3, 4], "temperature": 0.6, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("tools")
    for name in ("LICENSE", "model.safetensors", "model.safetensors.index.json", ".gitattributes"):
        (folder / name).write_text("{}")
    for name in ("modeling_chat.py", "pytorch_model.bin", "adapter_config.json"):
        (folder / name).write_text("{}")
    return folder


def resolved_of(source: Path, data_dir: Path, **model: Any) -> Resolved:
    recipe = Recipe.model_validate({
        "model": {"path": str(source), "weights": "load", **model},
        "data": {"tokenizer": str(source)},
    })  # fmt: skip
    return Resolved(
        recipe=recipe,
        reasons={},
        shape=read_shape(recipe.model, source, 96),
        data=DatasetMetadata(
            dir=str(data_dir), fingerprint="0", vocab_size=96, train_tokens=1, eval_tokens=1,
            train_documents=1, eval_documents=1, unigram_entropy=1.0,
        ),
        steps=2,
        model_dir=str(source),
    )  # fmt: skip


def exported(resolved: Resolved, to: Path) -> ExportFiles:
    to.mkdir()
    found = find_export_files(resolved)
    write_export_files(found, to, shape=require_shape(resolved.shape), dtype=torch.float32)
    return found


def test_a_chat_model_keeps_its_template_and_the_tokens_at_which_it_stops(
    source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    exported(resolved_of(source, tmp_path / "gone"), out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    talk = [{"role": "user", "content": "hello"}]
    assert tokenizer.apply_chat_template(talk, tokenize=False) == "<user>hello<end>"
    assert GenerationConfig.from_pretrained(out).eos_token_id == [3, 4]
    assert GenerationConfig.from_pretrained(out).temperature == 0.6
    assert (out / "additional_chat_templates" / "tools.jinja").read_text() == "tools"
    assert AutoConfig.from_pretrained(out).eos_token_id == [3, 4]


def test_the_config_is_that_of_the_source_but_for_the_format(source: Path, tmp_path: Path) -> None:
    exported(resolved_of(source, tmp_path / "gone"), tmp_path / "out")
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    assert content == {**CONFIG, "torch_dtype": "float32"}
    assert list(content) == list(CONFIG)


def test_weights_and_code_of_the_source_stay_behind_and_are_named(
    source: Path, tmp_path: Path
) -> None:
    found = exported(resolved_of(source, tmp_path / "gone"), tmp_path / "out")
    names = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*")}
    assert names == {
        "LICENSE", "additional_chat_templates", "additional_chat_templates/tools.jinja",
        "chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    (warning,) = found.warnings
    assert "adapter_config.json, modeling_chat.py, pytorch_model.bin" in warning
    assert "Copy what you need yourself" in warning


def test_code_that_was_left_behind_is_not_named_in_the_config() -> None:
    config = changed_config(
        {"auto_map": {"AutoModel": "modeling_chat.Chat"}, "architectures": ["BertForPreTraining"]},
        architecture="BertForMaskedLM",
        dtype=torch.bfloat16,
        ends={},
    )
    assert config == {"architectures": ["BertForMaskedLM"], "dtype": "bfloat16"}


def test_no_file_beside_the_weights_names_code(source: Path, tmp_path: Path) -> None:
    path = source / "tokenizer_config.json"
    known = json.loads(path.read_text())
    path.write_text(json.dumps({**known, "auto_map": {"AutoTokenizer": ["mine.Tokenizer", None]}}))
    exported(resolved_of(source, tmp_path / "gone"), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text()) == known


def test_another_tokenizer_than_the_sources_brings_its_own_ends_and_no_foreign_template(
    source: Path, tmp_path: Path
) -> None:
    write_tokenizer(tmp_path / "data", {"<stop>": 90}, eos_token="<stop>")
    out = tmp_path / "out"
    exported(resolved_of(source, tmp_path / "data"), out)
    assert AutoTokenizer.from_pretrained(out).eos_token_id == 90
    assert not (out / "chat_template.jinja").exists()
    assert not (out / "additional_chat_templates").exists()
    for name in ("config.json", "generation_config.json"):
        content = json.loads((out / name).read_text())
        assert (content["eos_token_id"], content["bos_token_id"]) == (90, None), name


@pytest.mark.parametrize(("end", "ends"), [("<end>", [3, 4]), ("<tool>", 96)])
def test_a_tokenizer_with_added_tokens_keeps_the_ids_of_the_source(
    source: Path, tmp_path: Path, end: str, ends: Any
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.add_tokens(["<tool>"], special_tokens=True)
    tokenizer.eos_token = end
    tokenizer.save_pretrained(tmp_path / "data")
    resolved = resolved_of(source, tmp_path / "data")
    shape = replace(require_shape(resolved.shape), vocab_size=97)
    out = tmp_path / "out"
    exported(replace(resolved, shape=shape), out)
    content = json.loads((out / "config.json").read_text())
    assert content == {
        **CONFIG, "torch_dtype": "float32", "vocab_size": 97, "eos_token_id": ends,
    }  # fmt: skip
    assert GenerationConfig.from_pretrained(out).eos_token_id == ends
    assert AutoTokenizer.from_pretrained(out).convert_tokens_to_ids("<tool>") == 96
    assert (out / "additional_chat_templates" / "tools.jinja").exists()


def test_a_preset_gets_a_generation_config_with_its_end_token(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "data", {"<stop>": 90}, eos_token="<stop>")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    of_folder = resolved_of(tmp_path, tmp_path / "data")
    preset = {"model": {"preset": "llama-tiny"}}
    resolved = replace(of_folder, recipe=Recipe.model_validate(preset), model_dir=None)
    assert exported(resolved, tmp_path / "out").warnings == ()
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == 90


def test_a_source_that_is_gone_is_told_and_one_that_the_recipe_names_is_found(
    source: Path, tmp_path: Path
) -> None:
    write_tokenizer(tmp_path / "data", {"<stop>": 90}, eos_token="<stop>")
    resolved = replace(resolved_of(source, tmp_path / "data"), model_dir="/on/another/machine")
    assert exported(resolved, tmp_path / "out").config == CONFIG
    source.rename(tmp_path / "moved")
    (warning,) = exported(resolved, tmp_path / "again").warnings
    assert f"{source} is missing" in warning and "Bring it back" in warning
    assert GenerationConfig.from_pretrained(tmp_path / "again").eos_token_id == 90


def test_a_damaged_config_of_the_source_is_a_wrong_request(source: Path, tmp_path: Path) -> None:
    resolved = resolved_of(source, tmp_path / "gone")
    for text in ("{", "[]"):
        (source / "config.json").write_text(text)
        with pytest.raises(RequestError, match=r"config\.json .*Fetch or save it again"):
            find_export_files(resolved)
