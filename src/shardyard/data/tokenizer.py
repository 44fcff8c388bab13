"""The tokenizer of a data set: found in a folder or on the hub, or trained on the corpus.

A tokenizer is handled as the bytes of its files, named as transformers names them; the prepared
data set keeps a copy, from which an export takes them. Only tokenizer.json is ever interpreted: no
pickle, no code from a hub.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from shardyard.config.data_choices import CHAT_TEMPLATES, is_template_file
from shardyard.config.tokenizer_kinds import TOKENIZER_KINDS
from shardyard.data.wordpiece import from_vocabulary, train_wordpiece
from shardyard.errors import DataError, RequestError, StorageError
from shardyard.file_faults import broken_link_error, content_error
from shardyard.io.files import parse_json, read_user_file

if TYPE_CHECKING:
    from shardyard.config.schema.data import Data, TokenizerKindName

TokenizerFiles = dict[str, bytes]
"""File name -> content; holds at least tokenizer.json and tokenizer_config.json."""

END_OF_TEXT = "<|endoftext|>"
_MAIN_FILE = "tokenizer.json"
_CONFIG_FILE = "tokenizer_config.json"
_MAP_FILE = "special_tokens_map.json"
_SIDE_FILES = (_CONFIG_FILE, _MAP_FILE, "chat_template.jinja")
_VOCABULARY = "vocab.txt"
"""Vocabulary file of BERT's WordPiece; older folders have only this."""
_SLOW_FILES = ("tokenizer.model", "vocab.json", "spiece.model")
_USUAL_END_TOKENS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
_PART_CHARACTERS = 2**20
_BEHIND_A_WORD = re.compile(r"(?<=\S)\s")
_LONGEST_WORD_BYTES = 512
"""Words above this (DNA, base64, a line of spaces) are learnt from in parts."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(@[\w./-]+)?")


class TextEncoder:
    """Turns text into token ids."""

    def __init__(self, files: TokenizerFiles, *, name: str) -> None:
        """Open a tokenizer.

        Args:
            name: What messages call it.

        Raises:
            DataError: tokenizer.json cannot be read.
            RequestError: The tokenizer has no end-of-text token.
        """
        try:
            self._tokenizer, vocabulary = _parse_tokenizer(files[_MAIN_FILE])
        except Exception as error:  # the Rust library raises plain Exception
            raise DataError(
                f"{name}: {_MAIN_FILE} is not a tokenizer that the tokenizers library can read "
                f"({error}). Fetch or save it again."
            ) from error
        self.vocab_size = max(vocabulary.values()) + 1
        self.end_token = _end_token(files, vocabulary, name)
        self.end_of_text_id = vocabulary[self.end_token]
        self.files = files
        self.name = name
        self._vocabulary = vocabulary

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without any special token."""
        ids: list[int] = []
        for part in _parts(text):
            # Without offsets into the text, which the usual call counts: 8 to 29 % of the time.
            (encoding,) = self._tokenizer.encode_batch_fast([part], add_special_tokens=False)
            ids += encoding.ids
        return ids

    def id_of(self, token: str) -> int:
        """Id of a token of the vocabulary."""
        return self._vocabulary[token]

    def leading_tokens(self) -> list[str]:
        """Special tokens that the tokenizer itself puts before a text."""
        encoding = self._tokenizer.encode("a", add_special_tokens=True)
        marks: list[int] = encoding.special_tokens_mask
        tokens: list[str] = encoding.tokens
        return tokens[: marks.index(0)] if 0 in marks else []

    def declared(self, key: str, files: TokenizerFiles, name: str) -> str | None:
        """A special token of the vocabulary by the key of its role, from the side files."""
        return _declared_token(key, files, self._vocabulary, name)


@lru_cache(maxsize=1)
def _parse_tokenizer(content: bytes) -> tuple[Tokenizer, dict[str, int]]:
    """A tokenizer and its vocabulary. Parsing 32,000 entries takes a tenth of a second, and each
    stage of preparing a set opens the same one."""
    tokenizer = Tokenizer.from_str(content.decode())
    # Text that spells a special token must not become one and forge the end of a document.
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer, tokenizer.get_vocab(with_added_tokens=True)


