"""What a built site may not have: links that lead nowhere, and anything fetched from elsewhere."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_STYLE_LOADS = re.compile(r"(?:@import\s+|url\()[\"']?((?:https?:)?//[^\"')]+)")
_NOT_LINKED = {"404.html"}
"""A server shows it at any address, so that it names its files by the server's root."""


@dataclass
class Page(HTMLParser):
    """What one page links to, loads, and can be linked to."""

    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    has_diagram: bool = False
    """Whether the theme's script would fetch one that draws it."""

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        self.has_diagram |= "mermaid" in given.get("class", "").split()
        addresses = [given[name] for name in ("src", "href", "data") if given.get(name)]
        if tag == "a" or given.get("rel") in ("prev", "next", "canonical"):
            self.links += addresses
        else:
            self.loads += addresses


def problems(site: Path) -> Iterator[str]:
    """Each link or address of a built site that is wrong, with the page that has it."""
    for path in sorted(site.rglob("*.html")):
        if path.name in _NOT_LINKED:
            continue
        page, name = read(path), path.relative_to(site)
        for link in [*page.links, *page.loads]:
            if not _leads_somewhere(link, path):
                yield f"{name}: {link} leads nowhere"
        for address in page.loads:
            if urlsplit(address).netloc:
                yield f"{name}: {address} would be fetched from elsewhere"
        if page.has_diagram:
            yield f"{name}: a mermaid diagram would be drawn by a script from elsewhere"
    for path in sorted(site.rglob("*.css")):
        for address in _STYLE_LOADS.findall(path.read_text()):
            yield f"{path.relative_to(site)}: {address} would be fetched from elsewhere"


def _leads_somewhere(link: str, page: Path) -> bool:
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return True
    target = page.parent / unquote(parts.path) if parts.path else page
    if not target.is_file():
        return False
    return not parts.fragment or target.suffix != ".html" or parts.fragment in read(target).anchors


@cache
def read(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text())
    return page
