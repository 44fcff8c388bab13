"""The certificate of the etcd that we render: made once, kept in a Secret, mounted in pods of runs.

Server and clients show the same certificate and trust no other one, so that the Secret is what a
password would be: only who has it reaches etcd. In contrast to etcd's users, it needs no set-up
after a start, and a store that has lost its data is as closed as before.
"""

import base64
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from shardyard.config.endpoints import secret_name
from shardyard.config.schema.launch import Kubernetes
from shardyard.errors import RequestError, ShardyardError

FOLDER = "/shardyard/etcd"
"""Folder in which pods of runs, and etcd, see the files of the Secret."""
FILES = {"ETCDCTL_CACERT": "ca.crt", "ETCDCTL_CERT": "tls.crt", "ETCDCTL_KEY": "tls.key"}
"""Variable that etcd's clients read -> key of the Secret."""
SECRET_TYPE = "kubernetes.io/tls"
# Long, because it is renewed only by `doctor --uninstall` and `--install`.
_DAYS = 3650
_VOLUME = "etcd-tls"


def volume(secret: str) -> dict[str, Any]:
    """Its files, readable by the pod's group only."""
    return {"name": _VOLUME, "secret": {"secretName": secret, "defaultMode": 0o440}}


MOUNT = {"name": _VOLUME, "mountPath": FOLDER, "readOnly": True}


def show_certificate(settings: Kubernetes, template: dict[str, Any]) -> None:
    """Have the pods of a run show the certificate, where their etcd asks for one."""
    if settings.etcd is None or (secret := secret_name(settings)) is None:
        return
    spec = template["spec"]
    spec["volumes"].append(volume(secret))
    (container,) = spec["containers"]
    container["volumeMounts"].append(MOUNT)
    container["env"] += [
        {"name": name, "value": f"{FOLDER}/{file}"} for name, file in FILES.items()
    ]


def new_certificate(name: str, namespace: str) -> dict[str, str]:
    """Make a key and its certificate; data of the Secret.

    Args:
        name: Of the service.

    Raises:
        RequestError: openssl is not installed here.
    """
    inside = f"{name}.{namespace}"
    hosts = (name, inside, f"{inside}.svc", f"{inside}.svc.cluster.local")
    names = ",".join(f"DNS:{host}" for host in (*hosts, "localhost"))
    with tempfile.TemporaryDirectory(prefix="shardyard-") as folder:  # of mode 0700
        key, certificate = Path(folder) / "tls.key", Path(folder) / "tls.crt"
        _openssl(
            "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
            "-days", str(_DAYS), "-subj", "/CN=shardyard-etcd",
            "-addext", f"subjectAltName={names}",
            "-addext", "extendedKeyUsage=serverAuth,clientAuth",  # etcd's gateway is its own client
            # keyCertSign, because it is its own authority: ca.crt is the same certificate.
            "-addext", "keyUsage=critical,digitalSignature,keyCertSign",
            "-keyout", str(key), "-out", str(certificate),
        )  # fmt: skip
        secret, public = (
            base64.b64encode(file.read_bytes()).decode() for file in (key, certificate)
        )
    return {"ca.crt": public, "tls.crt": public, "tls.key": secret}


def _openssl(*words: str) -> None:
    try:
        done = subprocess.run(
            ["openssl", *words], stdin=subprocess.DEVNULL, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise RequestError(
            "openssl is not installed here, and the certificate of etcd is made with it. Install "
            "it, or put a certificate of yours into a Secret with ca.crt, tls.crt and tls.key and "
            "name it: launch.kubernetes.etcd_secret=NAME."
        ) from error
    if done.returncode:
        raise ShardyardError(f"openssl made no certificate for etcd: {done.stderr.strip()}")
