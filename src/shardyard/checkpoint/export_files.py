"""Exported files other than weights: config, tokenizer, chat template, end tokens.

A model that came from a Hugging Face folder gets that folder's files. In config.json, only what
training changed is new: a chat model keeps its template and the tokens at which it stops. Files
of known kinds are copied from the source; code is not, as it would run when the export is opened.
"""

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig

from shardyard.config.model.source import model_folder
from shardyard.config.model.vocabulary import difference_of, vocabulary_in
from shardyard.config.resolved import Resolved
from shardyard.config.tasks import task_row
from shardyard.errors import JsonFileError, RequestError, ShardyardError
from shardyard.families.shape import ModelShape
from shardyard.io.digests import COMPLETE
from shardyard.io.files import read_json_object
from shardyard.models.build import build_on_meta, hf_config, label_fields

CONFIG, GENERATION = "config.json", "generation_config.json"

_TOKENIZER, _TEMPLATE = "tokenizer.json", "chat_template.jinja"
_OF_TOKENIZER = (
    _TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "chat_template.json", "vocab.json", "vocab.txt", "merges.txt",
    "tokenizer.model", "spiece.model",
)  # fmt: skip
"""Files that say how text becomes tokens, or messages text."""
_TEMPLATES = "additional_chat_templates"
"""Folder of further templates. Source: ``CHAT_TEMPLATE_DIR`` of transformers 5.23."""

_TAKEN = (".json", ".jinja", ".txt", ".model", ".md", ".tiktoken")
_TAKEN_NAMES = ("LICENSE", "NOTICE", "USE_POLICY")
_OF_WEIGHTS = ("adapter_config.json", "quantize_config.json", "quant_config.json")
"""They describe other weights than those written; transformers would look for these."""

_ENDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True, kw_only=True)
class ExportFiles:
    """Sources of the files next to the weights; finding them writes no files."""

    copied: dict[str, Path]
    """Name in the export -> file."""
    config: Mapping[str, Any] | None
    """Content of the source's config.json; None: it is made from the shape."""
    has_own_tokenizer: bool
    """Whether the model was trained with the source's tokenizer, so the source's ids are valid."""
    warnings: tuple[str, ...]
    same_ends: tuple[str, ...] = ()
    """Keys of config.json whose tokens are those of the source, although tokens were added."""
    rates_dialogues: bool = False
    """Whether the model gives dialogues a reward, by their last token."""

    @property
    def has_tokenizer(self) -> bool:
        return _TOKENIZER in self.copied

    @property
    def tokenizer_files(self) -> dict[str, Path]:
        """Files of ``copied`` that define how text becomes tokens, or messages become text."""
        return {name: path for name, path in self.copied.items() if _is_of_tokenizer(name)}


def find_export_files(resolved: Resolved) -> ExportFiles:
    """Look for the files that belong to a run's model.

    Raises:
        RequestError: The source's config.json is no JSON object.
    """
    data = _tokenizer_files(Path(resolved.data.dir))
    rates_dialogues = task_row(resolved.recipe.task.name).gives_reward
    source, warnings = _source(resolved)
    if source is None:
        return ExportFiles(
            copied=data, config=None, has_own_tokenizer=False,
            warnings=(*warnings, *_without_tokenizer(data, resolved)),
            rates_dialogues=rates_dialogues,
        )  # fmt: skip
    is_own = _is_own_tokenizer(resolved, source, data)
    taken, left_out = _taken(source)
    if _TEMPLATE in data and resolved.recipe.data.chat_template != "auto":
        taken[_TEMPLATE] = data[_TEMPLATE]  # what it has learnt its answers by
    has_more = not is_own and _has_added_tokens(source, Path(resolved.data.dir))
    if not is_own:
        kept = {name for name in taken if has_more and name.startswith(_TEMPLATES)}
        taken = {
            name: path for name, path in taken.items() if name in kept or not _is_of_tokenizer(name)
        } | data
    config = _read(source / CONFIG)
    if left_out:
        warnings += (
            f"of {source} these were not taken, being weights, code or of a kind that is not "
            f"known: {', '.join(left_out)}. Copy what you need yourself.",
        )
    return ExportFiles(
        copied=taken, config=config, has_own_tokenizer=is_own,
        warnings=(*warnings, *_without_tokenizer(taken, resolved)),
        same_ends=_same_ends(source, Path(resolved.data.dir)) if has_more else (),
        rates_dialogues=rates_dialogues,
    )  # fmt: skip


