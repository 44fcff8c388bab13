"""Folders of small tokenizers with a chat template, as those of models are."""

import json
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from shardyard.data.byte_ranges import TextSection
from shardyard.data.chat import Dialogue
from shardyard.data.conversations import dialogue_text
from shardyard.data.tokenizer import TextEncoder, TokenizerFiles
from shardyard.data.work_units import Encoded
from tests.data.chat.stock import STOCK, Stock

WORDS = ["What is two and two? It is four, and not five.\n\nUser: Assistant: <system> | [INST]"] * 3


@cache
def _without_special(is_sentencepiece: bool) -> str:
    if is_sentencepiece:
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=tokens, show_progress=False)
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=330, initial_alphabet=alphabet, show_progress=False
        )
    tokenizer.train_from_iterator(WORDS, trainer)
    content = json.loads(tokenizer.to_str())
    # of these only what a model declares is a token of its own
    content["added_tokens"] = []
    return json.dumps(content)


def files_of(stock: Stock) -> TokenizerFiles:
    """The files of a tokenizer with the tokens and the template of a stock one."""
    tokenizer = Tokenizer.from_str(_without_special(stock.is_sentencepiece))
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in stock.special]
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in stock.plain])
    if stock.bos is not None:  # as most do: a template that writes it too must not have it twice
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{stock.bos} $A", special_tokens=[(stock.bos, tokenizer.token_to_id(stock.bos))]
        )
    bos = {"__type": "AddedToken", "content": stock.bos, "special": True}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": stock.eos,
        **({} if stock.bos is None else {"bos_token": bos}),
        "chat_template": stock.template,
    }
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }


@cache
def encoder_of(name: str, loss_on: str = "answers") -> Dialogue:
    """The encoder of dialogues of a stock template."""
    return Dialogue(TextEncoder(files_of(STOCK[name]), name=name), loss_on=loss_on)


def tokenizer_of(name: str) -> Tokenizer:
    return Tokenizer.from_str(files_of(STOCK[name])["tokenizer.json"].decode())


def encoded(name: str, row: object, loss_on: str = "answers") -> list[Encoded]:
    """What becomes of a row by a stock template."""
    section = TextSection(
        dialogue_text(row, "x.jsonl:1"), begins=True, ends=True, location="x.jsonl:1"
    )
    return encoder_of(name, loss_on).encode(section)


def write(files: TokenizerFiles, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder
