"""Words of bash for any text, on one line and printable."""

import shlex


def word(text: str) -> str:
    """Return one word of bash for a text.

    sbatch takes no script with CR LF, and text on a terminal must not act on it.
    """
    if text.isprintable():
        return shlex.quote(text)
    # $'...' is bash's, not that of POSIX shells: the batch script names /bin/bash.
    quoted = text.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + "".join(c if c.isprintable() else _in_bytes(c) for c in quoted) + "'"


def _in_bytes(character: str) -> str:
    # As bytes, because bash writes \u in the locale's encoding, which on a node may be another.
    return "".join(f"\\x{byte:02x}" for byte in character.encode())
