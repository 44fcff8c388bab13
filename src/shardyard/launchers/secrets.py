"""Secrets of a run: from where the recipe says they are kept into the environment, and no further.

Schedulers that keep secrets themselves (Kubernetes, AWS) are handed the reference and put the value
into the environment of the job; `env` and `file` are read on the machine that needs them.
"""

import base64
import json
import os
import re
import shlex
import stat
import unicodedata
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from urllib.parse import quote

from shardyard.config.paths import unreadable_reason
from shardyard.config.schema.launch import Launch
from shardyard.config.secrets import HIDDEN, Kind, Reference, parse_reference, parse_references
from shardyard.errors import AccessError, Problem, RecipeError, RequestError, ShardyardError

_PAGE = "secrets#sources"

_TOKEN = re.compile(r"(TOKEN|KEY|KEY_ID)$")
"""Names of secrets that are sent in headers."""

__all__ = [
    "Kind",
    "Reference",
    "check_supported",
    "loose_files",
    "parse_reference",
    "parse_references",
    "redact",
    "resolve_local",
    "store_commands",
    "unsupported",
    "without_margins",
]  # fmt: skip


def resolve_local(secrets: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Values of a recipe's secrets, on the machine whose processes need them.

    What the scheduler keeps (k8s, aws-sm, ssm) it has put into the environment under the secret's
    own name, and so may a launcher have done with any other kind.

    Args:
        secrets: The recipe's section.
        environ: The environment of this process.

    Raises:
        RequestError: Secrets are missing or empty; all are named.
        AccessError: A file may not be read by this user.
    """
    found, missing, forbidden = {}, [], []
    for name, reference in parse_references(secrets).items():
        try:
            found[name] = _value(name, reference, environ)
        except AccessError as error:
            forbidden.append(str(error))
        except RequestError as error:
            missing.append(str(error))
    if missing or forbidden:
        kind: type[ShardyardError] = RequestError if missing else AccessError
        raise kind("\n".join([*missing, *forbidden]))
    return found


def loose_files(secrets: Mapping[str, str]) -> list[str]:
    """A sentence for each secret's file that other users may read or change."""
    found = []
    for name, reference in parse_references(secrets).items():
        path = Path(reference.name or "")
        if reference.kind != "file" or unreadable_reason(str(path)) or not path.is_file():
            continue  # the one who reads it says what is wrong with it
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            found.append(
                f"secrets.{name}: {path} has mode {mode:04o}, so that other users can reach it. "
                f"Keep it to yourself: chmod 600 {shlex.quote(str(path))}"
            )
    return found


def unsupported(
    secrets: Mapping[str, str], kinds: Collection[str], launch: Launch, *, launcher: str
) -> list[Problem]:
    """Find references that a launcher's jobs cannot resolve.

    Args:
        secrets: The recipe's section.
        kinds: The launcher's ``Capabilities.secrets``.
        launch: Where the launcher keeps secrets.
        launcher: Its name.
    """
    found = []
    for name, reference in parse_references(secrets).items():
        if reference.kind in kinds:
            continue
        store = "your shell" if reference.kind == "env" else reference.kind
        ways = store_commands(name, kinds, launch)
        remedy = f"{launcher} passes no secrets: leave it out."
        if ways:
            line, value = ways[0]
            remedy = f"Store it: `{line}`, then set secrets.{name}={value}."
        elif kinds:
            remedy = f"Use {' or '.join(kinds)}."
        text = f"={secrets[name]}: jobs of {launcher} cannot read {name} from {store}. {remedy}"
        found.append(Problem(f"secrets.{name}", text))
    return found


def check_supported(
    secrets: Mapping[str, str], kinds: Collection[str], launch: Launch, *, launcher: str
) -> None:
    """Reject references that a launcher's jobs cannot resolve, as ``unsupported`` lists them.

    Raises:
        RecipeError: All that it cannot resolve.
    """
    found = unsupported(secrets, kinds, launch, launcher=launcher)
    if found:
        raise RecipeError(found)


def store_commands(name: str, kinds: Collection[str], launch: Launch) -> list[tuple[str, str]]:
    """For each place where a launcher's jobs find a secret: the line that puts it there.

    Each line reads the value from stdin: on a command line others would see it, and the shell's
    history would keep it.

    Returns:
        Line of a shell and what ``secrets`` then says.
    """
    called = name.lower().replace("_", "-")
    key = called.rpartition("-")[2]
    pods, region = launch.kubernetes, launch.aws_batch.region
    where = f" --region {shlex.quote(region)}" if region else ""
    file = Path.home() / f".{called}"
    ways = {
        "k8s": (
            f"kubectl create secret generic {called} --from-file={key}=/dev/stdin --context "
            f"{shlex.quote(pods.context or 'CONTEXT')} --namespace {shlex.quote(pods.namespace)}",
            f"k8s:{called}/{key}",
        ),
        "aws-sm": (
            f"aws secretsmanager create-secret --name {called} --secret-string file:///dev/stdin"
            f"{where} --query ARN --output text",
            "aws-sm:ARN",  # Batch takes a name for one of SSM
        ),
        "ssm": (
            f"aws ssm put-parameter --type SecureString --name {called} --value file:///dev/stdin"
            f"{where}",
            f"ssm:{called}",
        ),
        "file": (f"install -m 600 /dev/stdin {shlex.quote(str(file))}", f"file:{file}"),
    }
    return [ways[kind] for kind in kinds if kind in ways]


def redact(text: str, values: Iterable[str]) -> str:
    """A text without the secrets, however JSON, a shell, an address or base64 would write them."""
    written = {form for value in values for form in _forms(value)}
    for form in sorted(written, key=len, reverse=True):  # a value may be part of another
        text = text.replace(form, HIDDEN)
    return text


def _forms(value: str) -> Iterable[str]:
    """Yield the forms of the value in a text; a long line of a key counts by itself."""
    if not value.strip():
        return
    # Shorter lines, such as the braces of a JSON key, would blank ordinary text.
    lines = [line for line in value.splitlines() if len(line) >= 16]
    for part in {value, value.strip(), *lines}:
        yield part
        yield json.dumps(part)[1:-1]
        yield json.dumps(part, ensure_ascii=False)[1:-1]
        yield shlex.quote(part)
        yield quote(part, safe="")
        yield base64.b64encode(part.encode()).decode()


def _value(name: str, reference: Reference, environ: Mapping[str, str]) -> str:
    if reference.kind == "file":
        return _read(name, Path(reference.name or ""))
    source = reference.name if reference.kind == "env" and reference.name else name
    if value := without_margins(environ.get(source) or environ.get(name) or ""):
        return _sendable(f"secrets.{name}", name, value)
    if reference.kind == "env":
        text = f"the environment has no {source}, or it is empty. Set it: export {source}=..."
    else:
        text = (
            f"{reference.kind} is read by the scheduler, and it put no {name} into the "
            f"environment. To run on this machine: export {name}=..."
        )
    raise RequestError(f"secrets.{name}: {text}")


def _read(name: str, path: Path) -> str:
    where = f"secrets.{name}: {path}"
    try:
        value = without_margins(path.read_text(encoding="utf-8"))
    except PermissionError as error:
        raise AccessError(
            f"{where} may not be read by this user. Make it yours and mode 0600.", page=_PAGE
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise RequestError(
            f"{where} cannot be read on {os.uname().nodename}: {why}. Jobs read the file on the "
            "node; put it there, or on a file system that all nodes share."
        ) from error
    if not value or "\0" in value:
        raise RequestError(f"{where} is empty or binary. It must hold only the secret, as text.")
    return _sendable(where, name, value)


def without_margins(value: str) -> str:
    """A value without the byte order mark and blanks that editors and shells put around it."""
    # Twice, because blanks may be on either side of the mark.
    return value.strip().strip("\ufeff").strip()


def _sendable(where: str, name: str, value: str) -> str:
    """A value as it is, if a header can hold it, where it is a token or a key by its name.

    Raises:
        RequestError: A character of it was changed by an editor or a chat.
    """
    # A key in PEM form has line ends, and is sent in no header.
    if not _TOKEN.search(name) or "-----BEGIN" in value:
        return value
    wrong = next((each for each in value if not "!" <= each <= "~"), None)
    if wrong is None:
        return value
    raise RequestError(
        f"{where} holds {unicodedata.name(wrong, f'U+{ord(wrong):04X}')!r} at character "
        f"{value.index(wrong) + 1}, which no token can hold. An editor or a chat may have changed "
        "it. Copy it again from where it was issued."
    )
