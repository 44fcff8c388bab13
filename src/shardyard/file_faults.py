"""Files that are not what their names say: broken links, pointers of Git LFS, web pages, no bytes.

A clone without its large files, a hub snapshot without its blobs and a download of an error page
all leave such files behind. Each message names the cause and the command that fetches the file.
"""

import errno
import re
import shlex
from pathlib import Path

POINTER_BYTES = 1024
"""A Git LFS pointer is shorter. Source: https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md"""

_LFS = re.compile(rb"version https?://(?:git-lfs\.github|hawser\.github)\.com/spec/")
_LFS_SIZE = re.compile(rb"^size (\d+)\s*$", re.MULTILINE)
_ANNEX = re.compile(rb"/annex/objects/\S+\s*")
_PAGE = re.compile(rb"(?:\xef\xbb\xbf)?\s*<(?:!doctype\s+html|html[\s>])", re.IGNORECASE)


def content_error(path: Path, *, is_text: bool = False) -> str | None:
    """Describe why a file cannot hold what its name says; None if it may, or if it is missing.

    Reads at most 1 KiB. The answer continues a sentence that begins with the file's name.

    Args:
        is_text: Whether any text is valid content, so that only links and pointers are looked for.

    Raises:
        OSError: The file cannot be read.
    """
    link = broken_link_error(path)
    if link is not None or not path.is_file():
        return link
    with path.open("rb") as file:
        start = file.read(POINTER_BYTES)
    size = path.stat().st_size
    pointer = pointer_file_error(start, size=size, folder=str(path.parent))
    if pointer is not None or is_text:
        return pointer
    if size == 0:
        return "is empty (0 bytes). Copy or fetch it again."
    return web_page_error(start)


def broken_link_error(path: Path) -> str | None:
    """Describe a symbolic link whose target is missing; None if it is none."""
    try:
        if not path.is_symlink():
            return None
        path.stat()
        return None
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        if error.errno == errno.ELOOP:
            return (
                f"is a symbolic link to {path.readlink()} that leads back to itself. Remove it, "
                "and link or copy the real target to its place."
            )
        return None  # a name that is too long, no permission
    return (
        f"is a broken symbolic link to {path.readlink()}. Copy the folder again with its link "
        "targets (`cp -rL`; for a hub snapshot, its blobs), or fetch it again."
    )


def broken_link_on_path(path: Path) -> str | None:
    """Continue the name of a file that is missing because a link on its path leads nowhere.

    Returns:
        Words that name the link and its target; None: no link is to blame.
    """
    for each in (path, *path.parents):
        if broken_link_error(each) is None:
            continue
        which = "" if each == path else f" cannot be reached: {each}"
        return (
            f"{which} is a symbolic link to {each.readlink()}, and that leads nowhere. Let it lead "
            f"to what is there: `ln -sfn TARGET {shlex.quote(str(each))}`."
        )
    return None


def pointer_file_error(start: bytes, *, size: int, folder: str = "its folder") -> str | None:
    """Describe a pointer of Git LFS or git-annex in the place of a file.

    Args:
        start: The first ``POINTER_BYTES`` of the file.
        size: Bytes of the whole file; a pointer is small.
    """
    if size >= POINTER_BYTES:
        return None
    if _LFS.match(start):
        told = _LFS_SIZE.search(start)
        of = f" of {int(told[1]):,} bytes" if told else ""
        return (
            f"is a Git LFS pointer ({size} bytes), not the file itself{of}. Run `git lfs pull` in "
            f"{folder}."
        )
    if _ANNEX.fullmatch(start):
        return (
            f"is a git-annex pointer ({size} bytes), not the file itself. Run `git annex get .` in "
            f"{folder}."
        )
    return None


def web_page_error(start: bytes) -> str | None:
    """Describe a web page that was saved in the place of a file."""
    if _PAGE.match(start):
        return (
            "is a web page (HTML), not the file itself. Download the file again; an address of the "
            "hub has /resolve/ in it, not /blob/."
        )
    return None
