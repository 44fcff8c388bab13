"""The pages of the site and their order: pages of the repository, and pages made from the code.

The site has the repository's folders, so that a link between two files is the same in both. A file
that a page links to, such as a raw result, is carried along. Pages for those who change Shardyard
(``internals/``) are not on the site; a link to one keeps only its words there.
"""

import ast
import os
import re
import shutil
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import click

from docs.generate.verbs import SECTIONS, verb_page
from shardyard.cli import _VERBS as VERBS
from shardyard.cli import shardyard

ROOT = Path(__file__).parents[2]
PYTHON_API = "docs/python-api.md"

VERB_PAGES = {verb: f"docs/{verb_page(verb)}" for verb in VERBS if verb not in SECTIONS}


PARTS = {
    "Start": ("README.md",),
    "Get started": ("docs/get-started.md",),
    "Tutorials": (
        "docs/tutorials/train-on-slurm.md",
        "docs/tutorials/llama2-on-eks.md",
        "docs/tutorials/imagenet-on-spot-nodes.md",
        "docs/tutorials/llama2-70b.md",
        "docs/tutorials/bert-on-aws-batch.md",
        "docs/tutorials/move-a-job.md",
        "docs/tutorials/own-code.md",
    ),
    "How-to": (
        "docs/chat.md",
        "docs/classification.md",
        "docs/images.md",
        "docs/phases.md",
        "docs/own-module.md",
        "docs/from-ddp.md",
        "docs/library.md",
        "docs/python.md",
        "docs/launch-slurm.md",
        "docs/launch-kubernetes.md",
        "docs/launch-aws-batch.md",
        "docs/secrets.md",
        "docs/teams.md",
        "docs/monitoring.md",
        "docs/telemetry.md",
        "docs/exporters.md",
    ),
    "Troubleshooting": ("docs/troubleshooting.md", "docs/errors.md"),
    "Reference": (
        "docs/verbs.md",
        *VERB_PAGES.values(),
        "docs/settings.md",
        PYTHON_API,
        "docs/variables.md",
        "docs/run-folder.md",
        "docs/model-folders.md",
        "docs/network.md",
        "docs/hardware.md",
        "docs/compatibility.md",
        "docs/plug-ins.md",
        "docs/glossary.md",
    ),
    "Explanation": (
        "docs/numerics.md",
        "docs/accuracy.md",
        "docs/sharding.md",
        "docs/hangs.md",
    ),
    "Project": (
        "docs/evidence.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "ARCHITECTURE.md",
        "AGENTS.md",
    ),
}
"""Part of the navigation -> its pages, in the order in which they are shown."""

_INTERNAL = {"CHANGELOG.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "AGENTS.md"}
"""Pages for those who follow or change Shardyard, which the search of the site leaves out."""
_NOT_SEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s#]+)[^)]*\)|<img[^>]*src=\"([^\"]+)\"")
_PAGE_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#:]+\.md)(#[^)]*)?\)")


def navigation() -> list[dict[str, object]]:
    """The parts as the generator takes them; a verb's page has its name, others their title.

    Pages of verbs are a section of their own within the part that has them.
    """
    verbs = {"Verbs": [{verb: page} for verb, page in VERB_PAGES.items()]}
    shown: list[dict[str, object]] = []
    for part, pages in PARTS.items():
        others: list[object] = [page for page in pages if page not in VERB_PAGES.values()]
        if len(others) < len(pages):
            others.insert(pages.index(next(iter(VERB_PAGES.values()))), verbs)
        shown.append({part: others[0] if len(others) == 1 else others})
    return shown


def gather(folder: Path) -> None:
    """Put every page of the navigation, and each file that one links to, into ``folder``."""
    carried: set[Path] = set()
    for name in chain.from_iterable(PARTS.values()):
        text = python_api() if name == PYTHON_API else (ROOT / name).read_text()
        text = without_links_off_the_site(text, name)
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        head = _NOT_SEARCHED if name in _INTERNAL else ""
        target.write_text(
            head + text + (help_of(target.stem) if name in VERB_PAGES.values() else "")
        )
        carried |= {(ROOT / name).parent / link for link in links(text)}
    for source in {path.resolve() for path in carried if path.suffix != ".md" and path.is_file()}:
        target = folder / source.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    shutil.copytree(Path(__file__).parent / "assets", folder / "assets")


def without_links_off_the_site(text: str, name: str) -> str:
    """The text of a page in which links to pages that the site lacks are only their words."""

    def kept(link: re.Match[str]) -> str:
        page = os.path.normpath(Path(name).parent / link[2])
        return link[0] if page in chain.from_iterable(PARTS.values()) else link[1]

    return _PAGE_LINK.sub(kept, text)


def links(text: str) -> Iterator[str]:
    """Paths that a page links to in the repository."""
    found = (first or second for first, second in _LINK.findall(text))
    return (link for link in found if "://" not in link)


def help_of(page_verb: str) -> str:
    """What ``shardyard VERB --help`` prints, for each verb of a page, as its last part."""
    program = shardyard.make_context("shardyard", [], terminal_width=90)
    verbs = [page_verb, *(verb for verb, (page, _) in SECTIONS.items() if page == page_verb)]
    helps = chain.from_iterable(_helps(shardyard, verb, program) for verb in verbs)
    texts = "".join(f"\n```text\n{text}\n```\n" for text in helps)
    return f"\n## Help\n{texts}"


def _helps(group: click.Group, name: str, parent: click.Context) -> Iterator[str]:
    """The help of a command, then of those below it."""
    command = group.get_command(parent, name)
    assert command is not None
    context = click.Context(command, info_name=name, parent=parent)
    yield command.get_help(context)
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            yield from _helps(command, below, context)


def python_api() -> str:
    """The page of all that ``import shardyard`` offers, in groups by the package it comes from."""
    text = "# Python API\n\nWhat `import shardyard` offers, and the errors that it raises.\n"
    source = (ROOT / "src" / "shardyard" / "__init__.py").read_text()
    groups: dict[str, list[str]] = {}
    for name, package in public_names(source).items():
        groups.setdefault(_GROUPS.get(package, "What they take and give"), []).append(name)
    for heading, names in groups.items():
        text += f"\n## {heading}\n" + "".join(f"\n::: shardyard.{name}\n" for name in names)
    return text + _ERRORS


_GROUPS = {"control": "Plan, launch and follow", "library": "In a loop of your own"}
"""Package -> heading of the names that come from it."""

_ERRORS = """
## Errors

::: shardyard.errors
    options:
      show_root_heading: false
      show_root_toc_entry: false
      inherited_members: false
"""


def public_names(source: str) -> dict[str, str]:
    """Name of ``__all__`` in the source of the package -> package below it that the name is from.

    The imports that stand there for type checkers say where each name is.

    Raises:
        ValueError: Such an import lacks for some name.
    """
    tree = ast.parse(source)
    found = {
        name.asname or name.name: str(node.module).split(".")[1]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("shardyard.")
        for name in node.names
    }
    offered = _all(tree)
    if lacking := sorted(set(offered) - set(found)):
        raise ValueError(
            f"src/shardyard/__init__.py offers {', '.join(lacking)} without an import under "
            "TYPE_CHECKING: the page of the Python API cannot know what it is. Add it."
        )
    return {name: found[name] for name in found if name in offered}


def _all(tree: ast.Module) -> list[str]:
    """``__all__`` of a module."""
    lists = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    names = ast.literal_eval(lists[0])
    assert isinstance(names, list)
    return names
