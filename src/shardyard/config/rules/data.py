"""Check data settings: sources, dialogues, and texts that would break files or programs.

Texts become file names, lines of scripts, arguments, variables and YAML. What is rejected
here is rejected for all of them, so that no launcher needs a rule of its own.
"""

import difflib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shardyard.config.data_choices import (
    CHAT_KEYS,
    CHAT_TEMPLATES,
    DATA_FORMATS,
    PREFERENCE_KEYS,
    SLOTS,
    TURN_KEYS,
    is_template_file,
    slots_of,
)
from shardyard.config.paths import PATHS
from shardyard.config.schema.data import Data, Share
from shardyard.config.schema.recipe import Recipe
from shardyard.config.secrets import find_credential, show, without_secrets
from shardyard.config.sources import address_error, is_remote
from shardyard.config.tasks import BITS_PER_BYTE, TASKS, metrics_of, task_row
from shardyard.config.tokenizer_kinds import TOKENIZER_WORDS
from shardyard.errors import Problem

MAPPINGS = frozenset(
    {
        "launch.aws_batch.tags", "launch.env", "launch.kubernetes.annotations",
        "launch.kubernetes.labels", "launch.kubernetes.node_selector",
        "launch.kubernetes.side_node_selector",
        "launch.slurm.options", "data.eval_sets", "data.eval_tasks", "data.module_settings",
        "optim.module_settings",
        "run.origins", "run.tags", "secrets",
    }
)  # fmt: skip
"""Settings whose keys are the user's own names."""

_PROSE = re.compile(r"task\.prompts?|launch\.env(\..*)?|launch\.aws_batch\.user_data")
"""Texts that may have several lines; all others are names, paths and addresses."""

_PART_BYTES = 255
"""Most bytes of one name in a path: NAME_MAX of Linux's file systems."""

_WHOLE_BYTES = 4096 - 512
"""PATH_MAX of Linux, less what a run's own files add behind it. No other name is as long."""

_INSTEAD_OF_A_URL = {
    "data.tokenizer": "Give a folder that holds tokenizer.json, or a hub name such as owner/name.",
    "model.path": "Give a folder that holds config.json and weights; a repository of the Hugging "
    "Face hub is model.hub: owner/name.",
    "model.hub": "A repository of the Hugging Face hub is written owner/name.",
}
"""Settings that a URL is likely to be tried for -> what can be done today."""

_A_PATH = "Give a path, such as one where it is mounted."

_PLAIN = re.compile(r"[A-Za-z0-9_./-]{1,100}")
"""Names that may be part of the dotted name of a setting in a message."""


def check_strings(recipe: Recipe) -> Iterable[Problem]:
    """Every text that cannot be written, passed on or opened."""
    for setting, text in text_settings(recipe.model_dump()):
        why = _string_error(setting, text)
        if why:
            yield Problem(setting, f"={show(without_secrets(text))} {why}")