def _parts(text: str) -> Iterator[str]:
    """A text in parts of about ``_PART_CHARACTERS``: encoding takes 200 times a text's memory.

    They begin with a space or line end behind a word: no token reaches from one into the next.
    """
    start = 0
    while len(text) - start > 2 * _PART_CHARACTERS:
        wanted = start + _PART_CHARACTERS
        space = _BEHIND_A_WORD.search(text, wanted, wanted + _PART_CHARACTERS)
        stop = wanted if space is None else space.start()
        yield text[start:stop]
        start = stop
    yield text[start:]


def choose_bos(
    setting: bool | Literal["auto"],
    tokenizer: TokenizerFiles | None,
    kind: "TokenizerKindName" = "bpe",
    *,
    name: str,
) -> str | None:
    """Return the token that begins each document, by ``data.bos``; None: none does.

    auto: the token that the tokenizer puts before a text, as then its model's own data began
    so. Its tokenizer.json says which; transformers 5 uses only that. A byte-level BPE trained
    here puts none: the end of the preceding document is there already, as for GPT-2.

    Args:
        tokenizer: None: one of this kind is trained on the corpus.
        name: The tokenizer's name in messages.

    Raises:
        RequestError: The setting needs one, and the tokenizer has none, or more than one.
    """
    if setting is False:
        return None
    if tokenizer is None and (setting == "auto" or TOKENIZER_KINDS[kind].begin is not None):
        return TOKENIZER_KINDS[kind].begin
    if tokenizer is None:
        raise RequestError(
            "data.bos=true, but a tokenizer that is trained here has no token to begin with: a "
            f"document follows the {END_OF_TEXT} of the one before. Leave data.bos out, or name a "
            "tokenizer that has one with data.tokenizer."
        )
    encoder = TextEncoder(tokenizer, name=name)
    leading = encoder.leading_tokens()
    if len(leading) > 1:
        raise RequestError(
            f"data.bos={_yaml(setting)}: {name} puts {len(leading)} tokens before a text "
            f"({' '.join(leading)}), and documents begin with one here. Set data.bos=false."
        )
    declared = encoder.declared("bos_token", tokenizer, name) if setting is True else None
    token = leading[0] if leading else declared
    if token is None and setting is True:
        raise RequestError(
            f"data.bos=true, but {name} puts no token before a text, and {_CONFIG_FILE} names no "
            "bos_token of its vocabulary. Set data.bos=false, or take the model's own tokenizer."
        )
    return token


def _yaml(setting: bool | str) -> str:
    return str(setting).lower()


def _end_token(files: TokenizerFiles, vocabulary: dict[str, int], name: str) -> str:
    """The end token that the tokenizer's own files declare, else one of the usual names."""
    declared = _declared_token("eos_token", files, vocabulary, name)
    if declared is not None:
        return declared
    for token in _USUAL_END_TOKENS:
        if token in vocabulary:
            return token
    raise RequestError(
        f"data.tokenizer: {name} has no end-of-text token: {_CONFIG_FILE} names no eos_token and "
        f"its vocabulary has none of {', '.join(_USUAL_END_TOKENS)}. Documents could not be "
        "separated. Add eos_token to its tokenizer_config.json, or set data.tokenizer=train."
    )


def _declared_token(
    key: str, files: TokenizerFiles, vocabulary: dict[str, int], name: str
) -> str | None:
    for side_file in (_MAP_FILE, _CONFIG_FILE):
        if side_file in files:
            declared = _json_object(files[side_file], f"{name}/{side_file}").get(key)
            token = declared.get("content") if isinstance(declared, dict) else declared
            if isinstance(token, str) and token in vocabulary:
                return token
    return None


def _json_object(content: bytes, location: str) -> dict[str, Any]:
    try:
        parsed = parse_json(content)
    except ValueError as error:
        raise DataError(f"{location} is not JSON ({error}). Fetch or save it again.") from error
    return parsed if isinstance(parsed, dict) else {}


