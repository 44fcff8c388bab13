"""Recognise credentials that somebody wrote into a recipe, so that nobody prints or stores them.

By the forms that issuers document, whatever the setting is called. Two forms have no mark of their
own: 40 characters of an AWS secret key, told by how random they are, and the 40 hexadecimal digits
of a W&B key, which are a git commit's too and so count only where no commit belongs
(``is_hex_key``).
"""

import json
import math
import re
from collections import Counter
from typing import Any

_KINDS = {
    "a Hugging Face token": r"\b(?:hf_[A-Za-z0-9]{10,}|api_org_[A-Za-z0-9]{20,})",
    "an AWS access key": r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}",
    "a GitHub token": r"\b(?:gh[pousr]_[A-Za-z0-9]{10,}|github_pat_[A-Za-z0-9_]{10,})",
    "a GitLab token": r"\bgl(?:pat|oas|dt|rt|rtr|cbt|ptt|ft|imt|agent|soat|ffct)-[\w.=-]{16,}",
    "an NVIDIA API key": r"\bnvapi-[\w-]{20,}",
    "a W&B key": r"\b(?:wandb_v1_\w{16,}|local-[\w-]*?[0-9a-f]{40}\b)",
    "a Google API key": r"\b(?:AIza[\w-]{35}|GOCSPX-[\w-]{20,}|ya29\.[\w-]{20,})",
    "an Azure key": r"(?<![A-Za-z0-9+/])[A-Za-z0-9+/]{86}==|\b[\w~.]{3}\dQ~[\w~.-]{31,34}"
    r"|[?&]sig=[A-Za-z0-9%+/=]{30,}",
    "a signed token (JWT)": r"\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{10,}",
    "an API key": r"\bsk-(?:"
    r"(?:proj|svcacct|admin|None)-(?=[\w-]*[0-9])(?=[\w-]*[A-Z])[\w-]{20,}"  # OpenAI
    r"|ant-[a-z]+[0-9]{2}-[\w-]{20,}"  # Anthropic
    r"|or-v1-[0-9a-f]{32,}"  # OpenRouter
    r"|(?=[A-Za-z]*[0-9])[A-Za-z0-9]{20,})",  # OpenAI's older keys, DeepSeek and others
    "a PyPI or npm token": r"\b(?:pypi-[\w-]{40,}|npm_[A-Za-z0-9]{30,})",
    "a Slack token": r"\bxox[abeprs]-[A-Za-z0-9-]{10,}"
    r"|\bhooks\.slack\.com/services/\w+/\w+/\w{10,}",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "an address with a password": r"\b[a-z][a-z0-9+.-]*://[^/\s:@]+:[^/\s@]+@",
}
_PATTERNS = {kind: re.compile(pattern, re.ASCII) for kind, pattern in _KINDS.items()}

_FORTY = re.compile(r"(?<![A-Za-z0-9/+._-])[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=._-])")
_LEAST_BITS = 4.4
"""Of Shannon entropy a character. Of 40 random characters of base64 99.7 % have more; paths of 40
characters have about 4.2, and words less."""

HIDDEN = "(not shown)"
"""Stands for a credential in messages and manifests."""


def find_credential(text: str) -> str | None:
    """What kind of credential a text holds, in words, or None."""
    found = next((kind for kind, pattern in _PATTERNS.items() if pattern.search(text)), None)
    if found is None and any(map(_is_random, _FORTY.findall(text))):
        return "an AWS secret key"
    return found


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