def write_export_files(
    files: ExportFiles, folder: Path, *, shape: ModelShape, dtype: torch.dtype
) -> None:
    """Write everything but the weights.

    Raises:
        OSError: A file cannot be written.
    """
    copy_files(files.copied, folder)
    _name_no_code(folder / name for name in files.copied if name.endswith(".json"))
    ends = {}
    if files.has_tokenizer and not files.has_own_tokenizer:
        # The source's ids are other tokens here, and generated text would not stop at its end.
        tokenizer = AutoTokenizer.from_pretrained(folder)
        changed = [name for name in _ENDS if name not in files.same_ends]
        ends = {name: getattr(tokenizer, name) for name in changed}
    if files.has_tokenizer and shape.is_causal and shape.label_head == "samples":
        ends |= _padding(folder, files.config, of_dialogues=files.rates_dialogues)
    architecture = type(build_on_meta(shape)).__name__
    if files.config is None:
        config = hf_config(shape)
        config.architectures = [architecture]
        config.dtype = dtype
        config.update(ends)
        config.save_pretrained(folder)
    else:
        ends_and_rows = {**ends, "vocab_size": shape.vocab_size, **label_fields(shape)}
        content = changed_config(
            files.config, architecture=architecture, dtype=dtype, ends=ends_and_rows
        )
        _write(folder / CONFIG, content)
    if (folder / GENERATION).exists():
        _write(folder / GENERATION, {**_read(folder / GENERATION), **ends})
    elif ends and shape.is_causal and shape.label_head is None:
        GenerationConfig(**ends).save_pretrained(folder)


def _padding(
    folder: Path, config: Mapping[str, Any] | None, *, of_dialogues: bool = False
) -> dict[str, Any]:
    """Return the token that pads, by which transformers finds the last token of a sample.

    Without one in config.json it rejects batches. It must not be the token that ends a sample.

    Args:
        of_dialogues: Samples are dialogues of the chat template. If their last token is the one
            that pads, as in many models, another one replaces it.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    ends = _dialogue_ends(tokenizer) if of_dialogues else []
    if tokenizer.pad_token_id is None or tokenizer.pad_token in ends:
        last = ends or tokenizer.convert_ids_to_tokens(tokenizer("a").input_ids[-1:])
        named = (tokenizer.eos_token, tokenizer.bos_token, tokenizer.unk_token)
        tokenizer.pad_token = next((each for each in named if each and each not in last), None)
        tokenizer.save_pretrained(folder)
    known = None if config is None else config.get("pad_token_id")
    is_end = known is not None and tokenizer.convert_ids_to_tokens(known) in ends
    if is_end or (known is None and tokenizer.pad_token_id is not None):
        return {"pad_token_id": tokenizer.pad_token_id}
    return {}


def _dialogue_ends(tokenizer: Any) -> list[str]:
    """Return the tokens that a dialogue may end with.

    Where the template puts no token behind an answer, that is the token that ends a text.
    """
    answer = "an answer"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    behind = text.rpartition(answer)[2]
    special = [each.content for each in tokenizer.added_tokens_decoder.values() if each.special]
    is_open = not any(each in behind for each in special)
    return [*tokenizer.tokenize(text)[-1:], *([tokenizer.eos_token] if is_open else [])]


def _name_no_code(files: Iterable[Path]) -> None:
    """Leave out where a class is looked for in code, which is not taken and would be run."""
    for file in files:
        try:
            content = read_json_object(file)
        except JsonFileError:
            continue  # the program that opens the export reports it
        if "auto_map" in content:
            _write(file, {key: value for key, value in content.items() if key != "auto_map"})


def copy_files(files: Mapping[str, Path], folder: Path) -> None:
    """Copy files unchanged: all that a module of the user's own has next to weights.

    Raises:
        OSError: A file cannot be copied.
    """
    for name, path in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, folder / name)


def changed_config(
    source: Mapping[str, Any], *, architecture: str, dtype: torch.dtype, ends: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the source's config.json with only what training changed."""
    config = {key: value for key, value in source.items() if key != "auto_map"}  # names its code
    # transformers 5 calls it dtype. A folder that has the older key was made for older readers.
    config["torch_dtype" if "torch_dtype" in source else "dtype"] = str(dtype).removeprefix(
        "torch."
    )
    if architecture not in (source.get("architectures") or ()):
        config["architectures"] = [architecture]  # another head: only what was trained is written
    return {**config, **ends}


