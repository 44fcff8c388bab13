"""Tiny models to chat with: random weights, a byte-level tokenizer, with or without a template."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from shardyard.config.data_choices import CHAT_TEMPLATES
from shardyard.data.tokenizer import train_bpe

START, END = "<|im_start|>", "<|im_end|>"
_TEXT = ["Who are you? I am a model. Where do you live? In a tree, with the other models."] * 4


def write_llama(
    folder: Path, *, template: str | None = CHAT_TEMPLATES["chatml"], context: int = 128
) -> Path:
    """A Llama with chatml's markers as special tokens; its eos is another token."""
    rows = _write_tokenizer(folder, template)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(
        vocab_size=rows, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3,
        max_position_embeddings=context, eos_token_id=0, bos_token_id=None, **sizes,
    )  # fmt: skip
    return _save(LlamaForCausalLM, config, folder)


def write_gpt2(folder: Path) -> Path:
    """A GPT-2 without a template."""
    rows = _write_tokenizer(folder, None)
    config = GPT2Config(
        vocab_size=rows, n_positions=128, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3,
        eos_token_id=0, bos_token_id=0,
    )  # fmt: skip
    return _save(GPT2LMHeadModel, config, folder)


def _save(kind: Any, config: Any, folder: Path) -> Path:
    torch.manual_seed(0)
    model = kind(config)
    model.save_pretrained(folder)
    return folder


def _write_tokenizer(folder: Path, template: str | None) -> int:
    folder.mkdir(parents=True)
    for name, content in train_bpe(iter(_TEXT), vocab_size=300).items():
        (folder / name).write_bytes(content)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([START, END])
    tokenizer.save(str(folder / "tokenizer.json"))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return int(tokenizer.get_vocab_size())
