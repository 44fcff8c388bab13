"""Images: what is rendered stands in docker/, fits itself; no tool is handed a secret."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardyard.cli.image import build
from shardyard.config.versions import ENGINES
from shardyard.errors import RequestError, ShardyardError
from shardyard.image.container_cli import ContainerCli, find_container_cli, without_tag
from shardyard.image.dockerfile import (
    STACKS,
    USER_ID,
    Base,
    check_base_image,
    needed_on_nodes,
    parse_base,
    render_dockerfile,
    write_context,
)
from shardyard.image.ecr import ecr_registry
from tests.debian_packages import need

ROOT = Path(__file__).parents[2]
DLC = "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch-training:2.13.0-gpu-py312"
ECR = "123456789012.dkr.ecr.eu-west-1.amazonaws.com"
BASES = ["cpu", "cuda-efa", "cuda126-efa", "gaudi", f"dlc:{DLC}"]

# Stands for a tool: writes down what it is called with, and answers as podman or docker would.
PROGRAM = """\
#!{python}
import json, pathlib, sys
arguments, said = sys.argv[1:], sys.stdin.read()
with open({log!r}, "a") as log:
    print(json.dumps([arguments, said]), file=log)
if "--digestfile" in arguments:
    pathlib.Path(arguments[arguments.index("--digestfile") + 1]).write_text({digest!r})
if arguments[:2] == ["image", "inspect"]:
    print(json.dumps([arguments[-1].rpartition(":")[0] + "@" + {digest!r}]))
if arguments[0] == {fails!r}:
    sys.exit(125)