def _source(resolved: Resolved) -> tuple[Path | None, tuple[str, ...]]:
    """Folder that the model came from; None for a preset, and where it is gone."""
    asked = resolved.recipe.model
    if not (asked.path or asked.hub):
        return None, ()
    known = resolved.model_dir
    if known is not None and (Path(known) / CONFIG).is_file():
        return Path(known), ()
    try:  # the run was on other machines, or its weights were random
        folder = model_folder(asked, needs_weights=False, commit=resolved.model_commit)
    except ShardyardError:
        folder = None
    if folder is not None and (folder / CONFIG).is_file():
        return folder, ()
    return None, (
        f"{asked.path or asked.hub} is missing, so {CONFIG} in the export was written from the "
        f"recipe, and the model's other files ({GENERATION}, ...) are not in it. Bring it back "
        "and export once more, or copy them yourself.",
    )


def _is_own_tokenizer(resolved: Resolved, source: Path, data: Mapping[str, Path]) -> bool:
    own = source / _TOKENIZER
    if not own.is_file():
        return False
    if _TOKENIZER in data:
        return own.read_bytes() == data[_TOKENIZER].read_bytes()
    asked = resolved.recipe
    return asked.data.tokenizer in (asked.model.path, asked.model.hub, str(source))


def _has_added_tokens(source: Path, data_dir: Path) -> bool:
    """Whether a dataset's tokenizer is the source's, with tokens that were added."""
    own, given = vocabulary_in(source), vocabulary_in(data_dir)
    return own is not None and given is not None and not difference_of(own, given)


def _same_ends(*folders: Path) -> tuple[str, ...]:
    """Return the keys of config.json whose tokens the tokenizers of both folders name alike."""
    declared = []
    for folder in folders:
        found: dict[str, Any] = {}
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            found |= _read(folder / name) if (folder / name).is_file() else {}
        declared.append(found)
    one, other = ({name: _token(each, name) for name in _ENDS} for each in declared)
    return tuple(name for name in _ENDS if one[name] == other[name])


def _token(declared: Mapping[str, Any], key: str) -> Any:
    token = declared.get(key.removesuffix("_id"))
    return token.get("content") if isinstance(token, dict) else token


def _tokenizer_files(folder: Path) -> dict[str, Path]:
    """Return the tokenizer files of a prepared dataset; empty without the tokenizer itself."""
    if not (folder / _TOKENIZER).is_file():
        return {}
    return {name: folder / name for name in _OF_TOKENIZER if (folder / name).is_file()}


def _taken(source: Path) -> tuple[dict[str, Path], list[str]]:
    """Files to copy, and the names of those that are left out."""
    taken, left_out = {}, []
    templates = sorted((source / _TEMPLATES).glob("*.jinja"))
    for path in [*sorted(source.iterdir()), *templates]:
        if not path.is_file() or path.name in (CONFIG, COMPLETE) or path.name.startswith("."):
            continue
        name = str(path.relative_to(source))
        is_kind = path.suffix in _TAKEN or path.stem.upper() in _TAKEN_NAMES
        is_of_weights = name.endswith(".index.json") or name in _OF_WEIGHTS
        if is_kind and not is_of_weights:
            taken[name] = path
        elif path.suffix != ".safetensors" and not name.endswith(".index.json"):
            left_out.append(name)
    return taken, left_out


def _is_of_tokenizer(name: str) -> bool:
    return name in _OF_TOKENIZER or name.startswith(_TEMPLATES) or name.endswith(".tiktoken")


def _without_tokenizer(files: Mapping[str, Path], resolved: Resolved) -> tuple[str, ...]:
    if _TOKENIZER in files:
        return ()
    return (
        f"{resolved.data.dir} holds no tokenizer any more, so the export has none. "
        "`shardyard prepare` makes it again; AutoModel opens the folder without it.",
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except JsonFileError as error:
        raise RequestError(f"{error} Fetch or save it again.") from error


def _write(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")
