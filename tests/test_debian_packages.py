"""What tests need of the machine is listed, installed by one command, and missed aloud in CI."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import debian_packages
from tests.debian_packages import install, listed, missing, need

TESTS = Path(__file__).parent


def nothing(_name: str) -> None:
    """A machine that has none of them."""


def has(*names: str) -> Callable[[str], object]:
    return set(names).__contains__


def test_the_list_has_what_tests_ask_for_and_no_more() -> None:
    asked: set[str] = set()
    for path in TESTS.rglob("*.py"):
        if path != Path(__file__):
            text = path.read_text()
            calls = re.findall(r"\bneed\((.*?)\)\n", text) + re.findall(
                r"PACKAGES = \((.*?)\)", text
            )
            asked |= {name for call in calls for name in re.findall(r'"([^"]+)"', call)}
    assert asked == set(listed())


def test_each_line_of_the_list_says_who_needs_it() -> None:
    lines = [line for line in debian_packages.LIST.read_text().splitlines() if line[0] != "#"]
    assert len(lines) == len(listed()) >= 10
    assert all(re.fullmatch(r"\S+ +\S+ +# .{10,}", line) for line in lines)


def test_what_a_package_brings_shows_that_it_is_there() -> None:
    assert missing(("slurmd", "netavark"), nothing) == ["slurmd", "netavark"]
    assert missing(("slurmd", "netavark"), has("slurmd")) == ["netavark"]
    assert missing(("slurmd", "netavark"), has("slurmd", "/usr/lib/podman/netavark")) == []
    with pytest.raises(KeyError, match="slurm-wlm"):
        missing(("slurm-wlm",), nothing)


def test_a_test_without_its_package_is_skipped_and_in_ci_it_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(debian_packages, "missing", lambda packages: list(packages))
    with pytest.raises(pytest.skip.Exception, match=r"slurmd missing: make system-packages"):
        need("slurmd", environ={})
    with pytest.raises(pytest.fail.Exception, match=r"slurmd missing.*no reason to skip a test"):
        need("slurmd", environ={"CI": "true"})


def test_all_that_is_missing_is_installed_at_once() -> None:
    called: list[list[str]] = []

    def call(command: list[str]) -> int:
        called.append(command)
        return 0

    there = {"apt-get"}

    def is_there(name: str) -> bool:
        there.update({"slurmd", "podman"} if len(called) == 2 else ())
        return name in there

    assert install(["slurmd", "podman"], is_root=True, call=call, is_there=is_there) == ""
    assert called[0] == ["apt-get", "update", "--quiet"]
    assert called[1][:2] == ["apt-get", "install"] and called[1][-2:] == ["slurmd", "podman"]
    assert "--no-install-recommends" in called[1]


def refuse(command: list[str]) -> int:
    raise AssertionError(command)


def test_where_all_is_there_nothing_is_called() -> None:
    assert install([], is_root=False, call=refuse, is_there=nothing) == ""


@pytest.mark.parametrize(
    ("is_root", "there", "code", "words"),
    [
        (True, (), 0, "no apt-get to install slurmd podman with. Install what they bring"),
        (
            False,
            ("apt-get",),
            0,
            "sudo make system-packages, or sudo apt-get install slurmd podman",
        ),
        (True, ("apt-get",), 100, "`apt-get update` failed, see above. Mend that and say make"),
        (True, ("apt-get", "slurmd"), 0, "what shows podman is not there. Look where the package"),
    ],
)
def test_what_cannot_be_installed_is_said_with_what_to_do(
    is_root: bool, there: tuple[str, ...], code: int, words: str
) -> None:
    called = install(
        ["slurmd", "podman"], is_root=is_root, call=lambda _: code, is_there=has(*there)
    )
    assert words in called
