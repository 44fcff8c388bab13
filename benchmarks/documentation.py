"""Real text with documents and sentences: the prose of Debian's documentation packages.

A benchmark that needs text on any machine takes these packages, which Debian's archive keeps:

    python3.11-doc     reStructuredText (its _sources)
    perl-doc           POD
    postgresql-doc-15  HTML
    debian-handbook    HTML, the English part

Kept is what is a sentence or more: paragraphs. Code, tables, headings and lists of names are left
out. A document is a file. ``python -m benchmarks.documentation FOLDER`` fetches the packages with
apt-get, unpacks them below FOLDER and writes FOLDER/documents.jsonl.
"""

import argparse
import html
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path

PACKAGES = ("python3.11-doc", "perl-doc", "postgresql-doc-15", "debian-handbook")
_LEAST_WORDS = 8
_LEAST_PARAGRAPHS = 3
_LEAST_LETTERS = 0.7
"""Of the characters of a paragraph, letters and spaces: below that it is code or a table."""


def write_documents(unpacked: Path, target: Path) -> int:
    """Write the prose of unpacked packages as JSON lines; returns how many documents there are.

    Args:
        unpacked: Folder in which ``usr/share`` lies.
    """
    documents = 0
    with target.open("w") as file:
        for pattern, paragraphs_of in _KINDS.items():
            for path in sorted((unpacked / "usr/share").glob(pattern)):
                content = path.read_text(errors="replace")
                kept = [text for text in map(_plain, paragraphs_of(content)) if _is_prose(text)]
                if len(kept) >= _LEAST_PARAGRAPHS:
                    file.write(json.dumps({"text": "\n\n".join(kept)}) + "\n")
                    documents += 1
    return documents


def rst_paragraphs(content: str) -> Iterator[str]:
    """Paragraphs of reStructuredText that are not indented: what is, is mostly code or a list."""
    for block in _blocks(content):
        if not block[0].isspace() and not block.startswith((".. ", "* ", "- ", "+", "=", "::")):
            text = re.sub(r":[\w:+.-]+:`~?([^`<]*?)\s*(?:<[^`>]*>)?`", r"\1", block)
            text = re.sub(r"`([^`<]+?)\s*<[^`>]*>`_+", r"\1", text)
            yield re.sub(r"[`*|]+", "", text).replace("::", ":")


def pod_paragraphs(content: str) -> Iterator[str]:
    """Paragraphs of POD: neither commands nor indented."""
    for block in _blocks(content):
        if not block[0].isspace() and not block.startswith("="):
            text = re.sub(r"E<(?!lt|gt)(\w+)>", lambda found: html.unescape(f"&{found[1]};"), block)
            text = re.sub(r"L<([^<>|]*)(?:\|[^<>]*)?>", r"\1", text)
            text = re.sub(r"[A-Z]<<+ (.*?) >>+", r"\1", text, flags=re.DOTALL)
            while (inner := re.sub(r"[A-Z]<([^<>]*)>", r"\1", text)) != text:
                text = inner
            yield text


def html_paragraphs(content: str) -> Iterator[str]:
    """What stands in ``p`` elements."""
    found = _Paragraphs()
    found.feed(content)
    yield from found.texts


class _Paragraphs(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._parts: list[str] | None = None

    def handle_starttag(self, tag: str, attrs: object) -> None:  # noqa: ARG002 - theirs
        if tag in ("p", "pre", "table"):
            self._end()
        if tag == "p":
            self._parts = []

    def handle_endtag(self, tag: str) -> None:
        if tag == "p":
            self._end()

    def handle_data(self, data: str) -> None:
        if self._parts is not None:
            self._parts.append(data)

    def _end(self) -> None:
        if self._parts is not None:
            self.texts.append("".join(self._parts))
        self._parts = None


_KINDS: dict[str, Callable[[str], Iterator[str]]] = {
    "doc/python3.11/html/_sources/**/*.rst.txt": rst_paragraphs,
    "perl/**/*.pod": pod_paragraphs,
    "doc/postgresql-doc-15/html/*.html": html_paragraphs,
    "doc/debian-handbook/html/en-US/*.html": html_paragraphs,
}


def _blocks(content: str) -> Iterator[str]:
    return (
        block for block in re.split(r"\n[^\S\n]*\n", content.replace("\r", "")) if block.strip()
    )


def _plain(text: str) -> str:
    return " ".join(text.split())


def _is_prose(text: str) -> bool:
    letters = sum(letter.isalpha() or letter == " " for letter in text)
    is_sentence = text[-1:] in ".!?:" and text.count(" ") >= _LEAST_WORDS
    return is_sentence and letters >= _LEAST_LETTERS * len(text)


def fetch(folder: Path) -> None:
    """Packages into ``folder``, unpacked, by apt-get; needs Debian and its archive."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "download", *PACKAGES], cwd=folder, check=True)
    for package in sorted(folder.glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", str(package), str(folder)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    if not (folder / "usr/share").is_dir():
        fetch(folder)
    target = folder / "documents.jsonl"
    documents = write_documents(folder, target)
    print(f"{target}: {documents:,} documents, {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
