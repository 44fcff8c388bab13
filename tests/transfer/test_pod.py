"""Files of a pod come through exec, over a real WebSocket."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from shardyard.errors import DataError, LostError
from shardyard.io.digests import FileDigest
from shardyard.launchers.kubernetes.api import Api
from shardyard.transfer.download import receive
from shardyard.transfer.pod import PodSource
from tests.launchers.kubernetes.api_server import RUNNING, ApiServer, running_server

pytestmark = pytest.mark.heavy

pytest.importorskip("kubernetes", reason="the Kubernetes client is an extra")

CONTENT = bytes(range(256)) * 4000
NAME = "logs/a log; $(false).txt"
FILES = {NAME: FileDigest(len(CONTENT), hashlib.sha256(CONTENT).hexdigest())}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[ApiServer, PodSource]]:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / NAME).write_bytes(CONTENT)
    with running_server(tmp_path) as (server, kubeconfig):
        server.add_pod("fetch", job="run", rank=0, status=RUNNING, lines=[])
        api = Api("test", "default", kubeconfig)

        def run(command: Sequence[str]) -> Iterator[bytes]:
            return api.exec("fetch", container="node", command=command)

        yield server, PodSource(exec=run, folder=str(tmp_path / "run"))


def ignore(_name: str, _size: int) -> None:
    """Nobody looks."""


def test_a_cut_connection_is_gone_on_with_from_where_it_stopped(
    server: tuple[ApiServer, PodSource], tmp_path: Path
) -> None:
    state, source = server
    state.execs.cut_after_bytes = [300_000, 500_000]
    receive(source, FILES, tmp_path / "here", on_progress=ignore, sleep=lambda _: None)
    assert (tmp_path / "here" / NAME).read_bytes() == CONTENT
    assert [command[2] for command in state.execs.commands] == ["+1", "+300001", "+800001"]


def test_what_came_garbled_is_fetched_once_more_and_then_refused_by_name(
    server: tuple[ApiServer, PodSource], tmp_path: Path
) -> None:
    state, source = server
    state.execs.garble = [True, False]
    receive(source, FILES, tmp_path / "here", on_progress=ignore)
    assert (tmp_path / "here" / NAME).read_bytes() == CONTENT
    state.execs.garble = [True, True]
    with pytest.raises(DataError, match=r"logs/a log; .* came wrong twice"):
        receive(source, FILES, tmp_path / "again", on_progress=ignore)


def test_a_pod_that_goes_in_the_middle_is_told(
    server: tuple[ApiServer, PodSource], tmp_path: Path
) -> None:
    state, source = server
    state.execs.cut_after_bytes = [300_000]

    def gone(_seconds: float) -> None:
        state.objects.clear()

    with pytest.raises(LostError, match='pods "fetch" not found'):
        receive(source, FILES, tmp_path / "here", on_progress=ignore, sleep=gone)
    assert not (tmp_path / "here" / NAME).exists()


def test_a_file_that_was_removed_meanwhile_is_told(
    server: tuple[ApiServer, PodSource], tmp_path: Path
) -> None:
    _, source = server
    (Path(source.folder) / NAME).unlink()
    with pytest.raises(DataError, match=r"No such file.*may have removed it; repeat the command"):
        receive(source, FILES, tmp_path / "here", on_progress=ignore)


def test_the_listing_comes_through_exec_too(
    server: tuple[ApiServer, PodSource], tmp_path: Path
) -> None:
    state, source = server
    lines = [{"file": "report.md", "bytes": 1, "sha256": "0" * 64}]
    end = {"end": {"steps": [], "best": None, "warnings": ["so"]}}
    said = tmp_path / "said"
    said.write_text("".join(json.dumps(line) + "\n" for line in [*lines, end]))
    state.execs.start = lambda _pod, _container, _command: ["cat", str(said)]
    found = source.list("latest")
    assert (list(found.files), found.warnings) == (["report.md"], ("so",))
    (command,) = state.execs.commands
    assert command[:4] == ["python", "-P", "-m", "shardyard.checkpoint.select"]
    assert command[4:] == [source.folder, "--step", "latest"]
    state.execs.start = lambda _pod, _container, _command: [
        "sh",
        "-c",
        "echo >&2 no module; exit 1",
    ]
    with pytest.raises(DataError, match=r"cannot be listed there: no module.*this version"):
        source.list("latest")
