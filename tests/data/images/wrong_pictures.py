"""Sources of pictures that are broken or odd, one row a kind: what is there, and what is told.

A row makes its files in a folder and gives the source. Of each message the file is named, and the
member or row where there is one. Rows without words are odd, and become a data set.
"""

import gzip
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.data.images.made import class_folders, noise, parquet_file, saved, shard, tar_bytes

Make = Callable[[Path], Any]


@dataclass(frozen=True)
class Wrong:
    """One kind of broken or odd source."""

    name: str
    make: Make
    """Writes files; returns ``data.source``."""
    words: str | None = None
    """Regular expression that the message fits; None: all its pictures are read."""
    images: Mapping[str, Any] | None = None
    """Settings of ``data.images``."""


def _beside(name: str, content: bytes) -> Make:
    """A file beside twenty sound pictures in class folders."""

    def make(folder: Path) -> str:
        place = class_folders(folder / "a", {"ant": range(10), "bee": range(10, 20)})
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_bytes(content)
        return str(place)

    return make


def _picture(content: bytes) -> Make:
    return _beside("bee/odd.jpg", content)


def _shard(change: Callable[[dict[str, bytes]], Any], name: str = "a.tar") -> Make:
    """A tar shard of ten pictures, of which something is changed."""

    def make(folder: Path) -> str:
        members = shard(range(10))
        changed = change(members)
        content = changed if isinstance(changed, bytes) else tar_bytes(members)
        (folder / name).write_bytes(content)
        return str(folder / name)

    return make


def _with(name: str, content: bytes) -> Make:
    return _shard(lambda members: members.update({name: content}))


def _without(name: str) -> Make:
    return _shard(lambda members: members.pop(name) and None)


def _parquet(change: Callable[[Any, Path], object]) -> Make:
    def make(folder: Path) -> str:
        path = parquet_file(folder / "a.parquet", range(10))
        parquet = pytest.importorskip("pyarrow.parquet")
        change(parquet.read_table(path), path)
        return str(path)

    return make


def _rows(**columns: Any) -> Make:
    """A Parquet file with other columns."""

    def change(table: Any, path: Path) -> None:
        pyarrow = pytest.importorskip("pyarrow")
        content = {**table.to_pydict(), **columns}
        kept = {name: values for name, values in content.items() if values is not None}
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table(kept), path)

    return _parquet(change)


def _link(folder: Path) -> str:
    with tarfile.open(folder / "a.tar", "w") as tar:
        info = tarfile.TarInfo("1.jpg")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(info)
    return str(folder / "a.tar")


def _val_only(folder: Path) -> str:
    class_folders(folder / "a", {"ant": range(9)}, below="train")
    return str(class_folders(folder / "a", {"bee": range(9, 12)}, below="val"))


def _mixed_kinds(folder: Path) -> str:
    place = class_folders(folder / "a", {"ant": range(3)})
    (place / "b.tar").write_bytes(tar_bytes(shard(range(3))))
    return str(place)


JPEG = saved(noise(1, (64, 48)))
PNG = saved(noise(1, (64, 48)), "PNG")
SHARD = tar_bytes(shard(range(10)))
SECOND = SHARD.index(b"000001.jpg")
"""Where the header of the second picture begins."""
_ODD = r"a/bee/odd\.jpg is "
_DAMAGED = _ODD + "damaged, cut off or of a kind"
_TAR = r"a\.tar"

