"""transformers' own report of a model's folder: missing tensors, and tensors that would be dropped.

It serves models of families that Shardyard does not know, and networks for images, whose
tensors only transformers knows. Run as a program, it opens the folder without its content
(only headers) and answers in one line of JSON. A bad folder is thus rejected before workers
start.
"""

import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig
from transformers.utils import logging

from shardyard.config.tasks import task_row
from shardyard.config.weight_files import format_names
from shardyard.config.weights_match import remedy_of

HEAD = "classifier."
"""Prefix of names in the head of a network for images, which may have other classes."""

_BATCHES = re.compile(r".*\.num_batches_tracked")
"""Counts of batch normalisation, which older files lack; training moves by a fixed share."""


def loading_errors(
    folder: Path,
    loading_info: Mapping[str, Any],
    *,
    head: str | None = None,
    base: str | None = None,
) -> list[str]:
    """Return the reasons to reject a load, a sentence each.

    Args:
        loading_info: transformers' ``output_loading_info``.
        head: Prefix of the names of a head that may be of another size, or missing.
        base: Prefix of the names that a model with another head must have: its own head may be
            missing, and the other one is dropped; None: all names count.
    """

    def of_base(names: Iterable[str]) -> list[str]:
        return [name for name in names if base is None or _is_of_base(name, base)]

    def relevant(names: Iterable[str]) -> list[str]:
        has_head = sorted(name for name in names if head is None or not name.startswith(head))
        return [name for name in has_head if not _BATCHES.fullmatch(name)]

    missing = of_base(relevant(loading_info["missing_keys"]))
    other = relevant(name for name, *_ in loading_info["mismatched_keys"])
    surplus = of_base(sorted(loading_info["unexpected_keys"]))
    found = []
    if missing:
        found.append(
            f"{folder} lacks {len(missing):,} tensors that config.json asks for: "
            f"{format_names(missing)}. "
            "They would be random. Check config.json, or fetch or save the folder again."
        )
    if other:
        found.append(
            f"{folder} has {len(other):,} tensors of another shape than config.json says: "
            f"{format_names(other)}. Check the sizes in config.json, or fetch the folder again."
        )
    if surplus:
        found.append(
            f"{folder} has {len(surplus):,} tensors that config.json has no place for: "
            f"{format_names(surplus)}. {remedy_of(surplus)}."
        )
    return found


def _is_of_base(name: str, base: str) -> bool:
    # Some models keep the pooler, which is a part of the head, inside of their base.
    return name.startswith(base) and not name.removeprefix(base).startswith("pooler.")


def main(folder: Path, task: str) -> list[str]:
    """Open a folder without its content for a task; what is wrong with it."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    row = task_row(task)
    model_class: Any = getattr(transformers, str(row.auto_class))
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    try:
        model, told = model_class.from_pretrained(
            folder, config=config, dtype=torch.float32, use_safetensors=True, device_map="meta",
            local_files_only=True, ignore_mismatched_sizes=True, output_loading_info=True,
        )  # fmt: skip
    except (ValueError, OSError, ImportError, KeyError):
        return []  # reported where it is opened
    base = None if row.labelled is None else f"{model.base_model_prefix}."
    return loading_errors(folder, told, head=HEAD if row.reads == "images" else None, base=base)


if __name__ == "__main__":
    print(json.dumps({"problems": main(Path(sys.argv[1]), sys.argv[2])}))
