"""Recognise credentials in a recipe and an environment, so that they are not shown or stored.

They are known by the shapes that issuers document (``token_shapes``), and by the content of
an address or an assignment. The name of a variable counts too (``is_called_a_secret``). Two
forms have no mark of their own. The 40 characters of an AWS secret key are known by how
random they are. The 40 hexadecimal digits of a W&B key are a git commit's too, and count
only where no commit belongs (``is_hex_key``).

Any process of the same user can read what a program was started with
(``/proc/PID/environ``). So can core dumps and every program that it starts in turn. Children
get secrets only if they use them.
"""

import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from shardyard.config.secret_names import is_called_a_secret
from shardyard.config.token_shapes import find_token
from shardyard.errors import RequestError

_ADDRESS = re.compile(r"(?<=[A-Za-z0-9+.-])://(?:[^/\s:@?#]*:[^/\s@]+|(?P<user>[^/\s:@?#]+))@")
"""A URL with user info: a password, or a user's name that may be a token."""

_PARAMETER = re.compile(
    r"[?&](?:[a-z]{1,12}[-_])?(?:token|api_?key|key|password|passwd|pwd|secret|sig|signature"
    r"|x-amz-signature|x-goog-signature|accountkey|sharedaccesskey)=(?![$<{%])[^&;\s]{8}",
    re.IGNORECASE,
)
_ASSIGNED = re.compile(
    r"(?:password|passwd|passphrase|secret_?key|api_?key|account_?key|access_?key|auth_?token"
    r"|access_?token|\bpwd)[\"']?[ \t]{0,3}[=:][ \t]{0,3}[\"']?(?![$<{%/~])[^\s;&,\"']{6}",
    re.IGNORECASE,
)
_HEADER = re.compile(
    r"\bauthorization[\"']?[ \t]{0,3}[:=][ \t]{0,3}[\"']?[a-z]{3,10}[ \t]+[\w.~+/=-]{8}"
    r"|\bbearer[ \t]+(?=[a-z._~+/=-]{0,200}[0-9])[\w.~+/=-]{16}",
    re.IGNORECASE,
)

_FORTY = re.compile(r"(?<![A-Za-z0-9/+._-])[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=._-])")
_LEAST_BITS = 4.4
"""Least Shannon entropy, in bits a character. Of 40 random characters of base64 99.7 % have
more; paths of 40 characters have about 4.2, and words less.
"""

HIDDEN = "(not shown)"
"""Replacement for a credential in messages and manifests."""


def find_credential(text: str) -> str | None:
    """Return the kind of credential that a text holds, in words, or None."""
    found = find_token(text)
    if found is not None:
        return found
    if any(_is_secret_address(url) for url in _ADDRESS.finditer(text)):
        return "an address with a password"
    if _PARAMETER.search(text):
        return "an address with a password"
    if _ASSIGNED.search(text) or _HEADER.search(text):
        return "a password or key"
    return "an AWS secret key" if any(map(_is_random, _FORTY.findall(text))) else None


def _is_secret_address(url: re.Match[str]) -> bool:
    """Whether the user info of a URL has a password, or is a token in place of a name."""
    user = url["user"]
    if user is None:
        return True
    has_digit = any(sign.isdigit() for sign in user)
    return len(user) >= 20 or (len(user) >= 10 and has_digit and user.isalnum())


def is_hex_key(text: str) -> bool:
    """Whether a text is 40 hexadecimal digits: a W&B key, or a git commit."""
    return re.fullmatch(r"[0-9a-f]{40}", text) is not None


def redact(text: str) -> str:
    """The text itself, or a placeholder if it holds a credential."""
    return HIDDEN if find_credential(text) else text


def show(value: Any) -> str:
    """A value in a message; a credential is never shown."""
    text = json.dumps(value) if isinstance(value, bool | None) else repr(value)
    if find_credential(text):
        return HIDDEN
    return text if len(text) <= 80 else f"{text[:77]}..."


def shown_command(words: Sequence[str]) -> str:
    """A command to paste, for a message; words with a credential are hidden."""
    return shlex.join(HIDDEN if find_credential(word) else word for word in words)


_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)(?:[^/?#]*@)?([^?#]*)")
"""A scheme, then host and path; what may be a password or a signature is in no group."""


def without_secrets(text: str) -> str:
    """A URL without what may be a password or a signature; any other text as it is."""
    url = _URL.match(text)
    return text if url is None else url[1] + url[2]


def _is_random(text: str) -> bool:
    has_all = all(re.search(kind, text) for kind in ("[a-z]", "[A-Z]", "[0-9]"))
    shares = [count / len(text) for count in Counter(text).values()]
    return has_all and -sum(share * math.log2(share) for share in shares) >= _LEAST_BITS


# Where a secret is kept, as a recipe says it: `HF_TOKEN: file:/run/hf`, never its value.

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
    """Location where one secret is kept."""

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
                f"secrets.{name} becomes an environment variable, and is not a valid name for one. "
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


def secret_variables(environ: Mapping[str, str], *, named: Collection[str] = ()) -> dict[str, str]:
    """Variables that hold a secret, by their names or values.

    Args:
        named: Those that a recipe lists under ``secrets``.
    """
    return {
        name: value
        for name, value in environ.items()
        if name in named or is_called_a_secret(name, value) or find_credential(value)
    }


def without_secret_variables(
    environ: Mapping[str, str], *, named: Collection[str] = ()
) -> dict[str, str]:
    """All variables but those."""
    hidden = secret_variables(environ, named=named)
    return {name: value for name, value in environ.items() if name not in hidden}


@contextmanager
def withheld(
    environ: MutableMapping[str, str], *, named: Collection[str] = ()
) -> Iterator[dict[str, str]]:
    """Take secrets out of an environment while the block starts children; gives what they are."""
    hidden = secret_variables(environ, named=named)
    for name in hidden:
        del environ[name]
    try:
        yield hidden
    finally:
        environ.update(hidden)
