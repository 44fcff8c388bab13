"""Private files stay here: by name, by mode, by content; everything else of a folder is sent."""

import io
import os
import tarfile
from pathlib import Path, PurePosixPath

import pytest

from shardyard.control.code_bundle import describe_code
from shardyard.errors import RequestError
from shardyard.launchers.bundle import Bundle, bundle, read_archive, write_bundle
from shardyard.launchers.private_files import is_called_private, tokens_in

TOKEN = "hf_" + "A1b2" * 9
KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaA==\n-----END OPENSSH PRIVATE KEY-----\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "mine").mkdir(parents=True)
    (folder / "mine" / "model.py").write_text("print(1)\n")
    return folder


def modes(made: Bundle, folder: Path) -> dict[str, int]:
    content = read_archive(write_bundle(made, folder), digest=made.digest)
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        return {member.name: member.mode for member in tar}


@pytest.mark.heavy
def test_private_files_of_a_folder_are_left_out_and_named(project: Path, tmp_path: Path) -> None:
    for name in (".env", ".netrc", "deploy", "notes.yaml", ".env.example"):
        (project / "mine" / name).write_text("x: 1\n")
    (project / "mine" / "deploy").write_text(KEY)
    (project / "mine" / "notes.yaml").chmod(0o600)
    made = bundle(["mine"], "", start=project)
    assert made.names == ("mine/.env.example", "mine/model.py")
    assert set(modes(made, tmp_path)) == {f"code/{name}" for name in made.names} | {"recipe.yaml"}
    assert made.excluded_files == {
        "mine/.env": "its name is one of a file with credentials",
        "mine/.netrc": "its name is one of a file with credentials",
        "mine/deploy": "it is a private key",
        "mine/notes.yaml": "other users may not read it (mode 0600)",
    }
    assert describe_code(made, in_full=True)[:2] == [
        "code: 2 files sent: mine/.env.example, mine/model.py",
        "code: not sent: mine/.env: its name is one of a file with credentials",
    ]


@pytest.mark.heavy
def test_a_file_is_unpacked_with_no_more_rights_than_it_has_here(
    project: Path, tmp_path: Path
) -> None:
    for file in (project / "mine" / "model.py", project / "mine" / "run.sh"):
        file.write_text("x\n")
        file.chmod(0o600)
    (project / "mine" / "run.sh").chmod(0o750)
    before = os.umask(0o077)  # of a user whose files are all private the mode says nothing
    try:
        made = bundle(["mine"], "", start=project)
    finally:
        os.umask(before)
    assert modes(made, tmp_path)["code/mine/model.py"] == 0o600
    assert modes(made, tmp_path)["code/mine/run.sh"] == 0o750


@pytest.mark.heavy
@pytest.mark.parametrize("entry", ["mine/.env", ".ssh", "mine/*.pem"])
def test_an_entry_of_private_files_only_is_rejected(entry: str, project: Path) -> None:
    (project / ".ssh").mkdir()
    for name in (".ssh/config", "mine/.env", "mine/host.pem"):
        (project / name).write_text(KEY)
    with pytest.raises(RequestError, match=r"lists private files only, .* chmod go\+r FILE"):
        bundle([entry], "", start=project)


@pytest.mark.heavy
def test_code_that_holds_tokens_is_rejected_by_file_and_line(project: Path) -> None:
    (project / "mine" / "a.py").write_text(f"import os\nTOKEN = '{TOKEN}'\n")
    (project / "mine" / "b.json").write_text(f'{{"token": "{TOKEN}"}}')
    with pytest.raises(RequestError) as refused:
        bundle(["mine"], "", start=project)
    assert "mine/a.py:2 (a Hugging Face token), mine/b.json:1 (a Hug" in str(refused.value)
    assert "gitleaks:allow" in str(refused.value) and TOKEN not in str(refused.value)


def test_a_line_that_a_scanner_lets_pass_passes() -> None:
    text = f"a = '{TOKEN}'  # gitleaks:allow\nb = '{TOKEN}'  # pragma: allowlist secret\n"
    assert tokens_in(text.encode()) == []
    assert tokens_in(f"{text}c = '{TOKEN}'".encode()) == [(3, "a Hugging Face token")]
    assert tokens_in(f"HF={TOKEN}".encode("utf-16")) == [(1, "a Hugging Face token")]
    assert tokens_in(b"\0" + TOKEN.encode()) == [], "a binary file"


@pytest.mark.heavy
def test_a_fifo_is_no_code(project: Path) -> None:
    os.mkfifo(project / "pipe")
    with pytest.raises(RequestError, match=r"lists .*pipe, which is neither a file nor a folder"):
        bundle(["pipe"], "", start=project)


@pytest.mark.parametrize(
    "name",
    [
        ".env", ".env.local", "prod.env", ".ENV", ".pgpass", ".npmrc", ".pypirc",
        ".git-credentials",
        "id_ed25519", "deploy_rsa", "server.key", "x.p12", "x.kdbx", "terraform.tfstate",
        "gcp-credentials.json", "service-account.json", "kubeconfig", ".aws/config",
        "a/.kube/config",
        "secrets.yaml", "token", ".bash_history",
    ],
)  # fmt: skip
def test_names_of_credential_files(name: str) -> None:
    assert is_called_private(PurePosixPath(name))


@pytest.mark.parametrize(
    "name",
    ["config/secrets.py", "secrets/__init__.py", ".env.example", "id_rsa.pub", "tokenizer.json",
     "token_ids.txt", "keys.py", "environment.yml", "ca.pem"],
)  # fmt: skip
def test_names_of_code_and_public_files(name: str) -> None:
    assert not is_called_private(PurePosixPath(name))
