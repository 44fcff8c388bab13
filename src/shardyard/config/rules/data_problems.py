"""What contradicts itself in the section ``data``."""

from collections import Counter
from collections.abc import Iterable

from shardyard.config.data_formats import DATA_FORMATS
from shardyard.config.mixture import SLOTS, slots_of
from shardyard.config.schema.data import Data
from shardyard.config.schema.recipe import Recipe
from shardyard.config.task_lookup import task_row
from shardyard.config.tasks import TASKS
from shardyard.errors import Problem


def data_problems(recipe: Recipe) -> Iterable[Problem]:
    """Everything of this kind."""
    data = recipe.data
    yield from _packing(recipe)
    if data.seq_len == 1 and task_row(recipe.task.name).reads == "text":
        text = "=1 leaves no token to predict another from. Give at least 2."
        yield Problem("data.seq_len", text)
    is_trained = data.tokenizer in ("auto", "train")
    if data.tokenizer_kind != Data().tokenizer_kind and not is_trained:
        yield Problem("data.tokenizer_kind", not_trained(data.tokenizer_kind, data.tokenizer))
    yield from _validation(recipe)
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
            text = f"={share.format}: there is no such format; {', '.join(DATA_FORMATS)} are."
            yield Problem(f"{at}.format", text)
            continue
        format = share.format or data.format
        if share.text_key is not None and "text_key" in DATA_FORMATS[format].ignores:
            text = f"={share.text_key!r} says nothing where the format is {format}. Leave it out."
            yield Problem(f"{at}.text_key", text)


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


def _packing(recipe: Recipe) -> Iterable[Problem]:
    data = recipe.data
    if data.pack == "stream":
        if data.too_long != Data().too_long:
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
        if not row.reads_learnt or DATA_FORMATS[name].holds_ids:
            text = f"=whole: {recipe.task.name} on data.format={name} makes its samples in "
            yield Problem("data.pack", f"{text}another way. Use data.pack=stream.")


def formats_of(data: Data) -> list[str]:
    """The known formats that a recipe's sources have, each once."""
    named = [share.format or data.format for share in data.mixture] or [data.format]
    return [name for name in dict.fromkeys(named) if name in DATA_FORMATS]


def not_trained(kind: str, tokenizer: str) -> str:
    """Why a kind that is asked for cannot be had."""
    return (
        f"={kind} is what a tokenizer becomes that is trained here, and data.tokenizer={tokenizer} "
        "is one that exists. Set data.tokenizer=train, or leave data.tokenizer_kind out."
    )