def find_tokenizer(
    setting: str, model_dir: Path | None, *, store: Path | None = None
) -> TokenizerFiles | None:
    """Files of the tokenizer that ``data.tokenizer`` asks for; None: one is to be trained.

    Args:
        model_dir: Folder of the model's own files, if it has any; only ``auto`` looks there.
        store: Where one of the hub is kept (model.dir); None: this machine's Hugging Face cache.

    Raises:
        RequestError: There is no such tokenizer, or none in a form that can be read.
        AccessError: The hub refuses access.
        CapacityError: The hub cannot be reached.
    """
    if setting == "train":
        return None
    if setting == "auto":
        return None if model_dir is None else _read_folder(model_dir, is_required=False)
    path = Path(setting).expanduser()
    if path.is_dir():
        return _read_folder(path, is_required=True)
    if path.is_file() and path.name in (_MAIN_FILE, _VOCABULARY):
        return _read_folder(path.parent, is_required=True)
    if path.exists() or not _HUB_NAME.fullmatch(setting):
        raise RequestError(
            f"data.tokenizer={setting!r} is neither a tokenizer folder nor a hub name. Give a "
            f"folder that holds {_MAIN_FILE}, a hub name such as owner/name, or train."
        )
    return _fetch_from_hub(setting, store)


def _read_folder(folder: Path, *, is_required: bool) -> TokenizerFiles | None:
    main, vocabulary = folder / _MAIN_FILE, folder / _VOCABULARY
    for path in (main, vocabulary):
        link = broken_link_error(path)
        if link is not None:
            raise RequestError(f"data.tokenizer: {path} {link}")
    if not main.is_file() and vocabulary.is_file():
        return _from_vocabulary(vocabulary)
    if not main.is_file():
        slow = [name for name in _SLOW_FILES if (folder / name).is_file()]
        if not slow and not is_required:
            return None
        why = f"only {', '.join(slow)}, the older form" if slow else f"no {_MAIN_FILE}"
        raise RequestError(
            f"data.tokenizer: {folder} holds {why}. Save it once with transformers "
            f"(AutoTokenizer.from_pretrained(...).save_pretrained(...)) to get {_MAIN_FILE}, "
            "or set data.tokenizer=train."
        )
    return _with_config(_contents(main, *(folder / name for name in _SIDE_FILES)))


def _contents(*paths: Path) -> TokenizerFiles:
    """Return the contents of those files that exist.

    Raises:
        RequestError: One cannot be read, or is a pointer, a broken link or a web page.
        DataError: One is not JSON.
    """
    try:
        for path in paths:
            why = content_error(path, is_text=path.suffix not in (".json", ".txt"))
            if why is not None:
                raise RequestError(f"data.tokenizer: {path} {why}")
        contents = {path: path.read_bytes() for path in paths if path.is_file()}
    except OSError as error:
        raise RequestError(
            f"data.tokenizer: {error.filename} cannot be read: {error.strerror}. Check its "
            "permissions, or name another folder."
        ) from error
    for path, content in contents.items():
        if path.name in (_CONFIG_FILE, _MAP_FILE):
            _json_object(content, str(path))
    return {path.name: content for path, content in contents.items()}


def _from_vocabulary(path: Path) -> TokenizerFiles:
    files = _contents(path, path.parent / _CONFIG_FILE)
    config = _json_object(files.get(_CONFIG_FILE, b"{}"), f"{path.parent}/{_CONFIG_FILE}")
    try:
        return from_vocabulary(files[path.name], config, name=str(path))
    except ValueError as error:
        raise RequestError(
            f"data.tokenizer: {error}. Without a {_MAIN_FILE} next to it, {_VOCABULARY} has to be "
            f"BERT's. Save the tokenizer once with transformers to get {_MAIN_FILE}, or set "
            "data.tokenizer=train."
        ) from error


def _fetch_from_hub(setting: str, store: Path | None) -> TokenizerFiles:
    # Not above, nor the settings: a worker, which never fetches one, starts in half the time.
    from shardyard.config.model.hub import HubRequest, fetch

    name, _, revision = setting.partition("@")
    wanted = HubRequest(
        kind="data.tokenizer",
        name=name,
        revision=revision or None,
        level="tokenizer",
    )
    files = _read_folder(fetch(wanted, store, log=_log), is_required=True)
    assert files is not None
    return files


