"""A bundle is named by what it holds, and nothing else gets out of it, or into it."""

import gzip
import hashlib
import io
import os
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardyard.errors import DataError, RequestError
from shardyard.launchers.bundle import bundle, unpack, write_bundle
from shardyard.launchers.code_files import check_no_shadowing

RECIPE = "model: {preset: llama-tiny}\n"


@dataclass(frozen=True)
class Packed:
    """A bundle, written."""

    digest: str
    path: Path
    files: int


def pack(*code: str, into: Path, start: Path, text: str = RECIPE, **limit: int) -> Packed:
    made = bundle(code, text, start=start, **limit)
    return Packed(made.digest, write_bundle(made, into), made.files)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "mine" / "__pycache__").mkdir(parents=True)
    (folder / "mine" / "model.py").write_text("print(1)\n")
    (folder / "mine" / "run.sh").write_text("#!/bin/sh\n")
    (folder / "mine" / "run.sh").chmod(0o755)
    (folder / "mine" / "__pycache__" / "model.pyc").write_bytes(b"x")
    (folder / "notes.txt").write_text("not listed")
    return folder


@pytest.mark.heavy
def test_a_bundle_comes_out_as_it_went_in(project: Path, tmp_path: Path) -> None:
    made = pack("mine", into=tmp_path / "out", start=project)
    unpack(made.path, tmp_path / "node", digest=made.digest)
    files = {str(p.relative_to(tmp_path / "node")) for p in (tmp_path / "node").rglob("*.*")}
    assert files == {"recipe.yaml", "code/mine/model.py", "code/mine/run.sh"}
    assert (tmp_path / "node/recipe.yaml").read_text() == "model: {preset: llama-tiny}\n"
    assert os.access(tmp_path / "node/code/mine/run.sh", os.X_OK)
    assert made.files == 3


@pytest.mark.heavy
def test_equal_content_is_an_equal_file_wherever_and_whenever(
    project: Path, tmp_path: Path
) -> None:
    first = pack("mine", into=tmp_path / "a", start=project)
    project.rename(tmp_path / "moved")
    os.utime(tmp_path / "moved" / "mine" / "model.py", (1, 1))
    second = pack("mine", into=tmp_path / "b", start=tmp_path / "moved")
    assert first.digest == second.digest and first.path.name == second.path.name
    assert first.path.read_bytes() == second.path.read_bytes()
    with tarfile.open(first.path) as tar:
        assert {(m.mtime, m.uid, m.gid, m.uname, m.gname) for m in tar} == {(0, 0, 0, "", "")}
        assert tar.getnames() == sorted(tar.getnames())


@pytest.mark.heavy
def test_other_content_is_another_bundle(project: Path, tmp_path: Path) -> None:
    digests = {pack("mine", into=tmp_path, start=project).digest}
    digests.add(pack("mine", text="x: 1\n", into=tmp_path, start=project).digest)
    (project / "mine" / "model.py").write_text("print(2)\n")
    digests.add(pack("mine", into=tmp_path, start=project).digest)
    assert len(digests) == 3


