"""The random number generators of the ranks of a script: kept in a checkpoint, and given back."""

import base64
import random
import sys
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

States = dict[str, Any]
"""Generator states of a rank, as JSON: torch, its accelerator, Python, numpy if imported."""


def states_of(device: torch.device) -> States:
    """Return the states of this process's random generators."""
    states: States = {"torch": _text(torch.get_rng_state()), "python": _plain(random.getstate())}
    if device.type != "cpu":
        states[device.type] = _text(torch.get_device_module(device).get_rng_state(device))
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = [kind, keys.tolist(), *rest]
    return states


def give_back(states: Mapping[str, Any], device: torch.device) -> None:
    """Let this process draw what the one of these states would have drawn next."""
    torch.set_rng_state(_tensor(states["torch"]))
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    if device.type in states:
        torch.get_device_module(device).set_rng_state(_tensor(states[device.type]), device)
    if "numpy" in states:
        import numpy as np

        np.random.set_state(tuple(states["numpy"]))


def once(by_rank: Sequence[States]) -> list[States]:
    """The states of all ranks, or of one of them if they are equal."""
    return [by_rank[0]] if all(each == by_rank[0] for each in by_rank) else list(by_rank)


def give_back_to_rank(
    saved: Sequence[Mapping[str, Any]], device: torch.device, *, rank: int
) -> None:
    """Give a rank the states that it had. One that did not exist draws numbers of its own."""
    if rank < len(saved) or len(saved) == 1:
        give_back(saved[rank if len(saved) > 1 else 0], device)
        return
    give_back(saved[rank % len(saved)], device)
    seed = zlib.crc32(f"{saved[rank % len(saved)]['torch']} {rank}".encode())
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def _text(state: Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _plain(state: tuple[Any, ...]) -> list[Any]:
    version, numbers, gauss = state
    return [version, list(numbers), gauss]
