"""Files of a user's code folder that are private: credentials by name or content, and by mode.

Names follow the lists of secret scanners and of GitHub's gitignore templates. Source code is judged
by its content only, since `config/secrets.py` is a module and no credential.
"""

import os
import re
import stat
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from shardyard.config.token_shapes import find_token

_NAMES = {
    # environments and log-ins of tools
    ".env", ".env.*", "*.env", ".envrc", ".netrc", "_netrc", "netrc", ".netrc.*", ".pgpass",
    "pgpass.conf", ".my.cnf", ".mylogin.cnf", ".npmrc", ".yarnrc", ".yarnrc.yml", ".pypirc",
    "pip.conf", ".git-credentials", ".htpasswd", ".htdigest", ".boto", ".s3cfg", ".s3ql",
    ".dockercfg", ".dockerconfigjson", ".vault-token", ".vault-pass", ".vault_pass*",
    ".terraformrc", ".databrickscfg", ".kaggle.json", "kaggle.json", ".comet.config",
    "kubeconfig", "kubeconfig.*", "*.kubeconfig", ".esmtprc", ".msmtprc", ".fetchmailrc",
    ".rclone.conf", "rclone.conf", ".modal.toml", "shadow", "master.key", "hf_token",
    ".hf_token", "stored_tokens",
    # keys
    "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "identity", "*_rsa", "*_dsa", "*_ecdsa",
    "*_ed25519", "ssh_host_*_key", "*.key", "*.ppk", "*.p8", "*.p12", "*.pfx", "*.pkcs12", "*.jks",
    "*.jceks", "*.keystore", "*.kdb", "*.kdbx", "*.keytab", "*.agekey", "*.gpg", "*.pgp",
    "secring.*", "*.ovpn", "*.rdp",
    # what holds several
    "credentials", "credentials.*", "*_credentials.*", "*-credentials.*", ".credentials*", "secret",
    "secret.*", "secrets", "secrets.*", ".secret*", "*.secret", "*.secrets", "client_secret*.json",
    "service?account*.json", "serviceaccount*.json", "*.tfstate", "*.tfstate.*", "*.tfvars",
    "*.tfvars.json", "rootkey.csv", "*accesskeys.csv", "token", ".token", "*.token", "token.txt",
    "password", "passwords", "password.txt", "passwords.txt", ".*_history",
}  # fmt: skip
"""Patterns of a file's name in small letters."""

_PUBLIC = {
    ".env.example", ".env.sample", ".env.template", ".env.dist", ".env.defaults", "example.env",
    "sample.env", "template.env", "*.pub",
}  # fmt: skip

_FOLDERS = {".ssh", ".aws", ".azure", ".gnupg", ".kube", ".docker", ".gcloud", ".oci", ".secrets"}

_SOURCE = {
    ".py", ".pyi", ".pyx", ".ipynb", ".sh", ".bash", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h",
    ".hpp", ".rs", ".go", ".js", ".ts", ".jl", ".lua", ".r", ".md", ".rst",
}  # fmt: skip

_KEY_FILE = re.compile(rb"\s*(?:-----BEGIN [A-Z0-9 ]*PRIVATE KEY|PuTTY-User-Key-File-)")

_ALLOWED = re.compile(r"gitleaks:allow|pragma: ?allowlist[ -]secret", re.IGNORECASE)
"""Comments by which gitleaks and detect-secrets let a line pass."""


def private_reason(name: str, file: Path) -> str | None:
    """Why a file is not sent, as the rest of a sentence; None: it can be sent.

    Args:
        name: Its path below the folder that is packed.
    """
    path = PurePosixPath(name)
    if is_called_private(path):
        return "its name is one of a file with credentials"
    if not os.access(file, os.R_OK):
        return "you may not read it"
    mode = stat.S_IMODE(file.stat().st_mode)
    # With a umask of 077 every file is private, so that the mode says nothing about this one.
    usual = 0o044 & ~_umask()
    if mode & usual != usual:
        return f"other users may not read it (mode {mode:04o})"
    with file.open("rb") as content:
        return _key_reason(content.read(200))


def packed_private_reason(name: str, content: bytes) -> str | None:
    """The same of a file in an archive, of which its owner's mode is not known."""
    if is_called_private(PurePosixPath(name)):
        return "its name is one of a file with credentials"
    return _key_reason(content[:200])


def _key_reason(start: bytes) -> str | None:
    return "it is a private key" if _KEY_FILE.match(start) else None


def is_called_private(path: PurePosixPath) -> bool:
    """Whether a file's name, or a folder above it, says that it holds credentials."""
    name = path.name.lower()
    if _FOLDERS & {part.lower() for part in path.parts[:-1]}:
        return True
    if path.suffix.lower() in _SOURCE or any(fnmatchcase(name, public) for public in _PUBLIC):
        return False
    return any(fnmatchcase(name, pattern) for pattern in _NAMES)


def tokens_in(content: bytes) -> list[tuple[int, str]]:
    """Lines of a text file that hold a token or a key, from 1, and of which kind."""
    text = _text(content)
    # Most files hold no token: one search of the text is faster than one of each line.
    if text is None or find_token(text) is None:
        return []
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        kind = find_token(line)
        if kind and not _ALLOWED.search(line):
            found.append((number, kind))
    return found


def _text(content: bytes) -> str | None:
    """The text of a file, or None if it is binary."""
    # UTF-16 is full of NUL bytes, and would pass for binary and go unsearched.
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        return content.decode("utf-16", errors="replace")
    return None if b"\0" in content[:8192] else content.decode(errors="replace")


def _umask() -> int:
    """Rights that this process takes from new files; read without a change, which threads share."""
    with Path("/proc/self/status").open(encoding="ascii", errors="replace") as status:
        for line in status:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0o022
