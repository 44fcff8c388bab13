"""Debian's packages that tests need: installed by one command, and missed aloud where CI is.

A test that needs one says so with ``need``: elsewhere it is then skipped, in CI (``CI=true``) it
fails, as nobody would see there that it was skipped. Run as a program, this installs what is
missing of tests/debian-packages.txt: ``make system-packages``.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import pytest

LIST = Path(__file__).with_name("debian-packages.txt")
TARGET = "make system-packages"


def listed() -> dict[str, str]:
    """Package -> program or file that shows that it is there."""
    lines = [line.partition("#")[0].split() for line in LIST.read_text().splitlines()]
    return {line[0]: line[1] for line in lines if line}


def missing(packages: Iterable[str], is_there: Callable[[str], object] = shutil.which) -> list[str]:
    """Those that are not installed; asked in no way that is Debian's alone."""
    shown_by = listed()
    return [each for each in packages if not is_there(shown_by[each])]


def need(*packages: str, environ: Mapping[str, str] = os.environ) -> None:
    """Skip the running test where one of these packages is not installed; in CI, let it fail.

    Raises:
        KeyError: A package that is not in the list, which nobody would install.
    """
    if not (lacking := missing(packages)):
        return
    words = f"Debian's {', '.join(lacking)} missing: {TARGET}"
    if environ.get("CI"):
        pytest.fail(f"{words}. In CI this is no reason to skip a test.", pytrace=False)
    pytest.skip(words)


def install(
    lacking: Sequence[str],
    *,
    is_root: bool,
    call: Callable[[list[str]], int],
    is_there: Callable[[str], object] = shutil.which,
) -> str:
    """Install packages; returns what is wrong and what to do, or nothing."""
    names = " ".join(lacking)
    if not lacking:
        return ""
    if not is_there("apt-get"):
        return (
            f"This machine has no apt-get to install {names} with. Install what they bring in "
            "another way; tests that miss it are skipped, in CI they fail."
        )
    if not is_root:
        return f"Only root installs packages: sudo {TARGET}, or sudo apt-get install {names}."
    options = ["--yes", "--quiet", "--no-install-recommends"]
    for command in (["apt-get", "update", "--quiet"], ["apt-get", "install", *options, *lacking]):
        if call(command) != 0:
            return f"`{' '.join(command[:2])}` failed, see above. Mend that and say {TARGET} again."
    if still := missing(lacking, is_there):
        return (
            f"apt-get is done, and what shows {', '.join(still)} is not there. Look where the "
            f"package has it (dpkg -L), and write that into tests/{LIST.name}."
        )
    return ""


def main() -> int:
    lacking = missing(listed())
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    wrong = install(
        lacking,
        is_root=os.geteuid() == 0,
        call=lambda command: subprocess.run(command, env=environ, check=False).returncode,
    )
    if wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return 2
    print(f"all {len(listed())} packages of tests/{LIST.name} are installed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