def _log(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def train_tokenizer(
    texts: Callable[[], Iterator[str]], *, kind: "TokenizerKindName", vocab_size: int
) -> TokenizerFiles:
    """Train a tokenizer of a kind on texts, which may be read more than once.

    The same texts give the same bytes, for any number of threads. A small corpus may give
    fewer entries than ``vocab_size``.
    """
    match kind:
        case "bpe":
            return train_bpe(texts(), vocab_size=vocab_size)
        case "wordpiece":
            return train_wordpiece(texts, vocab_size=vocab_size, lowercase=True)
        case "wordpiece-cased":
            return train_wordpiece(texts, vocab_size=vocab_size, lowercase=False)


def train_bpe(texts: Iterator[str], *, vocab_size: int) -> TokenizerFiles:
    """Train a byte-level BPE: any text has an encoding, and decoding gives it back exactly.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.2.
    """
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    # Training takes time with the square of a word's length. Encoding does not, so the tokenizer
    # itself knows no such limit, and is the same where no word is as long.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.FixedLength(length=_LONGEST_WORD_BYTES)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.pre_tokenizer = words
    special_tokens = _json_bytes({"eos_token": END_OF_TEXT})
    return _with_config(
        {
            _MAIN_FILE: tokenizer.to_str(pretty=True).encode(),
            "special_tokens_map.json": special_tokens,
        }
    )


def with_added_tokens(files: TokenizerFiles, data: "Data") -> TokenizerFiles:
    """Return the files with the tokens that a recipe adds; the same if it has all of them.

    Ids, and whether text that spells a token becomes it, are as in transformers' ``add_tokens``:
    a token that the vocabulary has keeps its id, others get the next ones.

    Raises:
        DataError: tokenizer.json cannot be read.
    """
    tokens = {
        **dict.fromkeys(data.add_tokens, False),
        **dict.fromkeys(data.add_special_tokens, True),
    }
    if not tokens:
        return files
    try:
        tokenizer = Tokenizer.from_str(files[_MAIN_FILE].decode())
    except Exception as error:  # the Rust library raises plain Exception
        raise DataError(
            f"{_MAIN_FILE} is not a tokenizer that the tokenizers library can read ({error}), so "
            "no tokens can be added to it. Fetch or save it again."
        ) from error
    there = {each.content: each.special for each in tokenizer.get_added_tokens_decoder().values()}
    if tokens.items() <= there.items():
        return files
    ordered = (*data.add_special_tokens, *data.add_tokens)
    tokenizer.add_tokens(
        [AddedToken(each, special=tokens[each], normalized=not tokens[each]) for each in ordered]
    )
    return {**files, _MAIN_FILE: tokenizer.to_str(pretty=True).encode()}


def _with_config(files: TokenizerFiles) -> TokenizerFiles:
    """Add the file from which transformers learns the class, where it is missing."""
    if _CONFIG_FILE in files:
        return files
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    if "special_tokens_map.json" in files:
        content = files["special_tokens_map.json"]
        config.update(_json_object(content, "special_tokens_map.json of data.tokenizer"))
    return {**files, _CONFIG_FILE: _json_bytes(config)}


def _json_bytes(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


_MOST_TEMPLATE_BYTES = 2**20
"""Largest file of a template."""


def template_source(name: str) -> str:
    """Return the known template of that name, or the content of the file.

    Args:
        name: ``data.chat_template``.

    Raises:
        RequestError: The file cannot be read, or is not UTF-8.
    """
    if not is_template_file(name):
        return CHAT_TEMPLATES[name]
    try:
        return read_user_file(Path(name), limit_bytes=_MOST_TEMPLATE_BYTES).decode()
    except (OSError, StorageError, UnicodeDecodeError) as error:
        raise RequestError(
            f"data.chat_template={name} cannot be read: {error}. Save it as text in UTF-8."
        ) from error
