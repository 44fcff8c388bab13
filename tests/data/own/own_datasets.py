"""Datasets as users write them, for tests of ``data.module``."""

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

VOCAB = 300


class Noisy(Dataset[dict[str, Tensor]]):
    """Token ids of different lengths; one in eight is another at each reading."""

    def __init__(self, first: int, number: int, *, noise: float = 0.125) -> None:
        self.first, self.number, self.noise = first, number, noise

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        made = torch.Generator().manual_seed(self.first + index)
        size = 12 + (self.first + index) % 19
        steps = torch.randint(1, 4, (size,), generator=made)
        ids = (7 * (self.first + index) + steps.cumsum(0)) % VOCAB
        is_noise = torch.rand(size) < self.noise  # the global generators, as transforms use them
        ids = torch.where(is_noise, torch.tensor(random.randrange(VOCAB)), ids)
        ids[0] = int(np.random.randint(VOCAB))
        labels = ids.clone()
        labels[:4] = -100  # a prompt
        return {"input_ids": ids, "labels": labels}


def noisy(split: str, *, number: int = 40) -> Noisy:
    return Noisy(0, number) if split == "train" else Noisy(1000, 7, noise=0.0)


def undivided(split: str) -> Noisy | None:
    return Noisy(0, 40) if split == "train" else None


def pairs(split: str) -> list[tuple[list[int], list[int]]]:
    """(tokens, targets), shifted, as nanoGPT's get_batch."""
    first = 0 if split == "train" else 50
    rows = [[(first + row + place) % VOCAB for place in range(17)] for row in range(24)]
    return [(row[:-1], row[1:]) for row in rows]


class Streamed(IterableDataset[Tensor]):
    """Token ids that can only be iterated."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __iter__(self) -> Iterator[Tensor]:
        for index in range(self.number):
            yield torch.arange(index, index + 10 + index % 5) % VOCAB


def streamed(split: str, number: int = 30) -> Streamed | None:
    return Streamed(number) if split == "train" else None


def texts(split: str, ending: str = "") -> Iterator[dict[str, str]] | None:
    if split == "eval":
        return None
    folder = Path(os.__file__).parent / "json"
    return ({"text": file.read_text() + ending} for file in sorted(folder.glob("*.py")))


def dialogues(split: str) -> list[dict[str, Any]]:
    said = [f"{split} question {number}?" for number in range(12)]
    return [
        {"messages": [{"role": "user", "content": each}, {"role": "assistant", "content": "Yes."}]}
        for each in said
    ]


class Pictures(Dataset[tuple[Any, int]]):
    """Squares of two colours, flipped at random; Pillow images or normalized floats."""

    classes = ("dark", "light")

    def __init__(self, number: int, *, is_float: bool) -> None:
        self.number, self.is_float = number, is_float

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> tuple[Any, int]:
        label = index % 2
        made = np.random.default_rng(index)
        pixels = made.integers(0, 100, (16, 16, 3), dtype=np.uint8) + np.uint8(120 * label)
        if random.random() < 0.5:
            pixels = pixels[:, ::-1]
        if self.is_float:
            planes = torch.from_numpy(pixels.transpose(2, 0, 1).copy()).float()
            return planes / 127.5 - 1.0, label
        return Image.fromarray(pixels), label


def pictures(split: str, is_float: bool = False) -> Pictures:
    return Pictures(24 if split == "train" else 6, is_float=is_float)


def table(split: str) -> list[dict[str, Any]]:
    """Rows of a table, for a model of the user's own."""
    made = np.random.default_rng(0 if split == "train" else 1)
    rows = made.normal(size=(32, 3))
    return [{"x": row, "y": float(row @ [1.0, -2.0, 0.5])} for row in rows]


# Mistakes -----------------------------------------------------------------------------------------


def unseeded(split: str) -> Dataset[Any] | None:
    class Unseeded(Noisy):
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            return {"input_ids": torch.from_numpy(np.random.default_rng().integers(0, VOCAB, 9))}

    return Unseeded(0, 20) if split == "train" else None


def broken(split: str) -> Dataset[Any] | None:
    class Broken(Noisy):
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            if index == 14:
                raise KeyError("gone")
            return super().__getitem__(index)

    return Broken(0, 40) if split == "train" else None


def killed(split: str) -> Dataset[Any] | None:
    class Killed(Noisy):
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            if index == 11 and os.environ.get("LOCAL_WORLD_SIZE"):
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getitem__(index)

    return Killed(0, 40) if split == "train" else None


def nothing(split: str) -> None:  # noqa: ARG001
    return None


def number(split: str) -> int:  # noqa: ARG001
    return 3


def empty(split: str) -> list[Any]:  # noqa: ARG001
    return []


def wide(split: str) -> list[dict[str, list[int]]]:  # noqa: ARG001
    return [{"input_ids": list(range(20)), "token_type_ids": [0] * 20}]


def unnamed(split: str) -> list[tuple[Any, int]]:  # noqa: ARG001
    return [(np.zeros((16, 16, 3), np.uint8), 0)]


def objects(split: str) -> list[dict[str, Any]]:  # noqa: ARG001
    return [{"text": "a text", "when": object()}]
