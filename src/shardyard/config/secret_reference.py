"""Where a secret is kept, as a recipe says it: `HF_TOKEN: file:/run/hf`, never its value."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shardyard.config.credentials import HIDDEN
from shardyard.errors import RequestError

Kind = Literal["env", "file", "k8s", "aws-sm", "ssm"]

FORMS = (
    "env, env:NAME, file:/path, k8s:name/key, aws-sm:name-or-arn, aws-sm:name-or-arn#json-key "
    "or ssm:name-or-arn"
)

# env: POSIX; k8s: DNS subdomain and data key (kubernetes.io, Secrets); AWS: the characters that
# CreateSecret and PutParameter accept, and the ARNs of both services.
_VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
_PATTERNS: dict[Kind, re.Pattern[str]] = {
    "env": re.compile(rf"(?P<name>{_VARIABLE})"),
    "file": re.compile(r"(?P<name>/[^\0\n]*[^\0\n/])"),
    "k8s": re.compile(r"(?P<name>[a-z0-9](?:[-.a-z0-9]{0,251}[a-z0-9])?)/(?P<key>[-._A-Za-z0-9]+)"),
    "aws-sm": re.compile(
        r"(?P<name>arn:aws[-a-z]*:secretsmanager:[-a-z0-9]+:\d{12}:secret:[\w/+=.@-]+"
        r"|[\w/+=.@-]{1,512})(?:#(?P<key>[\w.@-]+))?",
        re.ASCII,
    ),
    "ssm": re.compile(
        r"(?P<name>arn:aws[-a-z]*:ssm:[-a-z0-9]+:\d{12}:parameter/[\w./-]+|[\w./-]{1,1011})",
        re.ASCII,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Where one secret is kept."""

    kind: Kind
    name: str | None
    """env: the variable, None where it is called as the secret; file: the path; k8s, aws-sm and
    ssm: the name or ARN of what holds it."""
    key: str | None = None
    """k8s: key of the Secret; aws-sm: key of the JSON object that the secret is, if it is one."""


def parse_reference(text: str) -> Reference:
    """Read `file:/run/hf` and the like.

    Raises:
        RequestError: It has none of the forms. The text is not repeated: it may be the secret.
    """
    if text == "env":
        return Reference(kind="env", name=None)
    word, colon, rest = text.partition(":")
    for kind, pattern in _PATTERNS.items():
        found = pattern.fullmatch(rest) if colon and word == kind else None
        if found:
            parts = found.groupdict()
            return Reference(kind=kind, name=parts["name"], key=parts.get("key"))
    known = f" after {word}:" if word in _PATTERNS and colon else ""
    raise RequestError(
        f"{HIDDEN}{known} does not say where the secret is kept. A recipe is copied into run "
        f"folders and job definitions, so it never holds the secret itself. Write {FORMS}."
    )


def parse_references(secrets: Mapping[str, str]) -> dict[str, Reference]:
    """The recipe's section, by the name of the environment variable that each secret becomes.

    Raises:
        RequestError: A name is no name of a variable, or a text has none of the forms.
    """
    found = {}
    for name, text in secrets.items():
        if not is_variable(name):
            raise RequestError(
                f"secrets.{name} is no name of an environment variable, which the secret becomes. "
                "Use letters, digits and underscores, such as HF_TOKEN."
            )
        try:
            found[name] = parse_reference(text)
        except RequestError as error:
            raise RequestError(f"secrets.{name}: {error}") from error
    return found


def is_variable(name: str) -> bool:
    """Whether an environment variable can be called so."""
    return re.fullmatch(_VARIABLE, name) is not None
