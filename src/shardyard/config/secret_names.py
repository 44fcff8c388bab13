"""Names of environment variables that say that their value is a secret.

As secret scanners judge names: by the words at their end, however they are joined (PGPASSWORD,
authToken, MINIO_SECRETKEY, HF_TOKEN_PROD). A word that other values share (KEY, AUTH) counts only
if the value looks random.
"""

import re

_ENDINGS = (
    "token", "password", "passwd", "passphrase", "passcode", "secret", "secrets", "credential",
    "credentials", "creds", "apikey", "apikeys", "accesskey", "accesskeyid", "secretkey",
    "secretkeyid", "privatekey", "authkey", "masterkey", "signingkey", "encryptionkey", "sshkey",
    "deploykey",
    "licensekey", "licencekey", "storagekey", "accountkey", "sharedkey", "subscriptionkey",
    "clientkey", "servicekey", "sessionkey", "hmackey", "apitokens", "authtokens", "accesstokens",
    "webhook",
    "webhookurl", "connectionstring", "connstr", "jwt", "bearer", "dbpwd", "dbpass", "userpass",
    "basicauth",
)  # fmt: skip

_LAST_WORDS = {"pwd", "pw", "pass", "pat", "cookie", "otp", "totp"}
"""Secrets as a word of their own only: `compass` is none."""

_WEAK = re.compile(r"access|auth|api|cred|key|passw|secret|token(?!iz)|salt|dsn|signature")
"""Parts of a name that count only if the value looks random."""

_PLACES = re.compile(
    r"(?:_(?:PROD|PRODUCTION|DEV|STAGING|STAGE|TEST|CI|BASE64|B64|JSON|VALUE|ENV|RO|RW|READ|WRITE"
    r"|OLD|NEW|PRIMARY|SECONDARY|DEFAULT)|_?\d{1,4})$",
    re.IGNORECASE,
)
"""Suffixes that may follow the word that counts."""

_NO_SECRET = re.compile(
    r"(?:pad|eos|bos|unk|mask|sep|cls|image|stop|end|start|begin|special|max|min|num|per|next"
    r"|implicit|disable|enable|use|require|allow|has|is)_?(?:tokens?|pass|key)$|^(?:OLD)?PWD$",
    re.IGNORECASE,
)
"""Tokens of a vocabulary, switches, and the shell's own working folder."""

_SWITCHES = {"", "0", "1", "true", "false", "yes", "no", "on", "off", "none", "null"}


def is_called_a_secret(name: str, value: str) -> bool:
    """Whether a variable is called as a secret is and its value may be one."""
    if value.strip().lower() in _SWITCHES:
        return False
    base = name
    while (shorter := _PLACES.sub("", base)) != base:
        base = shorter
    if _NO_SECRET.search(base):
        return False
    words = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", base).lower().split("_")
    joined = "".join(words)
    if joined.endswith(_ENDINGS) or (len(words) > 1 and words[-1] in _LAST_WORDS):
        return True
    return _WEAK.search(joined) is not None and _is_likely_random(value)


def _is_likely_random(value: str) -> bool:
    if not re.fullmatch(r"[\w.~+=/-]{16,}", value, re.ASCII) or value.startswith(("/", ".", "~")):
        return False
    kinds = [bool(re.search(kind, value)) for kind in ("[0-9]", "[a-z]", "[A-Z]")]
    return all(kinds) or (value.isalnum() and kinds[0] and any(kinds[1:]))
