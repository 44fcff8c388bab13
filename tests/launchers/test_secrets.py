"""Secrets: read where they are kept, refused when they are written down, never shown."""

import base64
import json
import os
import shlex
from pathlib import Path

import pytest

from shardyard.cli import main
from shardyard.config.load import load_recipe
from shardyard.config.schema.launch import Launch
from shardyard.errors import AccessError, RequestError
from shardyard.launchers.secrets import (
    Reference,
    check_supported,
    loose_files,
    parse_reference,
    redact,
    resolve_local,
)
from tests.launchers.planted import planted_secrets

ARN = "arn:aws:secretsmanager:us-east-1:123456789012:secret:hf-token-AbCdEf"
FORMS = [
    ("env", "env", None, None),
    ("env:MY_HF_TOKEN", "env", "MY_HF_TOKEN", None),
    ("file:/run/secrets/hf token", "file", "/run/secrets/hf token", None),
    ("k8s:hub-keys/hf.token", "k8s", "hub-keys", "hf.token"),
    ("aws-sm:team/hf", "aws-sm", "team/hf", None),
    ("aws-sm:team/hf#token", "aws-sm", "team/hf", "token"),
    (f"aws-sm:{ARN}", "aws-sm", ARN, None),
    (f"aws-sm:{ARN}#token", "aws-sm", ARN, "token"),
    ("ssm:/team/hf", "ssm", "/team/hf", None),
    ("ssm:arn:aws:ssm:us-east-1:123456789012:parameter/team/hf", "ssm",
     "arn:aws:ssm:us-east-1:123456789012:parameter/team/hf", None),
]  # fmt: skip


@pytest.mark.parametrize(("text", "kind", "name", "key"), FORMS)
def test_a_reference_says_where_a_secret_is_kept(
    text: str, kind: str, name: str | None, key: str | None
) -> None:
    assert parse_reference(text) == Reference(kind=kind, name=name, key=key)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    ["", "s3cret", "env:", "env:1A", "env:A B", "file:relative", "file:/", "k8s:keys", "k8s:keys/",
     "k8s:Keys/a", "k8s:a/b/c", "aws-sm:", "aws-sm:a#", "aws-sm:a b", "ssm:", "vault:a",
     "ssm:/a\n", "env:A\n", f"ssm:{ARN}"],
)  # fmt: skip
def test_anything_else_is_refused_with_the_forms_and_not_repeated(text: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse_reference(text)
    message = str(refused.value)
    assert "Write env, env:NAME, file:/path, k8s:name/key, aws-sm:name-or-arn" in message
    assert len(text) < 8 or text not in message.partition(" Write ")[0]


def test_secrets_are_read_from_the_environment_and_from_files(tmp_path: Path) -> None:
    planted = planted_secrets(tmp_path, kinds=("env", "env:OTHER", "file"))
    found = resolve_local(planted.secrets, planted.environ)
    assert found == dict(zip(planted.secrets, planted.values, strict=True))


def test_what_a_scheduler_keeps_stands_in_the_environment_of_its_jobs() -> None:
    section = {"HF_TOKEN": "k8s:keys/hf", "KEY": "ssm:/key", "OTHER": "env:NOT_HERE"}
    environ = {"HF_TOKEN": "a", "KEY": "b", "OTHER": "c"}
    assert resolve_local(section, environ) == environ


def test_all_missing_secrets_are_named_with_what_to_do(tmp_path: Path) -> None:
    section = {"A": "env", "B": "env:OTHER", "C": f"file:{tmp_path / 'no'}", "D": "k8s:keys/d"}
    with pytest.raises(RequestError) as refused:
        resolve_local(section, {"A": ""})
    lines = str(refused.value).splitlines()
    assert [line.partition(":")[0] for line in lines] == [f"secrets.{name}" for name in "ABCD"]
    assert "Set it: export A=..." in lines[0] and "export OTHER=..." in lines[1]
    assert "put it there, or on a file system that all nodes share" in lines[2]
    assert "To run on this machine: export D=..." in lines[3]


@pytest.mark.parametrize("text", ["\ufeffhf_abc\r\n", "  hf_abc \n", "\ufeff hf_abc", "hf_abc"])
def test_what_editors_put_around_a_token_is_left_out(tmp_path: Path, text: str) -> None:
    (tmp_path / "token").write_text(text)
    section = {"HF_TOKEN": f"file:{tmp_path / 'token'}", "OTHER": "env"}
    assert resolve_local(section, {"OTHER": text}) == {"HF_TOKEN": "hf_abc", "OTHER": "hf_abc"}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("hf_\u201cabc", "LEFT DOUBLE QUOTATION MARK"),
        ("hf_ab\xe4", "LATIN SMALL LETTER A WITH DIAERESIS"),
        ("hf_a\u200bb", "ZERO WIDTH SPACE"),
        ("hf_a b", "SPACE"),
        ("hf_a\nhf_b", "U+000A"),
    ],
)
def test_a_letter_that_no_token_can_hold_is_named_with_its_secret(
    tmp_path: Path, text: str, name: str
) -> None:
    (tmp_path / "token").write_text(text)
    section = {"HF_TOKEN": f"file:{tmp_path / 'token'}", "WANDB_API_KEY": "env"}
    with pytest.raises(RequestError) as refused:
        resolve_local(section, {"WANDB_API_KEY": text})
    first, second = str(refused.value).splitlines()
    assert f"secrets.HF_TOKEN: {tmp_path / 'token'} holds '{name}' at character" in first
    assert f"secrets.WANDB_API_KEY holds '{name}'" in second and "Copy it again" in second
    assert text not in str(refused.value)


