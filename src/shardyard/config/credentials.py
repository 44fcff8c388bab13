"""Recognise credentials that somebody wrote into a recipe, so that nobody prints or stores them."""

import re

_KINDS = {
    "a Hugging Face token": r"\bhf_[A-Za-z0-9]{10,}",
    "an AWS access key": r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}",
    "a GitHub token": r"\b(?:gh[pousr]_[A-Za-z0-9]{10,}|github_pat_[A-Za-z0-9_]{10,})",
    "an API key": r"\bsk-[A-Za-z0-9_-]{20,}",
    "a Slack token": r"\bxox[abprs]-[A-Za-z0-9-]{10,}",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "an address with a password": r"\b[a-z][a-z0-9+.-]*://[^/\s:@]+:[^/\s@]+@",
}
_PATTERNS = {kind: re.compile(pattern) for kind, pattern in _KINDS.items()}

HIDDEN = "(not shown)"
"""Stands for a credential in messages and manifests."""


def find_credential(text: str) -> str | None:
    """What kind of credential a text holds, in words, or None."""
    return next((kind for kind, pattern in _PATTERNS.items() if pattern.search(text)), None)


def redact(text: str) -> str:
    """The text itself, or a placeholder if it holds a credential."""
    return HIDDEN if find_credential(text) else text
