"""Match of a network's outputs with the data's classes: by name, as config.json has them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_UNNAMED = re.compile(r"LABEL_\d+")
"""Names that transformers gives to classes without a name."""

_UNSAID = 2
"""transformers' own number of classes, which it leaves out of a config.json."""

_WNID = re.compile(r"n\d{8}")
_IMAGENET = {0: "tench", 1: "goldfish", 999: "toilet tissue"}
"""Some classes of ImageNet-1k by number; the numbers follow its sorted WordNet ids. Source:
id2label of microsoft/resnet-50 and google/vit-base-patch16-224."""


@dataclass(frozen=True, kw_only=True)
class HeadOrder:
    """Use of the head of a folder's network."""

    rows: tuple[int, ...] | None
    """Row of the folder's head for each class of the data; None: a new head begins at random."""
    note: str = ""
    """Note for the user; empty where the classes are the same."""


def class_names_in(config: Mapping[str, Any]) -> list[str] | None:
    """Names of the outputs in a config.json, in their order; None: it names none."""
    try:
        if config.get("id2label"):
            numbered = {int(number): str(name) for number, name in config["id2label"].items()}
        else:
            names = config.get("label2id") or {}
            numbered = {int(number): str(name) for name, number in names.items()}
    except (AttributeError, TypeError, ValueError):
        return None
    found = [numbered[number] for number in sorted(numbered)]
    if sorted(numbered) != list(range(len(found))) or all(map(_UNNAMED.fullmatch, found)):
        return None
    return found


def outputs_in(config: Mapping[str, Any]) -> int:
    """Return the number of outputs of the network of a config.json."""
    names = config.get("id2label") or config.get("label2id") or {}
    return int(len(names) or config.get("num_labels") or _UNSAID)


def head_order(
    data_names: Sequence[str], network_names: Sequence[str] | None, *, outputs: int
) -> HeadOrder:
    """Match the outputs of a folder's network with the classes of the data.

    Args:
        data_names: Names of the data's classes, in the order of their numbers.
        network_names: Names of the folder's outputs; None: they have none.
        outputs: How many outputs the folder's network has.
    """
    in_order = tuple(range(len(data_names)))
    if network_names is not None and list(data_names) == list(network_names):
        return HeadOrder(rows=in_order)
    if (
        network_names is not None
        and sorted(data_names) == sorted(network_names)
        and len(set(network_names)) == len(network_names)
    ):
        places = {name: number for number, name in enumerate(network_names)}
        return HeadOrder(
            rows=tuple(places[name] for name in data_names),
            note="the rows of its head are put into the order of the data's classes, by id2label",
        )
    if len(data_names) != outputs:
        return HeadOrder(
            rows=None,
            note=f"it has {outputs:,} outputs, the data {len(data_names):,} classes: its head is "
            "left, and a new one begins at random",
        )
    if network_names is None:
        why = "it does not name its classes in id2label"
    elif list(data_names) == [str(number) for number in in_order]:
        why = "the data's classes are numbers"
    elif _is_imagenet(data_names, network_names):
        return HeadOrder(rows=in_order)
    else:
        return HeadOrder(
            rows=None,
            note=f"its classes have other names in id2label ({_preview(network_names)}) than in "
            f"the data ({_preview(data_names)}): its head is left, and a new one begins at random. "
            "If they are the same classes, rename one of the two",
        )
    return HeadOrder(
        rows=in_order,
        note=f"{why}, so output n means the n-th class of the data ({_preview(data_names)})",
    )


def _is_imagenet(data_names: Sequence[str], network_names: Sequence[str]) -> bool:
    """Whether the data has ImageNet's WordNet ids, and the network its words for them."""
    return (
        len(data_names) == 1000
        and all(map(_WNID.fullmatch, data_names))
        and all(network_names[number].startswith(word) for number, word in _IMAGENET.items())
    )


def _preview(names: Sequence[str]) -> str:
    more = ", ..." if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"
