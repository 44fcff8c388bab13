"""Reads files of ``torch.save`` without torch and without running their code.

A pickle names functions and classes that its reader shall call. Here a name becomes one of
our own inert things or is rejected. The result has tensors, numbers, strings, lists and
dicts. It also has records of known classes in checkpoints, which hold their content and do
nothing.

Source: ``torch/serialization.py`` and ``torch/_utils.py`` of torch 2.13: a zip file without
compression, ``data.pkl`` and one entry a storage.

``torch.load(weights_only=True)`` of torch 2.13 cannot read ``.metadata`` of
torch.distributed.checkpoint (a protocol 4 pickle, "Unsupported operand 149";
``test_logits_are_those_of_the_model_that_was_saved``), nor map a stretch of a ``.distcp`` file.
"""

import io
import math
import pickle
import pickletools
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from shardyard.errors import CheckpointError
from shardyard.importers.checkpoints.tensors import (
    STEPS,
    SourceCheckpoint,
    TensorChunk,
    TensorView,
    step_in,
    top_level_names,
)
from shardyard.io.digests import ITEM_BYTES

MAX_PICKLE_BYTES = 2**30
"""Limit on a pickle that describes tensors; the largest known has a tenth of it."""

_STORAGES = {
    "BoolStorage": "BOOL", "ByteStorage": "U8", "CharStorage": "I8", "ShortStorage": "I16",
    "IntStorage": "I32", "LongStorage": "I64", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "FloatStorage": "F32", "DoubleStorage": "F64", "UntypedStorage": "U8",
}  # fmt: skip
_DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip

_INERT_MODULES = ("deepspeed.", "megatron.", "torch.distributed.checkpoint.")
"""Modules whose classes occur in checkpoints; none of them is imported or called."""
_INERT = {
    ("torch", "Tensor"), ("torch", "device"), ("torch.nn.parameter", "Parameter"),
    ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath"), ("argparse", "Namespace"),
    ("types", "SimpleNamespace"), ("_io", "BytesIO"),
    ("numpy", "ndarray"), ("numpy", "dtype"), ("numpy.core.multiarray", "_reconstruct"),
    ("numpy.core.multiarray", "scalar"), ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"),
    ("torch.torch_version", "TorchVersion"), ("torch.optim.lr_scheduler", "LambdaLR"),
}  # fmt: skip
_LOCAL = "torch.distributed._shard"


class PickledObject:
    """Stand-in for an object of a class that is not imported: its arguments and state."""

    name: ClassVar[str] = ""
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any, **_: Any) -> "PickledObject":
        made = super().__new__(cls)
        made.args, made.state = args, None
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        """Ignore the arguments, which ``__new__`` has kept already."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, field: str) -> Any:
        """A field of its state; None where there is none."""
        return self.state.get(field) if isinstance(self.state, dict) else None


class _Dict(dict[Any, Any]):
    """A dict whose attributes, such as versions of modules, are let go of."""

    def __setstate__(self, state: Any) -> None:
        """Drop the state."""


@dataclass(frozen=True)
class _Storage:
    dtype: str
    first_byte: int
    bytes: int


class _Function:
    """One of our functions that a pickle may call; its state cannot be set."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)

    def __setstate__(self, state: Any) -> None:
        raise CheckpointError("it sets the state of a function")


