"""Files that launch.code sends: what is listed, less what git ignores and what is private."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from shardyard.config.paths import unreadable_reason
from shardyard.config.rules.custom_module import MODEL
from shardyard.config.rules.own_code import own_functions
from shardyard.config.schema.recipe import Recipe
from shardyard.config.sources import matches_of
from shardyard.errors import Problem, RequestError
from shardyard.git import git
from shardyard.launchers.private_files import private_reason, tokens_in
from shardyard.own_code import archive_names, find_source, installed_file
from shardyard.units import format_bytes

LIMIT_BYTES = 64 * 2**20
"""Code is small; what is larger is data or weights that were listed by mistake."""

# Folders outside a git repository have no .gitignore that leaves these out.
_NEVER = {".git", "__pycache__", ".venv", ".mypy_cache", ".ruff_cache", ".pytest_cache"}


@dataclass(frozen=True, kw_only=True)
class CodeFiles:
    """Files of launch.code to send, by their names in the archive."""

    sent: Mapping[str, Path]
    excluded_files: Mapping[str, str]
    """Files of a listed folder or glob that are not sent, and why."""


def code_files(entries: Iterable[str], start: Path, *, limit_bytes: int = LIMIT_BYTES) -> CodeFiles:
    """Find the files that launch.code lists.

    Args:
        start: Folder where relative entries begin, resolved.

    Raises:
        RequestError: An entry has no match, leads outside or lists private files only; or all
            files together are too large.
    """
    sent: dict[str, Path] = {}
    excluded_files: dict[str, str] = {}
    for entry in entries:
        found = _files_of_entry(entry, start)
        private = {name: why for name, file in found.items() if (why := private_reason(name, file))}
        # An entry that sends nothing is a mistake; a folder of code with one key in it is not.
        if private and len(private) == len(found):
            raise RequestError(_only_private(entry, private))
        excluded_files |= private
        sent |= {name: file for name, file in found.items() if name not in private}
    _check_size(sent, limit_bytes)
    check_no_shadowing(sent)
    return CodeFiles(sent=sent, excluded_files=dict(sorted(excluded_files.items())))


def unsent_code(recipe: Recipe, launcher: str) -> list[Problem]:
    """Functions of the user's own whose files are here, and would not be in the containers.

    Args:
        launcher: Name of a launcher that runs containers.
    """
    named = {setting: path for setting, (path, _) in own_functions(recipe).items()}
    if recipe.model.module is not None:
        named["model.module"] = recipe.model.module
    if not named or "PYTHONPATH" in recipe.launch.env:
        return []
    try:
        sent = code_files(recipe.launch.code, Path.cwd().resolve()).sent
    except RequestError:  # told where the code is packed
        return []
    found = []
    for setting, path in named.items():
        file = find_source(path, MODEL).file
        if file is None or installed_file(file) or {*archive_names(path)} & {*sent}:
            continue
        top = path.partition(":")[0].partition(".")[0]
        place = f"{top}.py" if file.name == f"{top}.py" else top
        text = f"={path}: containers of {launcher} do not have {file}. Send it with "
        text += f"launch.code=[{place}]; on AWS Batch, build it into the image and set "
        found.append(Problem(setting, f"{text}launch.env.PYTHONPATH."))
    return found


def read_code(files: Mapping[str, Path]) -> dict[str, bytes]:
    """Read what is sent.

    Raises:
        RequestError: Files hold tokens or keys; all are named, and none is shown.
    """
    # The bytes that are searched are those that are sent: a file may change between two reads.
    found = {name: file.read_bytes() for name, file in files.items()}
    check_no_credentials(found)
    return found


def check_no_credentials(contents: Mapping[str, bytes]) -> None:
    """Reject files, by name, that hold tokens or keys.

    Raises:
        RequestError: It names all places, and shows no token.
    """
    places = [
        f"{name}:{line} ({kind})"
        for name, content in sorted(contents.items())
        for line, kind in tokens_in(content)
    ]
    if not places:
        return
    more = "" if len(places) <= 20 else f" and {len(places) - 20} more"
    raise RequestError(
        f"launch.code would send credentials in clear: {', '.join(places[:20])}{more}. Remove them "
        "and name where each is kept with `secrets` (such as secrets.HF_TOKEN=env); or leave the "
        "file out by .gitignore. Mark a line that holds none with the comment `gitleaks:allow`."
    )


def _files_of_entry(entry: str, start: Path) -> dict[str, Path]:
    """Name in the archive -> file."""
    given = start / Path(entry).expanduser()
    why_not = unreadable_reason(str(given))
    if why_not is not None:
        raise RequestError(f"launch.code={entry} {why_not}")
    # A path that exists is meant literally, whatever brackets are in its name.
    places = [given] if given.exists() else _matches(given)
    files: dict[str, Path] = {}
    for place in (place.resolve() for place in places):
        # Outside the start folder names begin at the entry: a node does not have its parents.
        base = start if place.is_relative_to(start) else place.parent
        # A named pipe or a device would block the read.
        if not place.is_dir() and not place.is_file():
            raise RequestError(
                f"launch.code: {entry!r} lists {place}, which is neither a file nor a folder."
            )
        for file in _files_of(place):
            name = file.relative_to(base)
            if not _NEVER & set(name.parts):
                _check_link(file, base, entry)
                files[name.as_posix()] = file
    if not places:
        raise RequestError(
            f"launch.code: {entry!r} matches no file in {start}. Give folders, files or globs of "
            "the code that the run needs."
        )
    return files


def _only_private(entry: str, private: Mapping[str, str]) -> str:
    shown = "; ".join(f"{name}: {why}" for name, why in sorted(private.items())[:5])
    more = "" if len(private) <= 5 else f"; and {len(private) - 5} more"
    return (
        f"launch.code: {entry!r} lists private files only, which are never sent ({shown}{more}). "
        "Keep credentials in `secrets`. Let others read what is code: chmod go+r FILE."
    )


def _matches(pattern: Path) -> list[Path]:
    """Return the matches of a glob; unlike a file that is named, git-ignored ones are left out."""
    places = [Path(name) for name in matches_of(str(pattern))]
    return [place for place in sorted(places) if place.is_dir() or place in _siblings(place.parent)]


def _siblings(folder: Path) -> list[Path]:
    listed = _tracked(folder)
    return list(folder.iterdir()) if listed is None else listed


def _files_of(root: Path) -> Iterator[Path]:
    if root.is_file():
        yield root
        return
    listed = _tracked(root)
    for path in root.rglob("*") if listed is None else listed:
        # A broken link is no file. It goes on to `_check_link`, which names it.
        if path.is_file() or path.is_symlink():
            yield path


def _tracked(folder: Path) -> list[Path] | None:
    """Return the files git tracks or would add, .gitignore respected; None: no repository."""
    # -z because names may hold any character; --deduplicate because git lists a file in a merge
    # conflict once for each of its stages.
    answer = git(
        folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate",
        timeout_s=60,
    )  # fmt: skip
    return None if answer is None else [folder / name for name in answer.split("\0") if name]


def _check_link(file: Path, base: Path, entry: str) -> None:
    target = file.resolve()
    if not target.is_file() or not target.is_relative_to(base):
        raise RequestError(
            f"launch.code: {entry!r} has the link {file}, which leads to {target}, no file in "
            f"{base}. Only what is listed is sent. List that place too, or remove the link."
        )


def check_no_shadowing(sent: Iterable[str]) -> None:
    """Reject names under which Python would find sent code in place of its own modules.

    Args:
        sent: Names in the archive. Nodes look for modules there first.

    Raises:
        RequestError: One hides a module that the training imports; all are named.
    """
    found = {(name.partition("/")[0], module_of(name)) for name in sent}
    wrong = sorted((top, module) for top, module in found if module in _TAKEN)
    if not wrong:
        return
    owners = ", ".join(f"{top} (as a module {_owner(module)})" for top, module in wrong)
    top = wrong[0][0]
    raise RequestError(
        f"launch.code would hide modules that the training itself imports: {owners}. Rename them "
        f"and their imports, such as `mv {top} my_{top}`; or list a folder that has them in a "
        "package."
    )


def module_of(name: str) -> str:
    """The module or package that a file makes importable at the top; empty: none."""
    top, is_below, rest = name.partition("/")
    if is_below:
        # A folder without __init__ hides no module: Python prefers any regular one on its path.
        return top if rest.partition(".")[0] == "__init__" else ""
    module, _, suffix = top.partition(".")
    # Compiled modules have long suffixes, such as .cpython-312-x86_64-linux-gnu.so.
    return module if suffix == "py" or suffix.endswith("so") else ""


def _owner(module: str) -> str:
    return "of Python" if module in sys.stdlib_module_names else "that Shardyard needs"


_TAKEN = (sys.stdlib_module_names - {"test", "idlelib", "this", "antigravity", "turtledemo"}) | {
    "shardyard", "torch", "numpy", "yaml", "pydantic", "pydantic_core", "click", "rich", "jinja2",
    "fsspec", "safetensors", "tokenizers", "transformers", "pynvml", "huggingface_hub",
    "typing_extensions", "sympy", "networkx", "filelock", "packaging", "regex", "requests",
    "tqdm", "httpx", "markupsafe", "annotated_types", "triton", "functorch", "torchgen",
}  # fmt: skip
"""Names that a user's module must not have: of Python, of Shardyard, of what it imports.

Python's tests and toys are left out, as no training imports them.
"""


def _check_size(code: dict[str, Path], limit_bytes: int) -> None:
    sizes = {name: file.stat().st_size for name, file in code.items()}
    total = sum(sizes.values())
    if total <= limit_bytes:
        return
    largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
    shown = ", ".join(f"{name} ({format_bytes(sizes[name])})" for name in largest)
    raise RequestError(
        f"launch.code lists {len(code):,} files of {format_bytes(total)}, more than "
        f"{format_bytes(limit_bytes)}. It is for code; data and weights belong on storage that the "
        f"nodes see. The largest are {shown}. Leave them out, by .gitignore or a narrower list."
    )
