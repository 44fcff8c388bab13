"""Items of the user's dataset as arrays: token ids, an image and its class, or fields of a model.

Shape suffix: T = tokens of an item.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from shardyard.config.data_choices import CHAT_KEYS
from shardyard.config.rules.custom_module import is_generic
from shardyard.config.schema.recipe import Recipe
from shardyard.config.tasks import task_row
from shardyard.errors import RequestError

Kind = Literal["rows", "tokens", "image", "fields"]
"""rows: text or dialogues, which `prepare` tokenizes. The others are read while training."""
Fields = dict[str, npt.NDArray[Any]]

IGNORED = -100
"""Target of no prediction, as in ``data.loader``, which imports torch."""

_TOKEN_KEYS = ("input_ids", "labels", "attention_mask", "position_ids")
_IMAGE_KEYS, _LABEL_KEYS = ("image", "pixel_values"), ("label", "labels")


def kind_of(item: Any, recipe: Recipe) -> Kind:
    """The kind of a dataset, by its first item and the task."""
    is_own_model = recipe.model.module is not None and not is_generic(recipe)
    is_free = isinstance(item, Mapping) and "input_ids" not in item
    if is_own_model and is_free and not any(isinstance(each, str) for each in item.values()):
        return "fields"
    if task_row(recipe.task.name).reads == "images":
        return "image"
    if isinstance(item, str):
        return "rows"
    known = {*CHAT_KEYS, *(recipe.data.keys or {}).values(), recipe.data.text_key}
    if isinstance(item, Mapping) and "input_ids" not in item and known & {*item}:
        return "rows"
    return "tokens"


@dataclass(frozen=True, kw_only=True)
class ItemForm:
    """Form that items must have, and their conversion into arrays."""

    kind: Kind
    is_causal: bool = True
    """Whether tokens predict the next ones; else the task hides tokens itself."""
    attends_across: bool = True
    """Whether tokens attend to all tokens before them, also where positions restart."""
    vocab_size: int | None = None
    """Number of token ids; None: they are not checked."""
    num_classes: int | None = None
    shapes: Mapping[str, tuple[str, tuple[int, ...]]] | None = None
    """Type and shape of each field of the first item, which all others share.

    None: items have any length.
    """

    def fields(self, item: Any) -> Fields:
        """Return the arrays of an item.

        Tokens: ``tokens``, ``targets`` and ``positions`` (T,), int64. Image: ``image`` uint8
        (H, W, 3) or float32 (3, H, W), and ``label``. Fields: those of the item.

        Raises:
            ValueError: The item has another form; the message says which is right.
        """
        if self.kind == "tokens":
            return self._tokens(item)
        fields = self._image(item) if self.kind == "image" else _free_fields(item)
        if self.shapes is not None and shapes_of(fields) != self.shapes:
            raise ValueError(
                f"its arrays are {_words(shapes_of(fields))}, and those of the first item "
                f"{_words(self.shapes)}. A batch needs one shape: pad, crop or resize in your "
                "dataset."
            )
        return fields

    def _tokens(self, item: Any) -> Fields:
        if isinstance(item, tuple | list) and len(item) == 2 and np.ndim(_array(item[0])) == 1:
            return self._shifted_pair(*item)
        if isinstance(item, Mapping):
            unknown = [str(key) for key in item if key not in _TOKEN_KEYS]
            if unknown or "input_ids" not in item:
                raise ValueError(
                    f"Shardyard reads the keys {', '.join(_TOKEN_KEYS)}, and would drop "
                    f"{', '.join(unknown) or 'nothing'}. Return input_ids and only these keys; or "
                    "text under data.text_key, which Shardyard tokenizes."
                )
            given = {key: _ints(value, key) for key, value in item.items() if value is not None}
        else:
            given = {"input_ids": _ints(item, "the item")}
        given = _without_padding(given)
        ids_T, size = given["input_ids"], len(given["input_ids"])
        for key, values in given.items():
            if len(values) != size:
                raise ValueError(f"{key} has {len(values)} numbers, and input_ids {size}.")
        positions_T = given.get("position_ids", np.arange(size))
        self._check_positions(positions_T)
        if not self.is_causal:
            if "labels" in given:
                raise ValueError("the task hides tokens itself. Return input_ids without labels.")
            self._check_ids(ids_T, ids_T[:0], least=1)
            return {"tokens": ids_T, "targets": ids_T, "positions": positions_T}
        # as transformers: labels[t] belongs to input_ids[t], which the token before it predicts
        targets_T = given.get("labels", ids_T)[1:]
        self._check_ids(ids_T, targets_T, least=2)
        return {"tokens": ids_T[:-1], "targets": targets_T, "positions": positions_T[:-1]}

    def _shifted_pair(self, tokens: Any, targets: Any) -> Fields:
        """Return the arrays of (tokens, targets), where targets[t] follows tokens[t]."""
        if not self.is_causal:
            raise ValueError("the task hides tokens itself. Return token ids without targets.")
        tokens_T, targets_T = _ints(tokens, "tokens"), _ints(targets, "targets")
        if len(tokens_T) != len(targets_T):
            raise ValueError(f"it has {len(tokens_T)} tokens and {len(targets_T)} targets.")
        self._check_ids(tokens_T, targets_T, least=1)
        return {"tokens": tokens_T, "targets": targets_T, "positions": np.arange(len(tokens_T))}

    def _check_ids(self, ids_T: npt.NDArray[Any], targets: npt.NDArray[Any], *, least: int) -> None:
        if len(ids_T) < least:
            raise ValueError(f"it has {len(ids_T)} tokens, and a sample needs {least}.")
        predicted = targets[targets != IGNORED]
        found = np.concatenate([ids_T, predicted])
        if self.vocab_size is not None and (found.min() < 0 or found.max() >= self.vocab_size):
            wrong = int(found.min() if found.min() < 0 else found.max())
            raise ValueError(
                f"token id {wrong} is outside the model's vocabulary of {self.vocab_size:,}. Use "
                f"the model's tokenizer, or set data.vocab_size; targets may also be {IGNORED}."
            )

    def _check_positions(self, positions_T: npt.NDArray[Any]) -> None:
        steps = np.diff(positions_T)
        starts = positions_T[np.concatenate([[True], steps != 1])]
        if (starts != 0).any():
            raise ValueError("position_ids must count up from 0 and restart only at 0.")
        if self.attends_across and len(starts) > 1:
            raise ValueError(
                "position_ids restart, so it holds several documents. Set "
                "data.attend_across_documents=false, or leave position_ids out."
            )

    def _image(self, item: Any) -> Fields:
        if isinstance(item, Mapping):
            image = next((item[key] for key in _IMAGE_KEYS if key in item), None)
            label = next((item[key] for key in _LABEL_KEYS if key in item), None)
        elif isinstance(item, tuple | list) and len(item) == 2:
            image, label = item
        else:
            image = label = None
        number = None if label is None else _array(label)
        if image is None or number is None or number.ndim or number.dtype.kind not in "iu":
            raise ValueError("return (image, class number), or a dict of image and label.")
        if self.num_classes is not None and not 0 <= number < self.num_classes:
            raise ValueError(f"class {number} is not in 0 to {self.num_classes - 1}.")
        pixels = np.asarray(image.convert("RGB")) if hasattr(image, "convert") else _array(image)
        if pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] != 3:
            pixels = pixels.transpose(1, 2, 0)  # planes, as torchvision decodes
        is_bytes = pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] == 3
        is_planes = pixels.dtype.kind == "f" and pixels.ndim == 3 and pixels.shape[0] == 3
        if not is_bytes and not is_planes:
            raise ValueError(
                "an image is a Pillow image, uint8 (H, W, 3) or (3, H, W), or normalized floats "
                "(3, H, W)."
            )
        pixels = pixels if is_bytes else pixels.astype(np.float32, copy=False)
        return {"image": np.ascontiguousarray(pixels), "label": number.astype(np.int64)}


def too_long(size: int, recipe: Recipe) -> RequestError:
    """The error for an item of more tokens than a sample has."""
    return RequestError(
        f"an item of data.module={recipe.data.module} has {size:,} tokens to read, and "
        f"data.seq_len={recipe.data.seq_len}. Set data.too_long=cut, a larger data.seq_len, or cut "
        "it in your dataset."
    )


def shapes_of(fields: Fields) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of each array, by name."""
    return {name: (str(each.dtype), each.shape) for name, each in sorted(fields.items())}