def load(path: Path, *, first_byte: int = 0, length: int | None = None) -> Any:
    """Return the content of a file of ``torch.save``, or of a stretch of one.

    No tensor's bytes are read.

    Raises:
        CheckpointError: It is no such file, is damaged, or asks for something that is not in a
            checkpoint.
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        size = path.stat().st_size - first_byte if length is None else length
        stretch = _FileWindow(file, first_byte, size)
        try:
            with zipfile.ZipFile(stretch) as archive:
                return _load(path, archive, stretch)
        except zipfile.BadZipFile as error:
            raise CheckpointError(
                f"{path} is not a file of torch.save in the format of torch 1.6 or newer "
                f"({error}). If it is older, save it again with a newer torch; if it was cut off, "
                "copy it again."
            ) from error


def loads(data: bytes, what: str) -> Any:
    """Return the content of a pickle without tensors.

    Raises:
        CheckpointError: It is damaged, or asks for something that is not in a checkpoint.
    """
    return _unpickled(data, what, lambda *_: _reject_storage(what))


def _reject_storage(what: str) -> Any:
    raise CheckpointError(f"{what} speaks of a tensor's bytes, which it does not hold.")


def _load(path: Path, archive: zipfile.ZipFile, window: "_FileWindow") -> Any:
    entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    described = entries.get("data.pkl")
    if described is None:
        raise CheckpointError(f"{path} is a zip file, but none of torch.save: data.pkl is missing.")
    if described.file_size > MAX_PICKLE_BYTES or described.compress_type != zipfile.ZIP_STORED:
        raise CheckpointError(
            f"{path}: data.pkl has {described.file_size:,} bytes, or is compressed; torch writes "
            "it neither so large nor so. It was not read."
        )
    order = entries.get("byteorder")
    if order is not None and archive.read(order) != b"little":
        raise CheckpointError(f"{path} has the order of bytes of another machine: save it on x86.")

    def storage(dtype: str, key: str, elements: int) -> _Storage:
        info = entries.get(f"data/{key}")
        size = elements * ITEM_BYTES[dtype]
        if info is None or info.compress_type != zipfile.ZIP_STORED or info.file_size < size:
            raise CheckpointError(f"{path} has no {size:,} bytes of data/{key}: it is damaged.")
        begin = window.data_begin(info)
        if begin + size > window.end:
            raise CheckpointError(f"{path} ends within data/{key}: it was cut off.")
        return _Storage(dtype, begin, size)

    return _unpickled(archive.read(described), str(path), storage, path)


def _unpickled(
    data: bytes, what: str, storage: Callable[[str, str, int], _Storage], file: Path | None = None
) -> Any:
    reader = _Reader(data, storage, file)
    try:
        _check_memo_indices(data)
        made = reader.load()
        _check_growth(made, most=_TIMES_ITS_BYTES * len(data))
        return made
    except _RejectedError as error:
        raise CheckpointError(f"{what}: {error.reason}{_hint(data)}") from error
    except CheckpointError as error:
        text = str(error)
        raise CheckpointError(text if text.startswith(what) else f"{what}: {text}") from error
    except Exception as error:  # a pickle may raise anything
        raise CheckpointError(
            f"{what} is damaged, or not a checkpoint ({type(error).__name__}: {error}). Copy it "
            "again."
        ) from error


_TIMES_ITS_BYTES = 8
"""A value takes a byte at least; what several places share, such as sizes, is read a few times."""
_MOST_DEPTH = 100
_PLACED = ("PUT", "BINPUT", "LONG_BINPUT")
_DAMAGED = "{}: no checkpoint has that. It was not read"


def _check_memo_indices(data: bytes) -> None:
    """A number of a place in memory takes all places before it, without a byte of the file.

    Raises:
        _RejectedError: There is one beyond what the file can have.
        ValueError: It is cut off, or speaks of more bytes than it has.
    """
    for operation, argument, _ in pickletools.genops(data):
        place = argument if operation.name in _PLACED else None
        if isinstance(place, int) and place > len(data):
            raise _RejectedError(_DAMAGED.format(f"it names place {place} of its memory"))


def _check_growth(root: Any, *, most: int) -> None:
    """A few bytes can hold a tree that holds itself, or doubles with each level.

    Raises:
        _RejectedError: It has more values than its bytes account for, or is too deep.
    """
    count, inside = 0, [(root, 0)]
    while inside:
        value, depth = inside.pop()
        count += 1
        if count > most or depth > _MOST_DEPTH:
            raise _RejectedError(
                _DAMAGED.format("it holds itself, or grows far beyond its bytes when it is read")
            )
        inside += [(each, depth + 1) for each in _parts(value)]


def _parts(value: Any) -> Iterable[Any]:
    match value:
        case dict():
            return (*value.keys(), *value.values())
        case list() | tuple() | set():
            return value
        case PickledObject():
            return (value.args, value.state)
        case _:
            return ()


def _hint(data: bytes) -> str:
    """What to do, by what else the pickle names."""
    names = {
        str(argument)
        for operation, argument, _ in pickletools.genops(data)
        if operation.name in ("GLOBAL", "SHORT_BINUNICODE", "BINUNICODE")
    }
    if any(name.startswith(_LOCAL) for name in names):
        return (
            " It holds shards as FSDP1 keeps them (LOCAL_STATE_DICT or SHARDED_STATE_DICT with "
            "torch.save), which only FSDP1 can put together: save with FULL_STATE_DICT, or with "
            "torch.distributed.checkpoint."
        )
    return (
        " Only tensors, numbers, strings, lists and dicts are taken from a checkpoint; no code of "
        "it was run. If you trust the file, save only its state dict, by torch.save."
    )


class _RejectedError(Exception):
    def __init__(self, reason: str) -> None:
        self.reason = reason


class _Reader(pickle.Unpickler):
    """Gives each name that a pickle asks for one of our own things."""

    def __init__(
        self, data: bytes, storage: Callable[[str, str, int], _Storage], file: Path | None
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._storage, self._file = storage, file
        self._most_copied = _TIMES_ITS_BYTES * len(data)

    def find_class(self, module: str, name: str) -> Any:
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        made = self._rebuilders.get((module, name))
        if made is not None:
            return _Function(bind_method(self, made))
        if (module, name) in _INERT or f"{module}.".startswith(_INERT_MODULES):
            return type("Record", (PickledObject,), {"name": f"{module}.{name}"})
        raise _RejectedError(f"it asks for {module}.{name}.")

    def persistent_load(self, identity: Any) -> _Storage:
        kind, dtype, key, _, elements = identity
        if (
            kind != "storage"
            or dtype not in ITEM_BYTES
            or type(elements) is not int
            or elements < 0
        ):
            raise _RejectedError("it asks for more than the bytes of a tensor.")
        return self._storage(dtype, str(key), elements)

    def _tensor(
        self, storage: _Storage, first: int, shape: Any, stride: Any, *_: Any, dtype: str = ""
    ) -> TensorView:
        dtype = dtype or storage.dtype
        item = ITEM_BYTES[dtype]
        sizes, steps = _sizes(shape), _sizes(stride)
        if len(sizes) != len(steps) or type(first) is not int or first < 0:
            raise CheckpointError("a tensor whose sizes and strides do not fit")
        elements = math.prod(sizes)
        reach = 1 + sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
        if elements and (first + reach) * item > storage.bytes:
            raise CheckpointError(f"a tensor of {sizes} reaches beyond its bytes")
        assert self._file is not None, "a storage needs a file"
        piece = TensorChunk(
            file=self._file,
            first_byte=storage.first_byte + first * item,
            shape=sizes,
            at=(0,) * len(sizes),
            stride=None if _is_row_by_row(sizes, steps) else steps,
        )
        return TensorView(dtype=dtype, shape=sizes, pieces=(piece,))

    def _tensor_of_bytes(
        self, storage: _Storage, first: int, shape: Any, stride: Any, _grad: Any, _hooks: Any,
        dtype: Any, *_: Any,
    ) -> TensorView:  # fmt: skip
        if dtype not in ITEM_BYTES:
            raise CheckpointError(f"a tensor of dtype {dtype!r}")
        return self._tensor(storage, first, shape, stride, dtype=dtype)

    def _parameter(self, data: Any, *_: Any) -> Any:
        return data

    def _of_type(self, function: Any, _type: Any, args: Any, _state: Any) -> Any:
        if not isinstance(function, _Function):
            raise CheckpointError("a tensor that is made by something else")
        return function(*args)

    def _dict(self, *args: Any) -> dict[Any, Any]:
        self._count_copied(*args)
        return _Dict(*args)

    def _emptied(self, *_: Any) -> dict[Any, Any]:
        return _Dict()

    def _size(self, sizes: Any) -> tuple[int, ...]:
        return _sizes(sizes)

    def _set(self, items: Any = ()) -> list[Any]:
        self._count_copied(items)
        return list(items)

    def _count_copied(self, *args: Any) -> None:
        """Count copied values, as repeated copies take memory that the file has no bytes for."""
        self._most_copied -= sum(len(arg) for arg in args)
        if self._most_copied < 0:
            raise _RejectedError(_DAMAGED.format("it copies the same values over and over"))

    def _encoded(self, text: Any, encoding: Any = "latin1") -> bytes:
        if not isinstance(text, str) or encoding != "latin1":
            raise CheckpointError("bytes in an encoding that torch does not write")
        return text.encode("latin1")

    _rebuilders: ClassVar[dict[tuple[str, str], Callable[..., Any]]] = {
        ("torch._utils", "_rebuild_tensor_v2"): _tensor,
        ("torch._utils", "_rebuild_tensor_v3"): _tensor_of_bytes,
        ("torch._utils", "_rebuild_parameter"): _parameter,
        ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
        ("torch._tensor", "_rebuild_from_type_v2"): _of_type,
        ("torch", "Size"): _size,
        ("collections", "OrderedDict"): _dict,
        ("collections", "defaultdict"): _emptied,
        ("builtins", "set"): _set,
        ("__builtin__", "set"): _set,
        ("_codecs", "encode"): _encoded,
    }


def bind_method(reader: _Reader, method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of the reader, bound."""
    return lambda *args: method(reader, *args)