def text_settings(tree: Any, path: str = "") -> Iterable[tuple[str, str]]:
    """Every text with its dotted name: values, and the names that a user made."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            if path in MAPPINGS:
                yield path, key
                is_plain = _PLAIN.fullmatch(key) and not find_credential(key)
                yield from text_settings(value, f"{path}.{key}" if is_plain else path)
            else:
                yield from text_settings(value, f"{path}.{key}" if path else key)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from text_settings(value, path)
    elif isinstance(tree, str):
        yield path, tree


def path_error(text: str, instead: str = _A_PATH) -> str | None:
    """Why a text can be no path of this machine; None: it can be one.

    Args:
        instead: What to do now if it is a URL.
    """
    return (
        _encoding_error(text) or _line_error(text) or _url_error(text, instead) or _name_error(text)
    )


def _string_error(setting: str, text: str) -> str | None:
    if _PROSE.fullmatch(setting):
        return _encoding_error(text)
    above = setting.rpartition(".")[0]
    row = PATHS.get(above if above in MAPPINGS else setting)
    if setting in MAPPINGS:  # a name that a user made
        row = None
    if row is not None and row.may_be_address and is_remote(text):
        return _encoding_error(text) or _line_error(text) or address_error(text)
    if row is not None:
        return path_error(text, _INSTEAD_OF_A_URL.get(setting, _A_PATH))
    why = _encoding_error(text) or _line_error(text)
    if why is None and setting in _INSTEAD_OF_A_URL:
        return _url_error(text, _INSTEAD_OF_A_URL[setting])
    return why


def _encoding_error(text: str) -> str | None:
    if "\0" in text:
        return "holds the character NUL, which no file name and no variable can. Remove it."
    try:
        text.encode()
    except UnicodeEncodeError:
        return "is not valid Unicode text, as it holds half of a surrogate pair. Write it as UTF-8."
    return None


def _line_error(text: str) -> str | None:
    control = next((c for c in text if unicodedata.category(c) == "Cc"), None)
    if control is not None:
        return (
            f"holds the control character {control!r}, which would break lines of scripts and "
            "logs. Remove it."
        )
    size = len(text.encode())
    if size > _WHOLE_BYTES:
        most = f"{_WHOLE_BYTES:,}"
        return f"has {size:,} bytes, and no path or name has more than {most}. Shorten it."
    return None


def _url_error(text: str, instead: str) -> str | None:
    return f"is a URL, which is not opened here. {instead}" if is_remote(text) else None


def _name_error(text: str) -> str | None:
    if not text.strip():
        return "is empty. Write . if the current folder is meant."
    longest = max(text.split("/"), key=lambda part: len(part.encode()))
    if len(longest.encode()) > _PART_BYTES:
        return (
            f"has a name of {len(longest.encode()):,} bytes in it, and file systems take "
            f"{_PART_BYTES}. Shorten it."
        )
    try:
        Path(text).expanduser()
    except RuntimeError:
        return "begins with the home folder of a user that is not known here. Write the whole path."
    return None


# What contradicts itself in the section ``data``.


def check_data(recipe: Recipe) -> Iterable[Problem]:
    """Everything of this kind."""
    data = recipe.data
    yield from _packing(recipe)
    reads_text = task_row(recipe.task.name).reads == "text"
    is_own = recipe.model.module is not None and data.module is not None
    if data.seq_len == 1 and reads_text and not is_own:
        text = "=1 leaves no token to predict another from. Give at least 2."
        yield Problem("data.seq_len", text)
    is_trained = data.tokenizer in TOKENIZER_WORDS
    if data.tokenizer_kind != Data().tokenizer_kind and not is_trained:
        yield Problem("data.tokenizer_kind", not_trained(data.tokenizer_kind, data.tokenizer))
    yield from _added_tokens(recipe)
    yield from _validation(recipe)
    yield from _eval_sets(recipe)
    yield from _eval_tasks(recipe)
    yield from _mixture(recipe)


def _mixture(recipe: Recipe) -> Iterable[Problem]:
    data = recipe.data
    if not data.mixture:
        return
    if "source" in data.model_fields_set:
        text = "and data.source both say where text comes from. Leave one of them out."
        yield Problem("data.mixture", text)
    if recipe.task.name not in TASKS:
        text = f": task.name={recipe.task.name} has data of its own. Give one source."
        yield Problem("data.mixture", text)
    counts = Counter(share.name for share in data.mixture)
    for name, count in counts.items():
        if count > 1:
            text = f"has {count} sources of the name {name!r}. Give each another."
            yield Problem("data.mixture", text)
    slots = slots_of([share.weight for share in data.mixture])
    for place, (share, count) in enumerate(zip(data.mixture, slots, strict=True)):
        at = f"data.mixture[{place}]"
        if not count:
            text = (
                f"={share.weight} is less than a sample in {SLOTS:,}, which is how they are dealt, "
                f"so that {share.name!r} would never be read. Raise it, or leave the source out."
            )
            yield Problem(f"{at}.weight", text)
        if share.format is not None and share.format not in DATA_FORMATS:
            text = f"={share.format}: unknown format; known are {', '.join(DATA_FORMATS)}."
            yield Problem(f"{at}.format", text)
            continue
        format, wanted = share.format or data.format, task_row(recipe.task.name).data_formats
        if share.format is not None and wanted and format not in wanted:
            text = f"={format} does not prepare what task.name={recipe.task.name} reads. Use "
            yield Problem(f"{at}.format", f"{text}{', '.join(wanted)}, or leave it out.")
        if share.text_key is not None and "text_key" in DATA_FORMATS[format].ignores:
            text = f"={share.text_key!r} has no effect where the format is {format}. Leave it out."
            yield Problem(f"{at}.text_key", text)
        yield from _check_place_of_data(share, at, format)


def _check_place_of_data(share: Share, at: str, format: str) -> Iterable[Problem]:
    """Check that one setting of a source of a mixture gives its data."""
    if share.module is None:
        if share.source is None:
            text = "has neither source nor module. Give one, such as source: texts.jsonl."
            yield Problem(at, text)
        if share.module_settings:
            text = "is for module, and this source has none. Set it, or leave this out."
            yield Problem(f"{at}.module_settings", text)
        return
    for key in ("source", "eval_source"):
        if getattr(share, key) is not None:
            text = f"and module={share.module} both say where data comes from. Remove one of them."
            yield Problem(f"{at}.{key}", text)
    if "split" in share.module_settings:
        text = "has split, which the function gets anyway. Leave it out."
        yield Problem(f"{at}.module_settings", text)
    if DATA_FORMATS[format].only:
        text = f"={format} names files, and module={share.module} makes the data. Leave it out."
        yield Problem(f"{at}.format", text)


def _validation(recipe: Recipe) -> Iterable[Problem]:
    data = recipe.data
    if data.eval_source is not None and data.mixture:
        text = (
            "names validation data of data.source, and each source of data.mixture has its own. "
            "Give eval_source in the entry of data.mixture that it belongs to."
        )
        yield Problem("data.eval_source", text)
    named = data.eval_source is not None or (
        data.mixture and all(share.eval_source is not None for share in data.mixture)
    )
    if named and data.eval_fraction != Data().eval_fraction:
        text = (
            f"={data.eval_fraction}, and data.eval_source both say what is validated on. Leave one "
            "of them out."
        )
        yield Problem("data.eval_fraction", text)
    if data.eval_source == data.source and data.eval_source is not None:
        text = "and data.source are the same. Validate on other data than you train on."
        yield Problem("data.eval_source", text)


_SET_NAME = re.compile(r"[A-Za-z0-9_-]{1,32}", re.ASCII)


def _eval_sets(recipe: Recipe) -> Iterable[Problem]:
    """Sets that the task does not score, and names that an evaluation cannot show."""
    data, task, setting = recipe.data, recipe.task, "data.eval_sets"
    if not data.eval_sets:
        return
    if not task_row(task.name).reads_eval_sets:
        readers = " and ".join(name for name, row in TASKS.items() if row.reads_eval_sets)
        text = f"is scored by task.name={readers}, and not by {task.name}. Leave it out; "
        yield Problem(setting, f"{text}data.eval_source names the validation data of any task.")
        return
    for name, source in data.eval_sets.items():
        if wrong := _name_problem(recipe, name, kind="set"):
            yield Problem(setting, wrong)
        elif not data.mixture and source == data.source:
            text = "and data.source are the same. Validate on other data than you train on."
            yield Problem(f"{setting}.{name}", text)


def _eval_tasks(recipe: Recipe) -> Iterable[Problem]:
    """Tasks that the model in training cannot answer, and names that cannot be shown."""
    data, setting = recipe.data, "data.eval_tasks"
    if not data.eval_tasks:
        return
    if not task_row(recipe.task.name).continues_text:
        text = f"is for models that continue text, and task.name={recipe.task.name} trains none. "
        yield Problem(setting, f"{text}Leave it out.")
    elif data.module is not None:
        text = f"needs the tokenizer of text data, and data.module={data.module} makes its own. "
        yield Problem(setting, f"{text}Leave it out, and use `shardyard evaluate` afterwards.")
    for name in data.eval_tasks:
        if wrong := _name_problem(recipe, name, kind="task"):
            yield Problem(setting, wrong)
        elif name in data.eval_sets:
            text = f"has the name {name}, which is in data.eval_sets, too. Call it {name}-task."
            yield Problem(setting, text)


def _name_problem(recipe: Recipe, name: str, *, kind: str) -> str | None:
    """Why a set or a task cannot be shown by a name; None: it can."""
    if not _SET_NAME.fullmatch(name):
        near = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")[:32]
        hint = f" Did you mean {near}?" if near else ""
        text = f"has the name {show(name)}. A {kind}'s name has 1 to 32 letters, digits, hyphens "
        return f"{text}and underscores.{hint}"
    if name in metrics_of(recipe.task):
        text = f"has the name {name}, which is a metric of {recipe.task.name}. "
        return f"{text}Call it {name}-{kind}."
    if name in [share.name for share in recipe.data.mixture]:
        return f"has the name {name}, which is a source of data.mixture. Call it {name}-{kind}."
    return None


def _added_tokens(recipe: Recipe) -> Iterable[Problem]:
    data, model = recipe.data, recipe.model
    names = {key: getattr(data, key) for key in ("add_special_tokens", "add_tokens")}
    every = [token for tokens in names.values() for token in tokens]
    for key, tokens in names.items():
        wrong = [each for each in tokens if not each.strip() or not each.isprintable()]
        wrong += [each for each in tokens if every.count(each) > 1 and each not in wrong]
        if wrong:
            text = f"={show(list(tokens))}: {show(wrong[0])} is blank, has control characters or "
            yield Problem(f"data.{key}", f"{text}is there twice. Take it out.")
        elif tokens and any(DATA_FORMATS[name].holds_ids for name in formats_of(data)):
            text = f"={show(list(tokens))}: the files of data.format={data.format} hold ids, and "
            yield Problem(f"data.{key}", f"{text}no text that could become them. Leave it out.")
    is_random = model.path is None and model.hub is None and recipe.run.from_ is None
    if "new_embeddings" in model.model_fields_set and (is_random or model.weights == "random"):
        text = f"={model.new_embeddings} is for loaded weights, and all of these begin at random. "
        yield Problem("model.new_embeddings", f"{text}Leave it out.")


def _packing(recipe: Recipe) -> Iterable[Problem]:
    data = recipe.data
    if data.pack == "stream":
        row = task_row(recipe.task.name)
        is_row = row.labelled is not None or row.compares_answers
        if data.too_long != Data().too_long and data.module is None and not is_row:
            text = f"={data.too_long}: windows of running text cut documents as they come. "
            yield Problem("data.too_long", f"{text}Set data.pack=whole, or leave it out.")
        return
    if data.seq_len == "auto":
        text = "=auto: whole documents are put together when data is prepared. Give their room."
        yield Problem("data.seq_len", text)
    if "attend_across_documents" in data.model_fields_set and data.attend_across_documents:
        text = "=true, and data.pack=whole keeps documents apart. Leave it out, or set data.pack"
        yield Problem("data.attend_across_documents", f"{text}=stream.")
    row = task_row(recipe.task.name)
    for name in formats_of(data):
        if not row.reads_learnt or DATA_FORMATS[name].holds_samples:
            text = f"=whole: {recipe.task.name} on data.format={name} makes its samples in "
            yield Problem("data.pack", f"{text}another way. Use data.pack=stream.")


def formats_of(data: Data) -> list[str]:
    """The known formats that a recipe's sources have, each once."""
    named = [share.format or data.format for share in data.mixture] or [data.format]
    return [name for name in dict.fromkeys(named) if name in DATA_FORMATS]


