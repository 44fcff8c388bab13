"""A command in a container through the official client, against a server with a real WebSocket."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardyard.errors import AccessError
from shardyard.launchers.kubernetes.api import Api
from shardyard.launchers.kubernetes.exec import CommandError, LostConnectionError
from tests.launchers.kubernetes.api_server import RUNNING, TOKEN, ApiServer, running_server

pytest.importorskip("kubernetes", reason="the Kubernetes client is an extra")


@pytest.fixture
def server_and_api(tmp_path: Path) -> Iterator[tuple[ApiServer, Api]]:
    with running_server(tmp_path) as (server, kubeconfig):
        server.add_pod("worker", job="run", rank=0, status=RUNNING, lines=[])
        yield server, Api("test", "default", kubeconfig)


def said(api: Api, *command: str) -> bytes:
    return b"".join(api.exec("worker", container="node", command=command))


@pytest.mark.heavy
def test_what_a_command_prints_comes_byte_for_byte(
    server_and_api: tuple[ApiServer, Api], tmp_path: Path
) -> None:
    server, api = server_and_api
    content = bytes(range(256)) * 4000 + b"\xff\xfe no text \x80"
    (tmp_path / "weights").write_bytes(content)
    assert said(api, "cat", str(tmp_path / "weights")) == content
    assert f"Bearer {TOKEN}" in server.tokens


@pytest.mark.heavy
def test_arguments_arrive_as_they_were_given_and_no_shell_reads_them(
    server_and_api: tuple[ApiServer, Api],
) -> None:
    server, api = server_and_api
    words = ("printf", "%s|", "a b", "$HOME", "; false", "ü&command=x", "`id`")
    assert said(api, *words).decode() == "a b|$HOME|; false|ü&command=x|`id`|"
    assert server.execs.commands == [list(words)]


@pytest.mark.heavy
def test_a_command_that_fails_is_told_with_its_words_and_exit_code(
    server_and_api: tuple[ApiServer, Api],
) -> None:
    _, api = server_and_api
    call = "import sys; print('half'); sys.stderr.write('disk on fire'); sys.exit(7)"
    with pytest.raises(CommandError, match="disk on fire") as failed:
        said(api, sys.executable, "-c", call)
    assert failed.value.code == 7


@pytest.mark.heavy
def test_a_program_that_is_not_in_the_image_is_told(
    server_and_api: tuple[ApiServer, Api],
) -> None:
    _, api = server_and_api
    with pytest.raises(CommandError, match=r"exec failed: .*no-such-program") as failed:
        said(api, "no-such-program")
    assert failed.value.code is None


@pytest.mark.heavy
def test_a_connection_that_breaks_is_no_end(server_and_api: tuple[ApiServer, Api]) -> None:
    server, api = server_and_api
    server.execs.cut_after_bytes = [100_000]
    got = b""
    with pytest.raises(LostConnectionError):
        for piece in api.exec(
            "worker", container="node", command=["head", "-c200000", "/dev/zero"]
        ):
            got += piece
    assert got == bytes(100_000)


def test_without_the_right_to_exec_the_right_is_named(
    server_and_api: tuple[ApiServer, Api],
) -> None:
    server, api = server_and_api
    words = 'pods "worker" is forbidden: User "alice" cannot get resource "pods/exec"'
    server.refusals["GET", "/exec"] = (403, words)
    with pytest.raises(AccessError, match=r"grant get and create on pods/exec") as refused:
        said(api, "true")
    assert "cannot get resource" in str(refused.value) and refused.value.exit_code == 4


def test_a_pod_that_is_gone_is_a_lost_connection(server_and_api: tuple[ApiServer, Api]) -> None:
    server, api = server_and_api
    server.objects.clear()
    with pytest.raises(LostConnectionError, match='pods "worker" not found'):
        said(api, "true")


@pytest.mark.heavy
def test_silence_is_asked_about_and_is_no_end_at_once(
    server_and_api: tuple[ApiServer, Api],
) -> None:
    _, api = server_and_api
    waits = ["sh", "-c", "sleep 0.5; echo awake"]
    found = api.exec("worker", container="node", command=waits, silence_s=0.2)
    assert b"".join(found) == b"awake\n"
    with pytest.raises(LostConnectionError, match="no more data came"):
        list(api.exec("worker", container="node", command=waits, silence_s=0.02))