_MOST_DIMENSIONS = 64
"""Most dimensions of a tensor in torch."""


def _sizes(values: Any) -> tuple[int, ...]:
    if (
        not isinstance(values, list | tuple)
        or len(values) > _MOST_DIMENSIONS
        or any(type(value) is not int or value < 0 for value in values)
    ):
        raise CheckpointError("sizes that are not whole numbers")
    return tuple(values)


def _is_row_by_row(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    step = 1
    for size, own in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and own != step:
            return math.prod(shape) == 0
        step *= size
    return True


class _FileWindow(io.RawIOBase):
    """A stretch of a file as a file."""

    def __init__(self, file: Any, first_byte: int, length: int) -> None:
        self._file, self._first, self._length = file, first_byte, length
        self._at = 0

    @property
    def end(self) -> int:
        """In the whole file."""
        return self._first + self._length

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(0, start + offset)
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._length - self._at)
        count = left if size is None or size < 0 else min(size, left)
        self._file.seek(self._first + self._at)
        data: bytes = self._file.read(count)
        self._at += len(data)
        return data

    def data_begin(self, info: zipfile.ZipInfo) -> int:
        """Return the offset of an entry's bytes in the whole file: behind its own header."""
        self.seek(info.header_offset)
        local = self.read(30)
        name, extra = int.from_bytes(local[26:28], "little"), int.from_bytes(local[28:30], "little")
        return self._first + info.header_offset + 30 + name + extra


def read_state_dict(path: Path) -> SourceCheckpoint:
    """Return a state dict that was saved whole: FSDP1's FULL_STATE_DICT, DDP's, one process's.

    Raises:
        CheckpointError: It holds no tensors by name, or is none.
        OSError: It cannot be read.
    """
    content = load(path)
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{path} holds {type(content).__name__}, no state dict. Save model.state_dict()."
        )
    leaves = dict(leaves_of(content))
    tensors = {name: value for name, value in leaves.items() if isinstance(value, TensorView)}
    if not tensors:
        raise CheckpointError(f"{path} holds no tensors, so it is not a checkpoint of a model.")
    kinds = top_level_names(leaves) - top_level_names(tensors)
    return SourceCheckpoint(
        format="torch.save",
        path=path,
        tensors=tensors,
        step=step_in(leaves),
        other_state=tuple(sorted(kinds - {*STEPS, "epoch"})),
    )


def leaves_of(content: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted name -> value, of each value that is no dict or list."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield from leaves_of(value, f"{path}.{key}" if path else str(key))
    elif isinstance(content, list | tuple):
        for number, value in enumerate(content):
            yield from leaves_of(value, f"{path}.{number}")
    else:
        yield path, content
