"""The user's dataset: made by the function that ``data.module`` names, and read by seeded items."""

import hashlib
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardyard.config.rules.own_code import DATASET
from shardyard.config.schema.recipe import Recipe
from shardyard.errors import RequestError, ShardyardError
from shardyard.own_code import OwnFunction, describe, load_own

SETTING = "data.module"


@dataclass(frozen=True, kw_only=True)
class DatasetCode:
    """The function of a recipe that makes its datasets, with its arguments."""

    import_path: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    """Seed of the run, from which every item has its own."""

    @staticmethod
    def of(recipe: Recipe) -> "DatasetCode":
        assert recipe.data.module is not None
        return DatasetCode(
            import_path=recipe.data.module,
            settings=recipe.data.module_settings,
            seed=recipe.run.seed,
        )

    def open(self, split: str) -> "OwnDataset | None":
        """Call the function for ``train`` or ``eval``; None: it has no such split.

        Raises:
            RequestError: It cannot be imported, it raised, or it returned no dataset.
        """
        function = load_own(SETTING, self.import_path, DATASET)
        seed_generators(self.seed, SETTING, split)
        made = function(split, **self.settings)
        if made is None:
            if split == "train":
                raise function.returned(made, "the train split is what the run learns")
            return None
        dataset = OwnDataset(function, split, made, seed=self.seed)
        if isinstance(made, str | bytes | Mapping) or not (
            dataset.is_indexed or hasattr(made, "__iter__")
        ):
            raise function.returned(made, f"for the {split} split")
        if dataset.is_indexed and not len(dataset) and split == "train":
            raise function.returned(made, "the train split has no items")
        return dataset


class OwnDataset:
    """One split of the user's dataset; errors name the line of their code."""

    def __init__(self, function: OwnFunction, split: str, dataset: Any, *, seed: int) -> None:
        self.split = split
        self.dataset = dataset
        self.is_indexed = _is_indexed(dataset)
        """Whether items are read by their numbers; else they come one after the other."""
        self._function = function
        self._seed = seed

    def __len__(self) -> int:
        try:
            return len(self.dataset)
        except ShardyardError:
            raise
        except Exception as error:
            raise self._function.failed(error) from error

    def item(self, index: int, epoch: int = 0) -> Any:
        """Read an item with the random generators seeded by the run, split, epoch and index.

        Raises:
            RequestError: The dataset raised; the message has its line and the item.
        """
        seed_generators(self._seed, SETTING, self.split, epoch, index)
        try:
            return self.dataset[index]
        except ShardyardError:
            raise
        except Exception as error:
            raise self._failed(error, index) from error

    def items(self) -> Iterator[Any]:
        """Iterate over all items once, in the dataset's own order.

        Raises:
            RequestError: The dataset raised; the message has its line and the item.
        """
        if self.is_indexed:
            yield from (self.item(index) for index in range(len(self)))
            return
        seed_generators(self._seed, SETTING, self.split)
        number = 0
        try:
            for item in self.dataset:
                yield item
                number += 1
        except (ShardyardError, GeneratorExit):
            raise
        except Exception as error:
            raise self._failed(error, number) from error

    def rejected(self, item: Any, index: int, reason: str) -> RequestError:
        """The error to raise for an item that cannot be trained on."""
        return RequestError(
            f"{SETTING}={self._function.import_path} ({self._function.location}): item {index} of "
            f"the {self.split} split is {describe(item)}: {reason}"
        )

    def _failed(self, error: Exception, index: int) -> RequestError:
        return RequestError(
            f"{SETTING}={self._function.import_path}: item {index} of the {self.split} split "
            f"failed at {self._function.line_of(error)}."
        )


def seed_generators(*parts: int | str) -> None:
    """Seed Python's, NumPy's and torch's global generators by a hash of these parts.

    Of torch's, that of the CPU, where items are made.
    """
    text = "\x1f".join(str(part) for part in parts)
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
    random.seed(seed)
    np.random.seed(seed % 2**32)  # transforms of users still draw from it
    torch = sys.modules.get("torch")
    if torch is not None:  # a dataset that does not use torch starts without its import
        # torch.manual_seed would also format the stack three times, for devices not in use: 1 ms.
        torch.default_generator.manual_seed(seed)


def _is_indexed(dataset: Any) -> bool:
    # torch's IterableDataset inherits a __getitem__ that raises.
    utils = sys.modules.get("torch.utils.data")
    if utils is not None and isinstance(dataset, utils.IterableDataset):
        return False
    return hasattr(type(dataset), "__getitem__") and hasattr(type(dataset), "__len__")
