"""The model card of an export: what it was made of, how to load it, and how good it was.

Only what the run wrote down is in it. Names of folders, buckets and hosts are left out, because a
card may be public.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from shardyard import __version__
from shardyard.io.files import read_json_object
from shardyard.io.yaml import read_yaml, write_yaml
from shardyard.report.run_data import RunRecord
from shardyard.report.summary import Summary, summarize
from shardyard.units import format_bytes, format_count, format_seconds, format_usd

_SECTIONS = ("model", "data", "task", "optim", "precision", "parallel", "phases")
"""Sections of a recipe that make a model what it is."""
_SETTINGS_OF_A_PLACE = frozenset({"dir", "workers"})

_ADDRESS = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://[^/?#]*(?P<path>[^?#]*)(?:[?#].*)?", re.DOTALL
)
"""An address: scheme, bucket or host, path, and what may follow it."""
_SIGNED = re.compile(r"\n<!-- shardyard card ([0-9a-f]{16}) -->\n\Z")
"""Last line of a card: the digest of the text above it."""


def model_card(
    name: str,
    record: RunRecord | None,
    export: Path,
    *,
    branch: str,
    step: int,
    size_bytes: int,
) -> str:
    """Write the card of an export.

    Args:
        name: ``owner/name`` of its repository.
        record: The run; None: its files are not on this machine.
        export: Folder of the export.
        branch: Branch of the repository that it is pushed to.
        step: Step of the checkpoint.
    """
    of_run: list[str] = []
    if record is not None:
        training = _table(_training(record, summarize(record)))
        of_run = ["## Training", training, *_results(record, step), *_recipe(record)]
    text = "\n\n".join(
        [
            f"---\n{write_yaml(_front_matter(record, export))}---",
            f"# {name.partition('/')[2]}",
            _introduction(record, step, size_bytes),
            *_usage(name, branch, export),
            *of_run,
        ]
    )
    return f"{text}\n\n<!-- shardyard card {_digest(text + chr(10))} -->\n"


def is_unedited_card(text: str) -> bool:
    """Whether a card is one that ``model_card`` wrote and that nobody changed."""
    signed = _SIGNED.search(text)
    return signed is not None and signed[1] == _digest(text[: signed.start()])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _front_matter(record: RunRecord | None, export: Path) -> dict[str, Any]:
    """Fields that the hub reads.

    Source: huggingface.co/docs/hub/model-cards, section Model card metadata.
    """
    is_adapter = (export / "adapter_config.json").is_file()
    content: dict[str, Any] = {"tags": ["shardyard"]}
    if is_adapter:
        content["library_name"] = "peft"
    elif (export / "config.json").is_file():
        content["library_name"] = "transformers"
    if record is None or record.resolved is None:
        return content
    recipe = record.resolved.recipe
    if recipe.model.hub is not None:
        content["base_model"] = recipe.model.hub
        content["base_model_relation"] = "adapter" if is_adapter else "finetune"
    source = recipe.data.source
    if isinstance(source, str) and source.startswith("hf://"):
        owner, _, rest = source.removeprefix("hf://").removeprefix("datasets/").partition("/")
        content["datasets"] = [f"{owner}/{re.split('[@/]', rest)[0]}"]
    return content


def _introduction(record: RunRecord | None, step: int, size_bytes: int) -> str:
    run = "" if record is None else f" of the run `{record.run.run_id}`"
    resolved = None if record is None else record.resolved
    base = None if resolved is None else resolved.recipe.model.hub
    began = f"It began with the weights of `{base}`. " if base else ""
    return (
        f"Weights of step {step:,}{run}, {format_bytes(size_bytes)}, trained with Shardyard "
        f"{__version__}. {began}`complete.json` has the SHA-256 of each file."
    )


def _usage(name: str, branch: str, export: Path) -> Iterator[str]:
    """Return the lines that load it: by PEFT, or by its own class of transformers."""
    if (export / "adapter_config.json").is_file():
        package, loader = "peft", "AutoPeftModelForCausalLM"
    elif (export / "config.json").is_file():
        named = read_json_object(export / "config.json").get("architectures")
        package, loader = "transformers", named[0] if isinstance(named, list) else "AutoModel"
    else:
        return
    lines = [f"from {package} import {loader}"]
    has_tokenizer = (export / "tokenizer_config.json").is_file()
    if has_tokenizer:
        lines.append("from transformers import AutoTokenizer")
    place = f'"{name}"' + ("" if branch == "main" else f', revision="{branch}"')
    lines += ["", f"model = {loader}.from_pretrained({place})"]
    if has_tokenizer:
        lines.append(f"tokenizer = AutoTokenizer.from_pretrained({place})")
    yield "## Use"
    yield "\n".join(["```python", *lines, "```"])


def _training(record: RunRecord, summary: Summary) -> dict[str, str]:
    """Return the facts of the run, by name."""
    rows = {"steps": f"{summary.steps_done:,}"}
    if summary.tokens:
        rows[f"{summary.unit}s"] = format_count(summary.tokens)
    if record.resolved is not None and summary.world_size:
        cluster = record.resolved.recipe.cluster
        machine = f", {cluster.instance}" if cluster.instance else ""
        rows["devices"] = f"{summary.world_size} ({cluster.device}{machine})"
    if summary.tokens_per_s:
        rows[f"{summary.unit}s per second"] = format_count(summary.tokens_per_s)
    if summary.mfu is not None:
        rows["MFU"] = f"{summary.mfu['full']:.1%}"
    rows["running time"] = format_seconds(summary.running_s)
    if summary.restarts:
        rows["restarts"] = str(summary.restarts)
    if summary.cost is not None:
        rows["cost"] = format_usd(summary.cost.so_far_usd)
    if summary.started_from is not None:
        rows["started from"] = summary.started_from
    return rows


def _results(record: RunRecord, step: int) -> Iterator[str]:
    """Return the scores of the newest validation up to the step of the weights."""
    lines = [line for line in record.evaluations if line.get("step", 0) <= step]
    if not lines:
        return
    newest = lines[-1]
    scores = {name: value for name, value in newest["eval"].items() if isinstance(value, float)}
    if not scores:
        return
    yield "## Results"
    yield f"Validation at step {newest['step']:,}; the loss is in {record.loss_unit}."
    yield _table({name.replace("_", " "): f"{value:,.4g}" for name, value in scores.items()})


def _recipe(record: RunRecord) -> Iterator[str]:
    """Return the recipe as its user wrote it, without what belongs to the machine."""
    attempt = record.latest
    file = None if attempt is None else record.run.attempt_recipe(attempt.number)
    if file is None or not file.is_file():
        return
    written = read_yaml(file.read_text(encoding="utf-8"), source=str(file))
    kept = {name: _without_places(written[name]) for name in _SECTIONS if name in written}
    yield "## Recipe"
    yield f"```yaml\n{write_yaml(kept)}```"


def _without_places(value: Any) -> Any:
    """Return a setting with only the last part of each path and address, but those of the hub.

    Names of buckets and hosts are private, and an address may hold a signature.
    """
    if isinstance(value, Mapping):
        kept = {name: each for name, each in value.items() if name not in _SETTINGS_OF_A_PLACE}
        return {name: _without_places(each) for name, each in kept.items()}
    if isinstance(value, list):
        return [_without_places(each) for each in value]
    if not isinstance(value, str):
        return value
    if value.startswith(("/", "~", "./", "../", "file:")):
        return Path(value).name
    address = _ADDRESS.fullmatch(value)
    if address is None or address["scheme"] == "hf":
        return value
    return PurePosixPath(address["path"]).name or f"{address['scheme']} (private)"


def _table(rows: Mapping[str, str]) -> str:
    return "\n".join(
        ["| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows.items())]
    )