@pytest.mark.heavy
def test_what_git_ignores_is_left_out(project: Path, tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(project)], check=True)
    (project / ".gitignore").write_text("*.key\n")
    (project / "mine" / "my.key").write_text("private")
    (project / "top.key").write_text("private")
    (project / ".venv").mkdir()
    (project / ".venv" / "python.txt").write_text("not code")
    made = pack("*", ".venv", into=tmp_path, start=project)
    with tarfile.open(made.path) as tar:
        assert tar.getnames() == [
            "code/mine/model.py", "code/mine/run.sh", "code/notes.txt", "recipe.yaml",
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("statistics.py", r"statistics\.py \(as a module of Python\).*`mv statistics\.py my_stat"),
        ("random/__init__.py", r"random \(as a module of Python\)"),
        ("queue.cpython-313-x86_64-linux-gnu.so", r"queue\..*\.so \(as a module of Python\)"),
        ("torch.py", r"torch\.py \(as a module that Shardyard needs\)"),
        ("yaml/__init__.py", r"yaml \(as a module that Shardyard needs\)"),
    ],
)
def test_code_that_would_hide_a_module_of_the_training_is_rejected_by_name(
    name: str, words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        check_no_shadowing(["train.py", name])


@pytest.mark.parametrize(
    "name", ["mine/random.py", "random/data.txt", "random.yaml", "test/__init__.py", "src/torch.py"]
)
def test_code_that_hides_no_module_is_sent(name: str) -> None:
    check_no_shadowing(["train.py", name])


@pytest.mark.heavy
def test_code_is_packed_only_where_it_hides_no_module(tmp_path: Path) -> None:
    """As Python itself finds it, where a node puts the code."""
    (tmp_path / "statistics.py").write_text("")
    found = [sys.executable, "-c", "import statistics; print(statistics.__file__)"]
    environ = {"PYTHONPATH": str(tmp_path)}
    place = subprocess.run(found, env=environ, capture_output=True, text=True, check=True).stdout
    assert place.strip() == str(tmp_path / "statistics.py")
    with pytest.raises(RequestError, match="would hide modules"):
        bundle(["."], "", start=tmp_path)


def test_a_path_that_matches_nothing_is_refused(project: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"launch\.code: 'src/\*' matches no file in .*project"):
        pack("src/*", into=tmp_path, start=project)


@pytest.mark.heavy
def test_a_link_that_leads_outside_is_refused(project: Path, tmp_path: Path) -> None:
    for target in ("/etc/passwd", "/etc", "/nowhere"):
        (project / "mine" / "keys").symlink_to(target)
        with pytest.raises(RequestError, match=rf"leads to {target}, no file in .*remove the link"):
            pack("mine", into=tmp_path, start=project)
        (project / "mine" / "keys").unlink()


@pytest.mark.heavy
def test_a_link_inside_is_sent_as_the_file_it_leads_to(project: Path, tmp_path: Path) -> None:
    (project / "mine" / "same.py").symlink_to("model.py")
    made = pack("mine", into=tmp_path, start=project)
    unpack(made.path, tmp_path / "node", digest=made.digest)
    assert (tmp_path / "node/code/mine/same.py").read_text() == "print(1)\n"
    assert not (tmp_path / "node/code/mine/same.py").is_symlink()


@pytest.mark.heavy
def test_too_much_is_refused_with_the_largest_files(project: Path, tmp_path: Path) -> None:
    (project / "mine" / "weights.bin").write_bytes(bytes(3000))
    with pytest.raises(RequestError, match=r"3 files of .* largest are mine/weights\.bin \(") as no:
        pack("mine", into=tmp_path, start=project, limit_bytes=2000)
    assert "Leave them out, by .gitignore or a narrower list" in str(no.value)
    assert list(tmp_path.glob("*.tar.gz")) == []


def packed(folder: Path, *members: tarfile.TarInfo) -> tuple[Path, str]:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for member in members:
            tar.addfile(member, io.BytesIO(bytes(member.size)))
    path = folder / "made.tar.gz"
    path.write_bytes(gzip.compress(stream.getvalue()))
    return path, hashlib.sha256(stream.getvalue()).hexdigest()


def member(name: str, *, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(
    "bad",
    [
        member("../out"),
        member("/etc/out"),
        member("code/../../out"),
        member("code/link", kind=tarfile.SYMTYPE, target="/etc"),
        member("code/link", kind=tarfile.LNKTYPE, target="good"),
        member("code/device", kind=tarfile.CHRTYPE),
    ],
    ids=lambda info: f"{info.name} {info.type.decode()}",
)
def test_nothing_is_unpacked_that_is_no_file_inside(bad: tarfile.TarInfo, tmp_path: Path) -> None:
    path, digest = packed(tmp_path, member("good"), bad)
    with pytest.raises(DataError, match="not a plain file inside the folder"):
        unpack(path, tmp_path / "deep" / "node", digest=digest)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["made.tar.gz"]


@pytest.mark.heavy
def test_a_bundle_that_was_changed_on_its_way_is_refused(project: Path, tmp_path: Path) -> None:
    made = pack("mine", into=tmp_path, start=project)
    other = gzip.compress(gzip.decompress(made.path.read_bytes()).replace(b"(1)", b"(2)"))
    made.path.write_bytes(other)
    with pytest.raises(DataError, match=r"changed or damaged\. Launch again"):
        unpack(made.path, tmp_path / "node", digest=made.digest)
    made.path.write_bytes(other[:20])
    with pytest.raises(DataError, match=r"cannot be read: .* Launch again"):
        unpack(made.path, tmp_path / "node", digest=made.digest)
    assert not (tmp_path / "node").exists()


def test_a_bundle_that_would_fill_the_disk_is_refused(tmp_path: Path) -> None:
    large = member("zeros")
    large.size = 100_000
    path, digest = packed(tmp_path, large)
    with pytest.raises(DataError, match="unpacks to more than"):
        unpack(path, tmp_path / "node", digest=digest, limit_bytes=50_000)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("umask", "file", "program"), [(0o077, 0o600, 0o700), (0o002, 0o644, 0o755)]
)
def test_what_is_written_has_the_rights_that_the_umask_leaves(
    umask: int, file: int, program: int, project: Path, tmp_path: Path
) -> None:
    before = os.umask(umask)
    try:
        made = pack("mine", into=tmp_path / "out", start=project)
        unpack(made.path, tmp_path / "node", digest=made.digest)
    finally:
        os.umask(before)
    modes = {path: path.stat().st_mode & 0o777 for path in (tmp_path / "node").rglob("*")}
    assert made.path.stat().st_mode & 0o777 == file
    assert modes[tmp_path / "node/code/mine/model.py"] == file
    assert modes[tmp_path / "node/code/mine/run.sh"] == program
    assert modes[tmp_path / "node/code/mine"] == 0o755 & ~umask
