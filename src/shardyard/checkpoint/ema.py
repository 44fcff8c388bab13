"""Averaged weights in a checkpoint, next to the trained ones (``train/ema.py``)."""

from collections.abc import Collection

_PREFIX = "average."


def ema_name(name: str) -> str:
    """The name, in a checkpoint, of the average of a tensor, from that one's name there."""
    return f"{_PREFIX}{name}"


def is_ema(name: str) -> bool:
    """Whether a tensor of a checkpoint is an average, by its name there."""
    return name.startswith(_PREFIX)


def inference_name(name: str, saved: Collection[str]) -> str:
    """The tensor to read for one of a model that is to be used: its average, if there is one.

    Args:
        name: Of the tensor that is trained on, in a checkpoint.
        saved: All names there.
    """
    averaged = ema_name(name)
    return averaged if averaged in saved else name
