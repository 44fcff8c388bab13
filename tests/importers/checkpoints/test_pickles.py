"""A checkpoint's pickle runs nothing: hostile ones are refused by the name of what they ask for."""

import io
import os
import pickle
import resource
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardyard.errors import CheckpointError
from shardyard.importers.checkpoints.pickles import MAX_PICKLE_BYTES, load, loads
from shardyard.importers.checkpoints.tensors import TensorView, blocks


def saved(path: Path, pickled: bytes, **entries: bytes) -> Path:
    """A file as torch.save writes them, with a pickle of one's own."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("x/data.pkl", pickled)
        archive.writestr("x/byteorder", "little")
        for name, content in entries.items():
            archive.writestr(f"x/{name.replace('__', '/')}", content)
    return path


class Asks:
    """Is pickled as the call of a function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


MARK = "ran"
HOSTILE = {
    "a shell": (pickle.dumps(Asks(os.system, f"touch {MARK}")), "posix.system"),
    "eval": (pickle.dumps(Asks(eval, f"open({MARK!r}, 'w')")), "builtins.eval"),
    "old names of builtins": (b"c__builtin__\neval\n(V1+1\ntR.", "__builtin__.eval"),
    "an attribute of what is allowed": (
        pickle.dumps(Asks(getattr, OrderedDict, "fromkeys")), "builtins.getattr",
    ),
    "within a state dict": (
        pickle.dumps({"model": {"a": 1, "b": [Asks(os.system, f"touch {MARK}")]}}), "posix.system",
    ),
    "a dotted name below an allowed one": (
        b"\x80\x04\x8c\x05torch\x8c\x0fTensor.__init__\x93.", "torch.Tensor.__init__",
    ),
    "a module like an allowed one": (
        b"\x80\x04\x8c\x0edeepspeed_evil\x8c\x03run\x93.", "deepspeed_evil.run",
    ),
    "an instance by its class": (b"(ios\nsystem\n.", "os.system"),
    "a partial function": (
        b"cfunctools\npartial\n(cos\nsystem\nV1\ntR.", "functools.partial",
    ),
    "a type made by the pickle": (b"cbuiltins\ntype\n(VA\n)dtR.", "builtins.type"),
    "an import": (b"cimportlib\nimport_module\n(Vos\ntR.", "importlib.import_module"),
    "a file": (b"cbuiltins\nopen\n(V/etc/passwd\ntR.", "builtins.open"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_pickle_is_refused_by_what_it_asks_for(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pickled, asked = HOSTILE[kind]
    with pytest.raises(CheckpointError, match=f"it asks for {asked.replace('.', '[.]')}[.]"):
        load(saved(tmp_path / "a.pt", pickled))
    assert not (tmp_path / MARK).exists()


def test_what_stands_beside_tensors_is_inert(tmp_path: Path) -> None:
    """A class of DeepSpeed's is a record of what it was made of, whatever it would have done."""
    pickled = b"cdeepspeed.os\nsystem\n(Vtouch ran\ntR."
    record = load(saved(tmp_path / "a.pt", pickled))
    assert (record.name, record.args) == ("deepspeed.os.system", ("touch ran",))
    assert not callable(record)


TENSOR = (
    b"ctorch._utils\n_rebuild_tensor_v2\n((Vstorage\nctorch\nFloatStorage\nV0\nVcpu\nI%d\ntQ%stR."
)
BROKEN = {
    "bytes that no entry holds": (TENSOR % (10**9, b"I0\n(I1\nt(I1\ntI00\nN"), "has no 4,0"),
    "a tensor beyond its bytes": (TENSOR % (2, b"I0\n(I5\nt(I1\ntI00\nN"), "beyond its bytes"),
    "one that begins beyond": (TENSOR % (2, b"I7\n(I1\nt(I1\ntI00\nN"), "beyond its bytes"),
    "one with a step backwards": (TENSOR % (2, b"I1\n(I2\nt(I-1\ntI00\nN"), "not whole numbers"),
    "sizes without strides": (TENSOR % (2, b"I0\n(I2\nt(tI00\nN"), "do not fit"),
    "the end of a pickle": (pickle.dumps({"a": 1})[:-3], "is damaged"),
    "a state for a function": (b"ctorch._utils\n_rebuild_parameter\n(dVa\nI1\nsb.", "a function"),
    "another storage": (
        b"(Vother\nctorch\nFloatStorage\nV0\nVcpu\nI2\ntQ.",
        "more than the bytes of a tensor",
    ),
    "a name for a storage": (b"Vpath\nQ.", "is damaged"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_damaged_pickle_is_named(kind: str, tmp_path: Path) -> None:
    pickled, words = BROKEN[kind]
    with pytest.raises(CheckpointError, match=words):
        load(saved(tmp_path / "a.pt", pickled, data__0=b"\0" * 8))


def test_a_compressed_description_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", b"\0" * 10**6)
    with pytest.raises(CheckpointError, match="or is compressed; torch writes it neither"):
        load(path)
    assert MAX_PICKLE_BYTES >= 2**28, "checkpoints of many experts have hundreds of thousands"


def test_a_file_of_before_zip_is_told_from_a_cut_one(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"in the format of torch 1\.6"):
        load(path)
    torch.save({"a": torch.ones(2000)}, path)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(CheckpointError, match="copy it again"):
        load(path)


def test_a_pickle_without_a_file_may_speak_of_no_bytes() -> None:
    with pytest.raises(CheckpointError, match="which it does not hold"):
        loads(TENSOR % (2, b"I0\n(I2\nt(I1\ntI00\nN"), "metadata")


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda x: x,
    "a slice": lambda x: x[2:5],
    "transposed": lambda x: x.t(),
    "every second": lambda x: x[::2, 1::3],
    "expanded": lambda x: x[:1].expand(4, -1),
    "of no dimension": lambda x: x[1, 1],
    "empty": lambda x: x[:0],
    "a parameter": lambda x: torch.nn.Parameter(x),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_tensors_are_read_as_torch_reads_them(
    view: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    tensor = VIEWS[view](torch.randn(7, 11).to(dtype))
    path = tmp_path / "a.pt"
    torch.save({"x": [tensor]}, path)
    stored = load(path)["x"][0]
    assert isinstance(stored, TensorView) and stored.shape == tuple(tensor.shape)
    held = b"".join(map(bytes, blocks(stored, stored.dtype)))
    assert held == tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("target", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_are_changed_as_torch_changes_them(
    source: torch.dtype, target: str, tmp_path: Path
) -> None:
    names = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    torch.manual_seed(1)
    ties = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001], dtype=torch.int32).view(torch.float32)
    ends = torch.tensor([0.0, -0.0, 3e38, -3.4e38, float("inf"), 1e-40, 65520.0, 6e-8])
    tensor = torch.cat([torch.randn(1000), ties, ends]).to(source)
    torch.save(tensor, tmp_path / "a.pt")
    held = b"".join(map(bytes, blocks(load(tmp_path / "a.pt"), target)))
    wanted = tensor.to(names[target])
    if source == torch.float64 and target == "BF16":
        wanted = tensor.float().to(torch.bfloat16)  # rounded twice, as torch's own kernels do
    assert held == wanted.view(torch.uint8).numpy().tobytes()


def test_not_a_number_stays_one(tmp_path: Path) -> None:
    torch.save(torch.tensor([float("nan")]), tmp_path / "a.pt")
    held = b"".join(map(bytes, blocks(load(tmp_path / "a.pt"), "BF16")))
    assert torch.frombuffer(bytearray(held), dtype=torch.bfloat16).isnan().all()


def test_a_stretch_of_a_file_is_a_file(tmp_path: Path) -> None:
    """As torch.distributed.checkpoint keeps them: one behind the other."""
    parts = [io.BytesIO() for _ in range(3)]
    for number, part in enumerate(parts):
        torch.save(torch.full((5,), float(number)), part)
    whole = tmp_path / "a.distcp"
    whole.write_bytes(b"".join(part.getvalue() for part in parts))
    sizes = [len(part.getvalue()) for part in parts]
    stored = load(whole, first_byte=sizes[0], length=sizes[1])
    assert b"".join(map(bytes, blocks(stored, "F32"))) == torch.ones(5).numpy().tobytes()


def doubling(levels: int) -> bytes:
    """A list of the same list twice, and so on: 2 ** levels values in a few bytes a level."""
    level: list[Any] = []
    for _ in range(levels):
        level = [level, level]
    return pickle.dumps(level, protocol=2)


def endless() -> bytes:
    held: list[Any] = []
    held.append(held)
    return pickle.dumps({"model": held}, protocol=2)


def nested(depth: int) -> bytes:
    return b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b"."


EATERS = {
    "a far place in memory": (b"\x80\x02]r\xff\xff\xff\x7f.", "place 2147483647 of its memory"),
    "a far place, in text": (b"]p2147483647\n.", "place 2147483647 of its memory"),
    "bytes that it does not have": (b"\x80\x05\x96\xff\xff\xff\xff\x00\x00\x00\x00.", "damaged"),
    "lists that double": (doubling(60), "grows far beyond its bytes"),
    "a list that holds itself": (endless(), "it holds itself"),
    "lists in lists": (nested(100_000), "grows far beyond its bytes"),
    "a set over and over": (
        b"\x80\x02c__builtin__\nset\nq\x00](" + b"K\x01" * 5000 + b"eq\x01"
        + b"h\x00h\x01\x85R0" * 5000 + b".",
        "copies the same values over and over",
    ),
    "many dimensions": (
        b"\x80\x02ctorch\nSize\n(" + b"K\x01" * 100 + b"t\x85R.",
        "sizes that are not whole numbers",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EATERS)
def test_few_bytes_cannot_take_the_machines_memory_or_time(name: str, tmp_path: Path) -> None:
    pickled, why = EATERS[name]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=why):
        load(saved(tmp_path / "a.pt", pickled))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024


def test_values_that_several_places_share_are_read(tmp_path: Path) -> None:
    sizes = tuple(range(20))
    state = {f"layer.{number}": {"shape": sizes, "step": 1} for number in range(200)}
    torch.save(state, tmp_path / "a.pt")
    assert load(tmp_path / "a.pt") == state