"""
DIGEST = "sha256:" + "ab" * 32


def made_tool(folder: Path, name: str = "podman", *, fails: str = "") -> tuple[ContainerCli, Path]:
    """A tool, and the file where each call stands: its arguments and its stdin."""
    log, program = folder / "calls.jsonl", folder / name
    text = PROGRAM.format(python=sys.executable, log=str(log), digest=DIGEST, fails=fails)
    program.write_text(text)
    program.chmod(0o755)
    return ContainerCli(name=name, path=str(program)), log


def calls(log: Path) -> list[tuple[list[str], str]]:
    return [tuple(json.loads(line)) for line in log.read_text().splitlines()]


@pytest.mark.parametrize("base", ["cpu", "cuda-efa", "cuda126-efa", "gaudi"])
def test_the_file_in_docker_is_what_is_rendered(base: str) -> None:
    golden = (ROOT / "docker" / f"Dockerfile.{base}").read_text()
    assert render_dockerfile(parse_base(base)) == golden, (
        f"python -m shardyard image build --base {base} --dry-run > docker/Dockerfile.{base}"
    )


@pytest.mark.parametrize("base", BASES)
def test_an_image_has_two_stages_a_user_and_nothing_that_moves(base: str) -> None:
    text = render_dockerfile(parse_base(base))
    lines = text.splitlines()
    assert [line for line in lines if line.startswith("FROM ")] == [
        "FROM ${BASE_IMAGE} AS build", "FROM ${BASE_IMAGE}",
    ]  # fmt: skip
    assert [line for line in lines if line.startswith("USER ")][-1] == f"USER {USER_ID}:{USER_ID}"
    assert "git clone" not in text and "FI_" not in text and "NCCL_" not in text
    assert "check_packages()" in text
    if base.startswith("cuda"):
        assert "--skip-kmod" in text  # the node's kernel has the driver


def test_an_image_on_its_own_torch_keeps_it() -> None:
    text = render_dockerfile(parse_base(f"dlc:{DLC}"))
    assert f"ARG BASE_IMAGE={DLC}" in text
    assert "-c /tmp/torch.txt" in text and "download.pytorch.org" not in text


def test_the_versions_fit_each_other_and_the_check() -> None:
    torch = next(engine for engine in ENGINES if engine.package == "torch")
    pinned = (ROOT / "constraints.txt").read_text()
    for kind in ("cpu", "cuda-efa", "cuda126-efa"):
        stack = STACKS[kind]
        assert stack.torch in torch.tested and f"torch=={stack.torch}\n" in pinned
    for cuda in (STACKS["cuda126-efa"], STACKS["cuda-efa"]):
        assert cuda.wheel == "cu" + cuda.labels["cuda-toolkit"].replace(".", "")
        assert f"cuda:{cuda.labels['cuda-toolkit']}." in cuda.base_image
    # aws-ofi-nccl 1.21.1, release notes: "NCCL v2.17.1 and later"
    assert tuple(map(int, cuda.labels["nccl"].split("."))) >= (2, 17, 1)


@pytest.mark.parametrize(
    "text", ["gpu", "cpu:x", "cuda-efa:", "dlc", "dlc:", "dlc:--rm", "dlc:a b", "dlc:X", "gaudi:"]
)
def test_another_base_is_refused(text: str) -> None:
    with pytest.raises(
        RequestError, match=r"is not a base\. Use cpu, cuda-efa, cuda126-efa \(V100\)"
    ):
        parse_base(text)


@pytest.mark.parametrize(
    ("machines", "base"),
    [
        ("p3.16xlarge", "cuda126-efa"),
        ("p3dn.24xlarge", "cuda126-efa"),
        ("g4dn.12xlarge", "cuda-efa"),
        ("p5.48xlarge", "cuda-efa"),
        ("dl1.24xlarge", "gaudi"),
    ],
)
def test_the_type_of_the_machines_says_what_an_image_is_built_on(machines: str, base: str) -> None:
    assert parse_base(machines) == parse_base(base)


def test_for_some_machines_no_base_is_known() -> None:
    with pytest.raises(RequestError, match=r"no base is known for Trainium1\. Name an image"):
        parse_base("trn1.32xlarge")


def test_gaudi_is_refused_while_its_torch_is_too_old() -> None:
    with pytest.raises(RequestError, match=r"torch 2\.9\.0, and shardyard needs 2\.11 or newer"):
        check_base_image(parse_base("gaudi"))
    newer = parse_base("gaudi:vault.habana.ai/gaudi-docker/9.0.0/x:latest")
    assert newer == Base(kind="gaudi", image="vault.habana.ai/gaudi-docker/9.0.0/x:latest")
    check_base_image(newer)


def test_the_context_has_all_that_the_file_copies_and_can_be_installed(tmp_path: Path) -> None:
    write_context(tmp_path, parse_base("cpu"))
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == "shardyard" and project["scripts"] == ours["scripts"]
    names = {re.split("[<>]", text)[0] for text in project["dependencies"]}
    extras = ours["optional-dependencies"]
    named = ("aws", "fp8", "h5", "images", "mlflow", "parquet", "plots", "prometheus",
             "tensorboard", "wandb", "zstd")  # fmt: skip
    brought = [extras[name] for name in named]
    on_nodes = [*ours["dependencies"], *(text for texts in brought for text in texts)]
    assert names == {text.split(">")[0] for text in on_nodes}
    assert not any("extra" in text for text in project["dependencies"])
    pinned = (tmp_path / "constraints.txt").read_text().splitlines()
    assert any(line.startswith("numpy==") for line in pinned)
    assert not any(line.startswith("torch==") or "+" in line for line in pinned)
    assert (tmp_path / "src" / "shardyard" / "cli" / "__init__.py").is_file()
    assert not list(tmp_path.rglob("__pycache__"))


def test_an_image_holds_the_extras_that_a_node_needs_and_no_others() -> None:
    required = [
        "numpy>=1",
        'boto3<2,>=1.40; extra == "aws"',
        "backports.zstd>=1; python_version < '3.14' and extra == 'zstd'",
        'kubernetes<37; extra == "kubernetes"',
        'shardyard[aws]; extra == "dev"',
    ]
    zstd = "backports.zstd>=1; python_version < '3.14'"
    assert needed_on_nodes(required) == ["numpy>=1", "boto3<2,>=1.40", zstd]


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["docker", "podman", "buildah"])
def test_a_build_is_one_call_with_the_context_last(name: str, tmp_path: Path) -> None:
    tool, log = made_tool(tmp_path, name)
    tool.build(tmp_path / "context", "shardyard:1")
    ((arguments, _),) = calls(log)
    context = str(tmp_path / "context")
    assert arguments[0] == "build" and arguments[-1] == context
    assert arguments[-5:-1] == ["--tag", "shardyard:1", "--file", f"{context}/Dockerfile"]


@pytest.mark.heavy
def test_options_of_the_tool_come_before_ours(tmp_path: Path) -> None:
    tool, log = made_tool(tmp_path)
    tool.build(tmp_path / "context", "shardyard:1", ("--network=host", "--build-arg", "A=b"))
    ((arguments, _),) = calls(log)
    assert arguments[3:8] == ["--network=host", "--build-arg", "A=b", "--tag", "shardyard:1"]


def test_a_word_that_is_no_option_of_a_tool_is_refused() -> None:
    answer = CliRunner().invoke(build, ["--base", "cpu", "registry.example/mine:1"])
    assert isinstance(answer.exception, RequestError)
    said = str(answer.exception)
    assert "'registry.example/mine:1' is not an option of the build tool" in said
    assert "The tool's own options come after --, such as -- --network=host" in said


def test_a_mirror_is_read_where_pip_runs() -> None:
    for base in BASES:
        stages = render_dockerfile(parse_base(base)).split("\nFROM ")[1:]
        for stage in stages:
            installs = "pip install" in stage or "pip wheel" in stage
            assert ("ARG PIP_INDEX_URL\n" in stage) == installs, (base, stage)


@pytest.mark.heavy
def test_a_build_that_fails_says_where_to_look(tmp_path: Path) -> None:
    tool, _ = made_tool(tmp_path, fails="build")
    with pytest.raises(
        ShardyardError, match=r"`podman build` failed with exit code 125\. Its last"
    ):
        tool.build(tmp_path, "shardyard:1")


def test_a_tool_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RequestError, match="none of docker, podman, buildah is installed"):
        find_container_cli()
    with pytest.raises(RequestError, match="docker is not installed on this machine"):
        find_container_cli("docker")
    made_tool(tmp_path, "podman")
    made_tool(tmp_path, "buildah")
    assert find_container_cli().name == "podman"
    assert find_container_cli("buildah").name == "buildah"


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["docker", "podman"])
def test_a_push_tells_the_digest(name: str, tmp_path: Path) -> None:
    tool, log = made_tool(tmp_path, name)
    assert tool.push("shardyard:1", "registry.example:5000/me/shardyard:1") == DIGEST
    first, second = [arguments for arguments, _ in calls(log)][:2]
    assert first == ["tag", "shardyard:1", "registry.example:5000/me/shardyard:1"]
    assert second[0] == "push" and second[-1] == "registry.example:5000/me/shardyard:1"
    assert (
        without_tag("registry.example:5000/me/shardyard:1") == "registry.example:5000/me/shardyard"
    )


@pytest.mark.heavy
def test_a_push_that_is_refused_says_what_to_check(tmp_path: Path) -> None:
    tool, _ = made_tool(tmp_path, fails="push")
    with pytest.raises(ShardyardError, match=r"that the registry knows you \(`podman login`\)"):
        tool.push("shardyard:1", "registry.example/shardyard:1")


def test_a_repository_of_ecr_is_known_by_its_host() -> None:
    registry = ecr_registry(f"{ECR}/team/shardyard:1")
    assert registry is not None
    assert (registry.host, registry.region) == (ECR, "eu-west-1")
    assert (registry.account, registry.repository) == ("123456789012", "team/shardyard")
    assert ecr_registry("docker.io/library/python:3") is None
    assert ecr_registry(f"evil.example/{ECR}/a:1") is None


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = pytest.importorskip("moto.server", reason="moto, which stands for AWS, is missing")
    service = server.ThreadedMotoServer(port=0, verbose=False)
    service.start()
    host, port = service.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    try:
        yield
    finally:
        service.stop()


@pytest.mark.heavy
@pytest.mark.usefixtures("aws")
def test_the_password_of_ecr_goes_by_stdin_and_is_forgotten(tmp_path: Path) -> None:
    tool, log = made_tool(tmp_path)
    registry = ecr_registry(f"{ECR}/team/shardyard:1")
    assert registry is not None
    assert registry.create() is True
    assert registry.create() is False  # it is there
    user, password = registry.credentials()
    assert tool.push("shardyard:1", f"{ECR}/team/shardyard:1") == DIGEST
    made = calls(log)
    assert made[0] == (["login", "--username", user, "--password-stdin", ECR], password)
    assert [arguments[0] for arguments, _ in made] == ["login", "tag", "push", "logout"]
    assert all(password not in " ".join(arguments) for arguments, _ in made)


@pytest.mark.heavy
@pytest.mark.usefixtures("aws")
def test_it_is_forgotten_also_when_the_push_fails(tmp_path: Path) -> None:
    tool, log = made_tool(tmp_path, fails="push")
    with pytest.raises(ShardyardError):
        tool.push("shardyard:1", f"{ECR}/team/shardyard:1")
    assert calls(log)[-1][0] == ["logout", ECR]


@pytest.mark.heavy
def test_buildah_builds_what_it_is_asked(tmp_path: Path) -> None:
    """A real build: of nothing but a file, as base images come from registries."""
    need("buildah")
    storage = tmp_path / "storage.conf"
    storage.write_text(
        f'[storage]\ndriver = "vfs"\ngraphroot = "{tmp_path}/root"\nrunroot = "{tmp_path}/run"\n'
    )
    environ = {
        **os.environ, "CONTAINERS_STORAGE_CONF": str(storage), "BUILDAH_ISOLATION": "chroot",
    }  # fmt: skip
    context = tmp_path / "context"
    context.mkdir()
    (context / "file").write_text("content")
    (context / "Dockerfile").write_text(f"FROM scratch\nCOPY file /\nUSER {USER_ID}\n")
    path = shutil.which("buildah")
    assert path is not None
    ContainerCli(name="buildah", path=path, environ=environ).build(context, "shardyard:test")
    answer = subprocess.run(
        [path, "inspect", "--type", "image", "shardyard:test"],
        env=environ, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(answer.stdout)["Docker"]["config"]["User"] == str(USER_ID)