def test_a_password_and_a_private_key_may_hold_other_letters(tmp_path: Path) -> None:
    key = "-----BEGIN OPENSSH PRIVATE KEY-----\nabc\n-----END OPENSSH PRIVATE KEY-----"
    (tmp_path / "key").write_text(key + "\n")
    section = {"DB_PASSWORD": "env", "DEPLOY_KEY": f"file:{tmp_path / 'key'}"}
    assert resolve_local(section, {"DB_PASSWORD": "gr\xfcn"}) == {
        "DB_PASSWORD": "gr\xfcn", "DEPLOY_KEY": key,
    }  # fmt: skip


def test_an_empty_file_is_no_secret(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(RequestError, match=r"is empty or binary. It must hold only the secret"):
        resolve_local({"A": f"file:{tmp_path / 'empty'}"}, {})


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_of_somebody_else_is_a_matter_of_permission(tmp_path: Path) -> None:
    (tmp_path / "closed").write_text("x")
    (tmp_path / "closed").chmod(0)
    with pytest.raises(AccessError, match=r"may not be read by this user. Make it yours"):
        resolve_local({"A": f"file:{tmp_path / 'closed'}"}, {})


def test_a_file_that_others_can_read_is_warned_about(tmp_path: Path) -> None:
    file = tmp_path / "a key"
    file.write_text("x")
    file.chmod(0o640)
    (warning,) = loose_files({"A": f"file:{file}", "B": "env"})
    assert "has mode 0640" in warning and f"chmod 600 '{file}'" in warning
    file.chmod(0o600)
    assert loose_files({"A": f"file:{file}"}) == []


def test_a_launcher_refuses_what_its_jobs_cannot_read() -> None:
    section = {"A": "env", "B": "k8s:keys/b"}
    launch = Launch()
    check_supported(section, ("env", "k8s"), launch, launcher="kubernetes")
    words = r"secrets\.B=k8s:keys/b: jobs of slurm cannot read B from k8s\. Store it: `install"
    with pytest.raises(RequestError, match=words):
        check_supported(section, ("env", "file"), launch, launcher="slurm")


def test_a_secret_is_taken_out_however_it_was_written() -> None:
    value, key = "a\"b'c $é/+", "-----BEGIN KEY-----\n0123456789abcdef0123\n-----END KEY-----\n"
    written = [value, json.dumps(value), shlex.quote(value), base64.b64encode(value.encode())]
    text = f"{written} {key} 0123456789abcdef0123"
    shown = redact(text, [value, key, ""])
    for form in (value, json.dumps(value)[1:-1], "0123456789abcdef0123"):
        assert form not in shown
    assert base64.b64encode(value.encode()).decode() not in shown
    assert redact("nothing here", ["", " "]) == "nothing here"


def test_a_longer_secret_is_taken_out_whole() -> None:
    assert redact("abcd", ["ab", "abcd"]) == "(not shown)"


def test_planted_secrets_are_found_wherever_they_have_got_to(tmp_path: Path) -> None:
    """The tool that tests of the launchers rely on does find what it looks for."""
    planted = planted_secrets(tmp_path)
    first, second = planted.values
    (tmp_path / "run").mkdir()
    assert planted.leaks({"a": ["nothing"]}, tmp_path, "text") == []
    (tmp_path / "run" / "job.sh").write_text(f"export A={shlex.quote(first)}")
    encoded = base64.b64encode(f"x{second}".encode())
    assert len(planted.leaks(tmp_path)) == 1
    assert len(set(planted.leaks({"data": {"a": encoded.decode()}}))) == 1
    assert planted.leaks(json.dumps(first)) and planted.leaks([second])


def test_training_here_takes_the_secrets_before_anything_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["model.preset=llama-tiny", f"run.dir={tmp_path}", "secrets={NO_SUCH_1: env}"]
    assert main(["train", *arguments]) == 2
    assert "the environment has no NO_SUCH_1" in capsys.readouterr().err


def test_a_recipe_keeps_references(tmp_path: Path) -> None:
    planted = planted_secrets(tmp_path)
    recipe = load_recipe([], [f"secrets={json.dumps(planted.secrets)}"])
    assert recipe.secrets == planted.secrets
    assert planted.leaks(recipe, recipe.model_dump_json()) == []
