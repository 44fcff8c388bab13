"""Recognise credentials that somebody wrote into a recipe, so that nobody prints or stores them.

By the shapes that issuers document (``token_shapes``), by what an address or an assignment holds,
and by the name of a variable (``is_called_a_secret``). Two forms have no mark of their own: 40
characters of an AWS secret key, known by how random they are, and the 40 hexadecimal digits of a
W&B key, which are a git commit's too and so count only where no commit belongs (``is_hex_key``).
"""

import json
import math
import re
from collections import Counter
from typing import Any

from shardyard.config.token_shapes import find_token

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
"""Of Shannon entropy a character. Of 40 random characters of base64 99.7 % have more; paths of 40
characters have about 4.2, and words less."""

HIDDEN = "(not shown)"
"""Stands for a credential in messages and manifests."""


def find_credential(text: str) -> str | None:
    """What kind of credential a text holds, in words, or None."""
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
