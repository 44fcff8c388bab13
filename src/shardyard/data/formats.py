"""Formats of files with documents: one row each, chosen by the suffix of the file's name.

A reader gets an open file and the part of it that is its own. It never guesses: unreadable
content is rejected with file and line. ``sources.py`` decides which files there are.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import BinaryIO

from shardyard.config.data_choices import DATA_FORMATS
from shardyard.config.split_names import Kind
from shardyard.data.byte_ranges import Span, TextSection
from shardyard.data.readers.columns import TextOf
from shardyard.plugins import load_entry_point, load_object, plug_in_named

SECTION_BYTES = 64 * 1024
"""A text file above this is read in sections of about this size. Sections are held out
one by one, so that a corpus of one book has a held-out part too."""

Reader = Callable[[BinaryIO, Span, TextOf], Iterator[TextSection]]
"""(file, span, what of a row is text) -> the documents that begin in the span."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """One way to write documents into a file."""

    suffixes: tuple[str, ...]
    """In lower case; case does not matter. Of two parts where the last says how it is packed."""
    code: str
    """module:function of its ``Reader``, imported when a file is read."""
    has_keys: bool
    """Whether it has rows, whose text is under data.text_key."""
    is_divisible: bool
    """Whether a span may begin and end anywhere; if not, it is the whole file."""
    companions: tuple[str, ...] = ()
    """Ends of the names of files that lie next to such files and describe them."""

    @property
    def read(self) -> Reader:
        reader: Reader = load_object(None, self.code)
        return reader


_CODE = (
    ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".cxx", ".hh", ".hpp", ".cu", ".cuh",
    ".java", ".kt", ".scala", ".js", ".mjs", ".jsx", ".ts", ".tsx", ".go", ".rs", ".rb",
    ".php", ".pl", ".pm", ".lua", ".jl", ".r", ".m", ".swift", ".cs", ".fs", ".hs", ".ml",
    ".ex", ".exs", ".erl", ".clj", ".el", ".f90", ".sh", ".bash", ".sql",
)  # fmt: skip
"""Suffixes of source code."""

FORMATS: dict[str, Format] = {
    "text": Format(
        suffixes=(".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".log", *_CODE),
        code="shardyard.data.readers.text:read_text",
        has_keys=False,
        is_divisible=True,
    ),
    "jsonl": Format(
        suffixes=(".jsonl", ".ndjson"),
        code="shardyard.data.readers.json:read_json_lines",
        has_keys=True,
        is_divisible=True,
    ),
    "json": Format(
        suffixes=(".json",),
        code="shardyard.data.readers.json:read_json_file",
        has_keys=True,
        is_divisible=False,
    ),
    "jsonl_gz": Format(
        suffixes=(".jsonl.gz", ".ndjson.gz"),
        code="shardyard.data.readers.json:read_gzip",
        has_keys=True,
        is_divisible=False,
    ),
    "jsonl_zst": Format(
        suffixes=(".jsonl.zst", ".ndjson.zst"),
        code="shardyard.data.readers.json:read_zstd",
        has_keys=True,
        is_divisible=False,
    ),
    "jsonl_bz2": Format(
        suffixes=(".jsonl.bz2", ".ndjson.bz2"),
        code="shardyard.data.readers.json:read_bz2",
        has_keys=True,
        is_divisible=False,
    ),
    "jsonl_xz": Format(
        suffixes=(".jsonl.xz", ".ndjson.xz"),
        code="shardyard.data.readers.json:read_xz",
        has_keys=True,
        is_divisible=False,
    ),
    "csv": Format(
        suffixes=(".csv",),
        code="shardyard.data.readers.csv:read_csv",
        has_keys=True,
        is_divisible=False,
    ),
    "tsv": Format(
        suffixes=(".tsv",),
        code="shardyard.data.readers.csv:read_tsv",
        has_keys=True,
        is_divisible=False,
    ),
    "arrow": Format(
        suffixes=(".arrow", ".feather"),
        code="shardyard.data.readers.arrow:read_arrow",
        has_keys=True,
        is_divisible=False,
    ),
    "documents": Format(
        suffixes=(),
        code="shardyard.data.readers.text:read_documents",
        has_keys=False,
        is_divisible=True,
    ),
    "wikipedia": Format(
        suffixes=(".xml",),
        code="shardyard.data.readers.wikipedia:read",
        has_keys=False,
        is_divisible=True,
    ),
    "wikipedia_bz2": Format(
        suffixes=(".xml.bz2",),
        code="shardyard.data.readers.wikipedia:read_bz2",
        has_keys=False,
        is_divisible=True,
    ),
    "bert_h5": Format(
        suffixes=(".h5", ".hdf5", ".hdf"),
        code="shardyard.data.readers.bert_h5:read",
        has_keys=False,
        is_divisible=False,
    ),
    "parquet": Format(
        suffixes=(".parquet",),
        code="shardyard.data.readers.arrow:read_parquet",
        has_keys=True,
        is_divisible=True,
    ),
    "ids_bin": Format(
        suffixes=(".bin",),
        code="shardyard.data.readers.token_ids:read_bin",
        has_keys=False,
        is_divisible=True,
        companions=(".idx", "meta.pkl"),
    ),
    "ids_npy": Format(
        suffixes=(".npy",),
        code="shardyard.data.readers.token_ids:read_npy",
        has_keys=False,
        is_divisible=True,
    ),
    "ids_datatrove": Format(
        suffixes=(".ds",),
        code="shardyard.data.readers.token_ids:read_datatrove",
        has_keys=False,
        is_divisible=True,
        companions=(".ds.index", ".ds.metadata"),
    ),
    "ids_mds": Format(
        suffixes=(".mds",),
        code="shardyard.data.readers.mds:read_mds",
        has_keys=False,
        is_divisible=False,
        companions=("index.json",),
    ),
}  # fmt: skip
"""Name -> format; a suffix belongs to one of them."""

_TAKEN_ALONE = {name for row in DATA_FORMATS.values() for name in row.only}
"""Formats that one ``data.format`` takes, and no other does."""

READ_KINDS = "text or source code (.txt, .md, .py and the like), " + ", ".join(
    suffix
    for name, format in FORMATS.items()
    if name not in ("text", *_TAKEN_ALONE)
    for suffix in format.suffixes
)
"""Kinds of files that are read, in words."""

_PART_OF_DUMP = re.compile(r"\.xml-p\d+p\d+(?=\.bz2$)")
"""Wikimedia names the parts of a dump by their pages: ``.xml-p1p41242.bz2``."""

_BY_SUFFIX = {suffix: name for name, format in FORMATS.items() for suffix in format.suffixes}

_UNPACK = "unpack it first (gunzip, zstd -d, bunzip2, unzip, tar -x)"
_TABLE = (
    "turn it into CSV or JSON lines first, such as with pandas: `read_excel(...)`, then "
    "`.to_json(FILE.jsonl, orient='records', lines=True)`"
)
_EXTRACT = "take its text out first"
_PACKED = (".gz", ".zst", ".zstd", ".bz2", ".xz", ".zip", ".tar", ".tgz", ".7z", ".lz4")
_ID_SUFFIXES = [
    suffix for name in DATA_FORMATS["token_ids"].only for suffix in FORMATS[name].suffixes
]
_OTHERS: dict[str, str] = {
    **dict.fromkeys(
        FORMATS["bert_h5"].suffixes, "if it holds BERT's arrays, set data.format=bert_h5"
    ),
    **dict.fromkeys(_ID_SUFFIXES, "if it holds ids of a tokenizer, set data.format=token_ids"),
    **dict.fromkeys(_PACKED, _UNPACK),
    **dict.fromkeys((".orc", ".xlsx"), _TABLE),
    **dict.fromkeys((".pdf", ".docx", ".odt", ".epub", ".html", ".htm"), _EXTRACT),
}
"""Kinds that hold text which is not read yet -> what to do about it."""


def format_named(name: str) -> Format:
    """The format of a name, ours or a package's: that is called by its suffix, ``.ltr``.

    Raises:
        RequestError: A package's cannot be used.
    """
    ours = FORMATS.get(name)
    if ours is not None:
        return ours
    format: Format = load_entry_point("sources", name, builtin=FORMATS, validate=_format_error)
    return format


def _format_error(content: object) -> str:
    is_format = isinstance(content, Format)
    return "" if is_format else f"is {type(content).__name__}, not a shardyard.data.formats.Format"


def format_of(name: str, data_format: str) -> str | None:
    """The format of a file by the end of its name; None: it has none that is known, or one without
    rows where ``data.format`` takes rows.

    Args:
        data_format: ``data.format``, which says what is of no known kind.
    """
    whole = _PART_OF_DUMP.sub(".xml", name)
    suffixes = [suffix.lower() for suffix in PurePath(whole).suffixes]
    longest_first = ("".join(suffixes[-2:]), "".join(suffixes[-1:]))
    known = next((_BY_SUFFIX[suffix] for suffix in longest_first if suffix in _BY_SUFFIX), None)
    if known is None and suffixes and plug_in_named("sources", suffixes[-1]) is not None:
        return suffixes[-1]
    row = DATA_FORMATS[data_format]
    if known in _TAKEN_ALONE:
        return known if known in row.only else None
    if known is not None and row.whole_row is not None and not FORMATS[known].has_keys:
        return None
    if row.only and row.whole_row is None:
        return None
    if known == "text" and row.text is not None:
        return row.text
    return row.unknown if known is None else known


def is_companion(name: str, data_format: str) -> bool:
    """Whether a file describes others of the ``data.format``, and has no documents itself."""
    ends = [end for each in DATA_FORMATS[data_format].only for end in FORMATS[each].companions]
    return any(name.endswith(end) for end in ends)


def kind_of(name: str, format: str) -> Kind:
    """Return the kind of a file, for the split that its name may name."""
    if format not in ("text", "documents"):
        return "rows"
    return "code" if PurePath(name).suffix.lower() in _CODE else "text"


def remedy_of(name: str, data_format: str = "by_suffix") -> str:
    """What to do about a file without a format."""
    suffix = PurePath(name).suffix.lower()
    row = DATA_FORMATS[data_format]
    if row.only and (row.whole_row is None or suffix not in _OTHERS):
        suffixes = [each for only in row.only for each in FORMATS[only].suffixes]
        rows = "" if row.whole_row is None else ", and rows such as those of .parquet and .jsonl"
        return f"data.format={data_format} takes only {', '.join(suffixes)}{rows}"
    if row.whole_row is not None and suffix not in _OTHERS:
        return f"data.format={data_format} takes rows, such as those of a .jsonl file"
    return _OTHERS.get(suffix, "if it is plain text, set data.format=text")