BROKEN = [
    Wrong("an empty picture", _picture(b""), _ODD + "empty"),
    Wrong("a picture that is cut off", _picture(JPEG[:-300]), _DAMAGED),
    Wrong("a head without a picture", _picture(JPEG[:200]), _ODD + "(not a JPEG|damaged)"),
    Wrong("a PNG without its end", _picture(PNG[:-60]), _DAMAGED),
    Wrong("a PNG with a wrong checksum", _picture(PNG[:60] + bytes(4) + PNG[64:]), _DAMAGED),
    Wrong("zeros", _picture(bytes(5000)), _ODD + "not a JPEG"),
    Wrong("a page of a web server", _picture(b"<html>404</html>"), _ODD + "a web page"),
    Wrong("a drawing (SVG)", _picture(b"<svg></svg>"), _ODD + "not a JPEG"),
    Wrong("PostScript", _picture(b"%!PS-Adobe-3.0 EPSF-3.0\n"), _ODD + "not a JPEG"),
    Wrong(
        "a few kB that unpack to a GB",
        _picture(saved(Image.new("1", (20_000, 20_000)), "PNG")),
        _ODD + "too large a picture",
    ),
    Wrong(
        "floating-point numbers",
        _picture(saved(Image.new("F", (8, 8)), "TIFF")),
        r"a/bee/odd\.jpg holds floating-point",
    ),
    Wrong("a file of another kind in a class", _beside("bee/notes.txt", b"x"), r"bee/notes\.txt"),
    Wrong("a picture in no class", _beside("odd.jpg", JPEG), r"in no class folder: odd\.jpg"),
    Wrong("a class in val alone", _val_only, r"1 of 2 classes .*\(bee\)"),
    Wrong(
        "files of several kinds", _mixed_kinds, "files of several kinds: 3 of folders, 1 of shards"
    ),
    Wrong("an empty shard", _shard(lambda _: b""), _TAR + " is empty"),
    Wrong("a shard without members", _shard(lambda _: bytes(10_240)), "holds no picture"),
    Wrong(
        "a shard cut in a picture", _shard(lambda _: SHARD[: SECOND + 700]), _TAR + " is .*cut off"
    ),
    Wrong(
        "a shard cut in a header", _shard(lambda _: SHARD[: SECOND + 100]), _TAR + " is .*cut off"
    ),
    Wrong("a shard cut between members", _shard(lambda _: SHARD[:SECOND]), _TAR + " is .*cut off"),
    Wrong(
        "a damaged header",
        _shard(lambda _: SHARD[:SECOND] + b"x" * 100 + SHARD[SECOND + 100 :]),
        _TAR + " is damaged or cut off at byte",
    ),
    Wrong("two shards put together", _shard(lambda _: SHARD + SHARD), "continues behind its end"),
    Wrong("a shard that is no tar file", _shard(lambda _: JPEG * 9), _TAR + " is damaged"),
    Wrong("a link in a shard", _link, r"a\.tar: member 1\.jpg is a link"),
    Wrong(
        "a picture without its label", _without("000003.cls"), r"member 000003\.jpg has no label"
    ),
    Wrong(
        "a label without its picture", _without("000003.jpg"), r"member 000003\.cls belongs to no"
    ),
    Wrong("an empty label", _with("000003.cls", b""), r"member 000003\.jpg: its \.cls is empty"),
    Wrong(
        "a negative label", _with("000003.cls", b"-1"), r"000003\.jpg: its label '-1' is neither"
    ),
    Wrong(
        "a label of another world", _with("000003.cls", b"90000000"), "labels go up to 90,000,000"
    ),
    Wrong("two pictures of one name", _with("000003.png", PNG), "are of one sample"),
    Wrong(
        "a broken picture in a shard", _with("000003.jpg", JPEG[:-300]), r"a\.tar, member 000003"
    ),
    Wrong(
        "a packed shard that is cut off",
        _shard(lambda _: gzip.compress(SHARD)[:-2000], "a.tar.gz"),
        r"a\.tar\.gz is not a gzip file, or is damaged or cut off",
    ),
    Wrong(
        "rows without bytes",
        _rows(image=[{"bytes": None, "path": "x"}] * 10),
        "row 1: 'image' holds no",
    ),
    Wrong("rows without labels", _rows(label=[None] * 10), "row 1: its label None is neither"),
    Wrong("labels of a test set", _rows(label=[-1] * 10), "row 1: its label -1 is neither"),
    Wrong("no column of labels", _rows(label=None), "no column 'label' .*data.images.label_key"),
    Wrong(
        "a broken picture in a row",
        _rows(image=[{"bytes": JPEG[:-300], "path": "x"}] * 10),
        r"a\.parquet, row 1 is damaged",
    ),
    Wrong(
        "a Parquet file that is cut off",
        _parquet(lambda _, path: path.write_bytes(path.read_bytes()[:-100])),
        r"a\.parquet cannot be read as Parquet",
    ),
]

_GREY16 = Image.fromarray((np.arange(64, dtype=np.uint16) * 999).reshape(8, 8))

ODD = [
    Wrong("a PNG that is called .jpg", _picture(PNG)),
    Wrong("16 bits of grey", _picture(saved(_GREY16, "PNG"))),
    Wrong("CMYK", _picture(saved(Image.new("CMYK", (8, 8)), "JPEG"))),
    Wrong("a palette", _picture(saved(noise(1).convert("P"), "GIF"))),
    Wrong("alpha", _picture(saved(noise(1).convert("RGBA"), "PNG"))),
    Wrong("one pixel", _picture(saved(Image.new("RGB", (1, 1)), "PNG"))),
    Wrong(
        "an animation", _picture(saved(noise(1), "GIF", save_all=True, append_images=[noise(2)]))
    ),
    Wrong("a capital suffix", _beside("bee/odd.JPEG", JPEG)),
    Wrong("a page beside class folders", _beside("README.md", b"about")),
    Wrong("a hidden file", _beside("bee/.DS_Store", b"x")),
    Wrong("a name that is not UTF-8", _beside("bee/\udcff\udcfe.jpg", JPEG)),
    Wrong("a folder in a class", _beside("bee/more/odd.jpg".replace("more/", "more_"), JPEG)),
    Wrong("parts of a mask in a shard", _with("000003.seg.png", PNG)),
    Wrong("hidden files of a Mac in a shard", _with("._000003.jpg", b"x")),
]
