"""Whether the weights beside which adapters were trained are still the ones in a folder.

No checkpoint of a run with adapters holds its base, so a resume and an export read it from where
it came from, and must notice another one there.
"""

import hashlib
from pathlib import Path

_SAMPLES, _BYTES = 64, 4096
"""Of each file, evenly spaced: weights that were trained differ nearly everywhere, and reading
all of a large base at every start would take minutes."""


def base_digest(folder: Path) -> str | None:
    """Names, sizes and samples of a folder's weights; None: it has none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return None
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}\n".encode())
        with path.open("rb") as file:
            for number in range(_SAMPLES):
                file.seek(max(0, size - _BYTES) * number // (_SAMPLES - 1))
                digest.update(file.read(_BYTES))
    return digest.hexdigest()[:16]
