"""Images in real registries: Debian's docker-registry on this machine's own addresses."""

import base64
import json
import socket
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from shardyard.image.registry import ImageName, ask_registry, find_image
from tests.image.registries import answering, free_port, push, running_registry

SERVICE, ISSUER = "a registry", "an issuer"


def token_for(repository: str, folder: Path) -> tuple[bytes, Path]:
    """What a token server gives to everybody who wants to pull, and whom the registry believes."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import padding, rsa

    key, now = rsa.generate_private_key(public_exponent=65537, key_size=2048), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, ISSUER)])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .sign(key, hashes.SHA256())
    )
    bundle = folder / "certificate.pem"
    bundle.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    der = certificate.public_bytes(serialization.Encoding.DER)
    header = {"typ": "JWT", "alg": "RS256", "x5c": [base64.b64encode(der).decode()]}
    claims = {
        "iss": ISSUER, "aud": SERVICE, "sub": "", "jti": "1", "iat": int(now.timestamp()) - 60,
        "nbf": int(now.timestamp()) - 60, "exp": int(now.timestamp()) + 600,
        "access": [{"type": "repository", "name": repository, "actions": ["pull"]}],
    }  # fmt: skip
    parts = [_base64(json.dumps(part).encode()) for part in (header, claims)]
    signature = key.sign(".".join(parts).encode(), padding.PKCS1v15(), hashes.SHA256())
    token = ".".join([*parts, _base64(signature)])
    return json.dumps({"token": token}).encode(), bundle


def _base64(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode().rstrip("=")


@pytest.mark.parametrize(
    ("image", "url"),
    [
        ("ubuntu", "https://registry-1.docker.io/v2/library/ubuntu/manifests/latest"),
        ("docker.io/ubuntu:1", "https://registry-1.docker.io/v2/library/ubuntu/manifests/1"),
        ("me/it:1", "https://registry-1.docker.io/v2/me/it/manifests/1"),
        ("ghcr.io/me/it@sha256:ab", "https://ghcr.io/v2/me/it/manifests/sha256:ab"),
        ("ghcr.io/me/it:1@sha256:ab", "https://ghcr.io/v2/me/it/manifests/sha256:ab"),
        ("host:5000/a/b/c:1", "https://host:5000/v2/a/b/c/manifests/1"),
        ("localhost:5000/a:1", "http://localhost:5000/v2/a/manifests/1"),
        ("127.0.0.1:5000/a", "http://127.0.0.1:5000/v2/a/manifests/latest"),
    ],
)
def test_a_name_is_read_as_docker_reads_it(image: str, url: str) -> None:
    assert ImageName.of(image).url == url


@pytest.mark.heavy
def test_an_open_registry_is_asked_for_tags_and_digests(tmp_path: Path) -> None:
    with running_registry(tmp_path) as address:
        digest = push(address, "me/it", "1")
        assert ask_registry(f"{address}/me/it:1") == "there"
        assert ask_registry(f"{address}/me/it@{digest}") == "there"
        other = f"sha256:{'0' * 64}"
        for image in (f"{address}/me/it:2", f"{address}/me/it@{other}", f"{address}/none:1"):
            finding = find_image(image)
            assert finding.verdict == "problem" and "no node could pull it" in finding.what
            assert "shardyard image push" in finding.mend
        assert find_image(f"{address}/me/it:1").verdict == "ok"


@pytest.mark.heavy
def test_a_token_that_everybody_gets_opens_a_registry(tmp_path: Path) -> None:
    with running_registry(tmp_path) as address:
        push(address, "me/it", "1")
    body, bundle = token_for("me/it", tmp_path)
    with answering(200, {}, body) as server:
        token = {
            "realm": f"http://{server}/token", "service": SERVICE, "issuer": ISSUER,
            "rootcertbundle": str(bundle),
        }  # fmt: skip
        with running_registry(tmp_path, {"token": token}) as address:
            assert ask_registry(f"{address}/me/it:1") == "there"
            assert ask_registry(f"{address}/me/it:2") == "missing"
            assert ask_registry(f"{address}/you/it:1") == "closed"  # not in the token


@pytest.mark.heavy
def test_what_a_password_opens_is_said_and_is_right_where_nodes_have_one(tmp_path: Path) -> None:
    passwords = tmp_path / "htpasswd"
    passwords.write_text("me:$2y$05$c4WoMPo3SXsafkva.HHa6uXQZWr7oboPiC2bT/r7q1BB8I2s0BRqC\n")
    auth = {"htpasswd": {"realm": "mine", "path": str(passwords)}}
    with running_registry(tmp_path, auth) as address:
        finding = find_image(f"{address}/me/it:1")
        assert finding.verdict == "warning" and "only to those with a password" in finding.what
        assert "let in" in finding.mend
        assert find_image(f"{address}/me/it:1", has_password=True).verdict == "ok"


def test_a_registry_that_does_not_answer_is_a_warning() -> None:
    finding = find_image(f"127.0.0.1:{free_port()}/me/it:1")
    assert finding.verdict == "warning" and "does not answer this machine" in finding.what
    assert "spelt right" in finding.mend
    with answering(500, {}) as address:
        assert ask_registry(f"{address}/me/it:1") == "silent"


def test_a_token_server_that_gives_no_token_leaves_a_registry_closed() -> None:
    with answering(200, {}, b"[]") as server:
        asked = {"WWW-Authenticate": f'Bearer realm="http://{server}/token",service="x"'}
        with answering(401, asked) as address:
            assert ask_registry(f"{address}/me/it:1") == "closed"


def test_what_speaks_no_http_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]

        def talk() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"220 mail\r\n\r\n")

        thread = threading.Thread(target=talk)
        thread.start()
        assert ask_registry(f"127.0.0.1:{port}/me/it:1") == "silent"
        thread.join()


def test_nobody_is_asked_for_a_token_without_encryption() -> None:
    asked = {"WWW-Authenticate": 'Bearer realm="http://registry.example/token",service="x"'}
    with answering(401, asked) as address:
        started = time.monotonic()
        assert ask_registry(f"{address}/me/it:1") == "closed"
        assert time.monotonic() - started < 2
