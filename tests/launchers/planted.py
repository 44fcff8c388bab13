"""Plant secrets, launch with them, and look where they have got to: nowhere but the environment.

planted = planted_secrets(tmp_path, kinds=("env", "file"))
recipe = load_recipe([], [f"secrets={json.dumps(planted.secrets)}", ...])
... render and submit with planted.environ ...
assert planted.leaks(rendered, run_dir, log_text) == []
"""

import base64
import json
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

_FOLDER = "where-the-secrets-are"


@dataclass(frozen=True, kw_only=True)
class Planted:
    """Secrets that nobody else knows."""

    secrets: dict[str, str]
    """A recipe's section."""
    environ: dict[str, str]
    """What the launching process has in its environment for it."""
    values: tuple[str, ...]
    """The secrets themselves."""

    def leaks(self, *things: object) -> list[str]:
        """Where the secrets stand, in words; things are values of any kind, files and folders."""
        return [
            f"{where} holds secret {number}"
            for place, thing in enumerate(things)
            for where, text in _texts(thing, f"thing {place}")
            for number, value in enumerate(self.values)
            if any(form in text for form in _forms(value))
        ]


def planted_secrets(
    folder: Path, *, kinds: Sequence[str] = ("env", "file"), more: dict[str, str] | None = None
) -> Planted:
    """Make secrets of these kinds; their files go into a folder that ``leaks`` passes over.

    Args:
        folder: Where the files are made.
        kinds: Among env, env:NAME and file.
        more: References of other kinds, as the section has them.
    """
    references, environ, values = dict(more or {}), {}, []
    for number, kind in enumerate(kinds):
        name = f"PLANTED_{number}"
        value = _secret()
        values.append(value)
        if kind == "file":
            file = folder / _FOLDER / name
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            file.write_text(value + "\n")
            file.chmod(0o600)
            references[name] = f"file:{file}"
        else:
            references[name] = kind
            environ[kind.partition(":")[2] or name] = value
    return Planted(secrets=references, environ=environ, values=tuple(values))


def _secret() -> str:
    """Random, with what shells, JSON and YAML write in a way of their own."""
    return f"pl{secrets.token_hex(12)}\"'$x: {{a}} \\{secrets.token_hex(4)}"


def _forms(value: str) -> Iterator[bytes]:
    # the first part has no character that anybody would escape
    yield value.partition('"')[0].encode()
    yield quote(value, safe="").encode()
    raw = value.encode()
    for shift in range(3):  # base64 depends on where in a text the value begins
        yield base64.b64encode(raw[shift : shift + (len(raw) - shift) // 3 * 3])
    yield raw.hex().encode()


def _texts(thing: object, where: str) -> Iterator[tuple[str, bytes]]:
    if isinstance(thing, Path):
        files = [thing] if thing.is_file() else sorted(thing.rglob("*"))
        for file in files:
            if file.is_file() and _FOLDER not in file.parts:
                yield str(file), file.read_bytes()
                yield f"the name of {file}", str(file).encode()
    elif isinstance(thing, bytes):
        yield where, thing
    else:
        yield where, str(thing).encode()
        yield where, repr(thing).encode()
        yield where, json.dumps(thing, default=repr).encode()
