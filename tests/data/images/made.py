"""Pictures of every kind, and places that hold them, for tests."""

import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image


def noise(seed: int, size: tuple[int, int] = (24, 16)) -> Image.Image:
    """A picture of soft noise, (width, height)."""
    draw = np.random.default_rng(seed)
    small = draw.integers(0, 256, (4, 6, 3), dtype=np.uint8)
    return Image.fromarray(small).resize(size, Image.Resampling.BICUBIC)


def saved(picture: Image.Image, format: str = "JPEG", **options: Any) -> bytes:
    """The bytes of a file."""
    buffer = io.BytesIO()
    picture.save(buffer, format, **options)
    return buffer.getvalue()


def tar_bytes(members: Mapping[str, bytes], format: int = tarfile.USTAR_FORMAT) -> bytes:
    """A tar file of these members."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def shard(numbers: range, classes: int = 3) -> dict[str, bytes]:
    """Members as webdataset has them: a picture and the number of its class."""
    members = {}
    for number in numbers:
        members[f"{number:06d}.jpg"] = saved(noise(number))
        members[f"{number:06d}.cls"] = str(number * 7 % classes).encode()
    return members


def class_folders(folder: Path, names: Mapping[str, range], *, below: str = "") -> Path:
    """``folder/below/CLASS/number.jpg`` for each class and its numbers."""
    for name, numbers in names.items():
        place = folder / below / name
        place.mkdir(parents=True, exist_ok=True)
        for number in numbers:
            (place / f"{number}.jpg").write_bytes(saved(noise(number)))
    return folder


def parquet_file(path: Path, numbers: range, names: list[str] | None = None) -> Path:
    """As Hugging Face's datasets write pictures."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    count = len(names or "abc")
    rows = {
        "image": [{"bytes": saved(noise(n), "PNG"), "path": f"{n}.png"} for n in numbers],
        "label": [n % count for n in numbers],
    }
    table = pyarrow.table(rows)
    if names is not None:
        features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
        about = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
        table = table.replace_schema_metadata(about)
    parquet.write_table(table, path, row_group_size=10)
    return path
