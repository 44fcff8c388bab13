"""An image without files: this machine's own are mounted into its containers, read-only.

It stands for the project's image where what is tested is what pods are told, and not what they are
made of: it needs no mirror, no registry and no minutes.
"""

import copy
import io
import sys
import tarfile
from pathlib import Path
from typing import Any

import torch

from tests.launchers.kubernetes.pods import Podman

IMAGE = "localhost/borrowed:1"
_USERS = {
    "passwd": b"root:x:0:0::/root:/bin/sh\nshardyard:x:10001:10001::/tmp:/bin/sh\n",
    "group": b"root:x:0:\nshardyard:x:10001:\n",
}


def add_borrowed_image(podman: Podman) -> None:
    """Folders to mount on, the users of our image, and where the loader finds libraries."""
    path = f"ENV PATH={sys.prefix}/bin:/usr/bin:/bin"
    podman.run("import", "--change", path, "-", IMAGE, data=_tarball())


def with_files(pod: dict[str, Any]) -> dict[str, Any]:
    """The pod, with Python, its packages and this project mounted where they are here."""
    made = copy.deepcopy(pod)
    for number, folder in enumerate(_folders()):
        name = f"borrowed-{number}"
        place = {"path": str(folder), "type": "Directory"}
        made["spec"]["volumes"].append({"name": name, "hostPath": place})
        mount = {"name": name, "mountPath": str(folder), "readOnly": True}
        made["spec"]["containers"][0]["volumeMounts"].append(mount)
    return made


def _folders() -> list[Path]:
    packages = Path(torch.__file__).resolve().parents[1]  # may lie outside, behind links
    project = Path(__file__).parents[3]
    found = {Path("/usr"), Path(sys.base_prefix), Path(sys.prefix), project, packages}
    return sorted(each for each in found if not any(each != o and o in each.parents for o in found))


def _tarball() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:

        def add(name: str, *, mode: int = 0o755, link: str = "", data: bytes | None = None) -> None:
            entry = tarfile.TarInfo(name)
            entry.mode, entry.linkname = mode, link
            entry.type = tarfile.SYMTYPE if link else tarfile.DIRTYPE
            if data is not None:
                entry.type, entry.size = tarfile.REGTYPE, len(data)
            tar.addfile(entry, io.BytesIO(data or b""))

        for folder in ("usr", "proc", "sys", "dev", "run", "etc"):
            add(folder)
        add("tmp", mode=0o1777)
        for folder in ("bin", "sbin", "lib", "lib64"):
            add(folder, link=f"usr/{folder}")
        for name, data in _USERS.items():
            add(f"etc/{name}", mode=0o644, data=data)
        add("etc/ld.so.cache", mode=0o644, data=Path("/etc/ld.so.cache").read_bytes())
    return out.getvalue()
