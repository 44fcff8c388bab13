"""The documentation site: a place for every page and name, and a check that finds what is wrong."""

from itertools import chain
from pathlib import Path

import pytest

import shardyard
from docs.site.check import problems
from docs.site.pages import (
    PARTS,
    PYTHON_API,
    ROOT,
    gather,
    links,
    public_names,
    python_api,
    without_links_off_the_site,
)


def test_every_page_has_one_place_in_the_navigation() -> None:
    placed = list(chain.from_iterable(PARTS.values()))
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    there = {str(page.relative_to(ROOT)) for page in pages} | {PYTHON_API}
    assert sorted(placed) == sorted(there), "give it a place in docs/site/pages.py"


def test_every_public_name_is_on_the_page_of_the_python_api() -> None:
    found = public_names(Path(shardyard.__file__).read_text())
    assert sorted(found) == sorted(shardyard.__all__)
    assert all(f"\n::: shardyard.{name}\n" in python_api() for name in shardyard.__all__)
    # a package without this file is not found by the reader of docstrings
    assert all(
        (ROOT / f"src/shardyard/{package}/__init__.py").exists() for package in found.values()
    )


def test_a_public_name_of_unknown_origin_is_refused() -> None:
    source = "if TYPE_CHECKING:\n    from shardyard.parallel.mesh import Mesh, build\n__all__ = "
    assert public_names(source + "['Mesh']") == {"Mesh": "parallel"}
    with pytest.raises(ValueError, match="offers plan without an import under TYPE_CHECKING"):
        public_names(source + "['Mesh', 'plan']")


def test_a_link_to_a_page_off_the_site_keeps_its_words() -> None:
    text = "[a](../launch.md) [b](../../internals/plan.md#costs) [c](https://d.org/e.md)"
    found = without_links_off_the_site(text, "docs/verbs/plan.md")
    assert found == text.replace("[b](../../internals/plan.md#costs)", "b")


@pytest.mark.parametrize("page", sorted({*chain.from_iterable(PARTS.values())} - {PYTHON_API}))
def test_only_pages_of_the_project_link_off_the_site(page: str) -> None:
    text = (ROOT / page).read_text()
    assert page in PARTS["Project"] or without_links_off_the_site(text, page) == text


def test_files_that_a_page_links_to_are_found() -> None:
    page = (
        '[a](b.json) [c](d.md#e) [f](#g) [h](https://i.org) ![j](k.svg) <img width="9" src="l.svg"'
    )
    assert list(links(page)) == ["b.json", "d.md", "k.svg", "l.svg"]


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ('<a href="gone.json">', "gone.json leads nowhere"),
        ('<a href="other.html#gone">', "other.html#gone leads nowhere"),
        ('<a href="#gone">', "#gone leads nowhere"),
        ('<a href="..">', ".. leads nowhere"),
        ('<img src="gone.svg">', "gone.svg leads nowhere"),
        ('<script src="https://a.org/a.js">', "https://a.org/a.js would be fetched from elsewhere"),
        ('<link rel="icon" href="//a.org/a.ico">', "//a.org/a.ico would be fetched from elsewhere"),
        ('<pre class="mermaid">', "a mermaid diagram would be drawn by a script from elsewhere"),
    ],
)
def test_what_is_wrong_on_a_built_page_is_found(wrong: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "other.html").write_text('<h1 id="there">')
    (tmp_path / "raw file.json").write_text("{}")
    right = '<a href="other.html#there"><a href="raw%20file.json"><a href="https://pytorch.org">'
    (tmp_path / "right.html").write_text(right)
    assert list(problems(tmp_path)) == []
    (tmp_path / "wrong.html").write_text(right + wrong)
    assert list(problems(tmp_path)) == [f"wrong.html: {problem}"]


def test_a_style_that_fetches_a_font_is_found(tmp_path: Path) -> None:
    style = tmp_path / "a.css"
    style.write_text("a{background:url(data:image/svg+xml)} b{background:url(own.svg)}")
    assert list(problems(tmp_path)) == []
    style.write_text('@font-face{src:url("https://cdn.org/a.woff2")}')
    assert list(problems(tmp_path)) == [
        "a.css: https://cdn.org/a.woff2 would be fetched from elsewhere"
    ]


def test_the_search_leaves_out_pages_for_those_who_change_shardyard(tmp_path: Path) -> None:
    gather(tmp_path)
    excluded = "---\nsearch:\n  exclude: true\n---\n"
    assert not (tmp_path / "internals").exists()
    assert not (tmp_path / "benchmarks/README.md").exists()
    assert (tmp_path / "CHANGELOG.md").read_text().startswith(excluded)
    assert not (tmp_path / "docs/verbs/plan.md").read_text().startswith("---")