def not_trained(kind: str, tokenizer: str) -> str:
    """Explain why a requested kind is not available."""
    return (
        f"={kind} is what a tokenizer becomes that is trained here, and data.tokenizer={tokenizer} "
        "is one that exists. Set data.tokenizer=train, or leave data.tokenizer_kind out."
    )


# What contradicts itself in a recipe that learns from dialogues.


def _mapped_keys(data: Data) -> Iterable[Problem]:
    further = PREFERENCE_KEYS if DATA_FORMATS[data.format].holds_pairs else ()
    known = [*CHAT_KEYS, *further, *TURN_KEYS]
    for key, yours in (data.keys or {}).items():
        if key not in known:
            swapped = yours in known
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"There are {', '.join(known)}."
            if swapped or near:
                hint = f"Write data.keys={{{yours if swapped else near[0]}: "
                hint += f"{key if swapped else yours}}}."
            yield Problem("data.keys", f" has no key {show(key)} of chat rows. {hint}")


def check_conversations(recipe: Recipe) -> Iterable[Problem]:
    """Yield problems of a recipe that trains on dialogues."""
    data, target = recipe.data, recipe.run.target or ()
    template = data.chat_template
    if template is not None and not is_template_file(template) and template not in CHAT_TEMPLATES:
        near = difflib.get_close_matches(template, CHAT_TEMPLATES, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"There are {', '.join(CHAT_TEMPLATES)}."
        text = f"={show(template)}: no such template is known. {hint} One of your own is a file: "
        text += "data.chat_template=FILE.jinja."
        yield Problem("data.chat_template", text)
    if data.format == "chat" or any(DATA_FORMATS[name].holds_pairs for name in formats_of(data)):
        yield from _mapped_keys(data)
    if data.format != "chat":
        return
    if not task_row(recipe.task.name).reads_learnt:
        text = f"=chat: {recipe.task.name} would learn all of a dialogue. Use task.name=causal_lm."
        yield Problem("data.format", text)
    if BITS_PER_BYTE in target:
        text = f"names {BITS_PER_BYTE}, which is of running text. Use loss for dialogues."
        yield Problem("run.target", text)
    if data.loss_share[0] >= data.loss_share[1]:
        text = f"={list(data.loss_share)} is not a range. Write the smaller share first."
        yield Problem("data.loss_share", text)