def _words(shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    return ", ".join(f"{name} {kind} {shape}" for name, (kind, shape) in shapes.items())


def _free_fields(item: Any) -> Fields:
    if not isinstance(item, Mapping) or not item:
        raise ValueError("return a dict of tensors or numbers, by the names that your loss reads.")
    found = {}
    for name, value in item.items():
        array = _array(value)
        if array.dtype.kind not in "fiub":
            raise ValueError(f"{name} holds {array.dtype}, and a batch holds numbers.")
        wide = {"f": np.float32, "i": np.int64, "u": np.int64, "b": np.bool_}[array.dtype.kind]
        is_bytes = array.dtype == np.uint8  # pixels: as small as they are
        found[str(name)] = array if is_bytes else array.astype(wide, copy=False)
    return found


def _array(value: Any) -> npt.NDArray[Any]:
    """An array of a tensor, a list or a number."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    try:
        return np.asarray(value)
    except ValueError as error:
        raise ValueError(f"its lists have different lengths ({error}).") from error


def _ints(value: Any, name: str) -> npt.NDArray[np.int64]:
    array = _array(value)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be whole numbers (T,), not {array.dtype} {array.shape}.")
    return array.astype(np.int64, copy=False)


def _without_padding(given: Fields) -> Fields:
    """Cut what the attention mask hides, which must be at one end."""
    mask_T = given.pop("attention_mask", None)
    if mask_T is None:
        return given
    if not np.isin(mask_T, (0, 1)).all() or len(mask_T) != len(given["input_ids"]):
        raise ValueError("attention_mask must have a 1 or 0 for each of input_ids.")
    kept = np.flatnonzero(mask_T)
    if not len(kept) or kept[-1] - kept[0] + 1 != len(kept):
        raise ValueError("attention_mask must hide padding only, at the end or the beginning.")
    return {key: values[kept[0] : kept[-1] + 1] for key, values in given.items()}
