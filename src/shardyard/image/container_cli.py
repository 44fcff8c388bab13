"""Build and push images with docker, podman or buildah; no credential is ever an argument."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from shardyard.errors import RequestError, ShardyardError
from shardyard.image.ecr import Registry, ecr_registry
from shardyard.io.files import parse_json

TOOLS = ("docker", "podman", "buildah")


@dataclass(frozen=True, kw_only=True)
class ContainerCli:
    """One program that builds images."""

    name: str
    path: str
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def build_command(self, context: Path, tag: str, options: Sequence[str] = ()) -> list[str]:
        """Return the command that builds an image.

        podman and buildah leave labels and USER unchanged in docker format.
        """
        formatted = [] if self.name == "docker" else ["--format", "docker"]
        file = str(context / "Dockerfile")
        named = ["--tag", tag, "--file", file]
        return [self.path, "build", *formatted, *options, *named, str(context)]

    def build(self, context: Path, tag: str, options: Sequence[str] = ()) -> None:
        """Build; the tool's talk goes to stderr.

        Args:
            options: The tool's own, such as ``--network=host`` or ``--build-arg``.

        Raises:
            ShardyardError: The tool failed.
        """
        hint = "Its last lines say at which step. Fix that and build again."
        self._run(self.build_command(context, tag, options), hint=hint)

    def push(self, local: str, remote: str) -> str | None:
        """Push an image under another name; returns its digest if the registry reports it.

        Raises:
            ShardyardError: The tool failed.
        """
        hint = (
            f"Check that the image exists (`shardyard image build --tag {local}`), that the "
            f"registry knows you (`{self.name} login`), that the repository exists, and that the "
            "tag is new there: repositories of ECR that shardyard makes let no tag move."
        )
        with self._logged_in(ecr_registry(remote)):
            self._run([self.path, "tag", local, remote], hint=hint)
            with tempfile.TemporaryDirectory(prefix="shardyard-") as folder:
                file = Path(folder) / "digest"
                wanted = [] if self.name == "docker" else ["--digestfile", str(file)]
                self._run([self.path, "push", *wanted, remote], hint=hint)
                digest = file.read_text().strip() if file.is_file() else self._digest(remote)
        return digest or None

    @contextmanager
    def logged_in_to_read(self, image: str) -> Iterator[None]:
        """While a base image is pulled: logged in to its registry, where that is ECR."""
        with self._logged_in(ecr_registry(image)):
            yield

    @contextmanager
    def _logged_in(self, registry: Registry | None) -> Iterator[None]:
        """Log in to ECR and out again: its password lives 12 hours, and a file would keep it."""
        if registry is None:
            yield
            return
        user, password = registry.credentials()
        hint = "Check that this machine reaches the registry."
        login = [self.path, "login", "--username", user, "--password-stdin", registry.host]
        self._run(login, hint=hint, stdin=password)
        try:
            yield
        finally:
            subprocess.run(
                [self.path, "logout", registry.host], env=dict(self.environ), check=False,
                capture_output=True,
            )  # fmt: skip

    def _digest(self, remote: str) -> str:
        """Return the digest docker has of an image that it has just pushed; empty: none."""
        command = [self.path, "image", "inspect", "--format", "{{json .RepoDigests}}", remote]
        answer = subprocess.run(
            command, env=dict(self.environ), capture_output=True, text=True, check=False
        )
        try:
            names = parse_json(answer.stdout)
        except ValueError:
            return ""
        repository = without_tag(remote)
        known = [name.partition("@") for name in names]
        return next((digest for name, _, digest in known if name == repository), "")

    def _run(self, command: Sequence[str], *, hint: str, stdin: str = "") -> None:
        try:
            done = subprocess.run(
                command, env=dict(self.environ), input=stdin, text=True, check=False,
                stdout=2,
            )  # fmt: skip
        except OSError as error:
            raise ShardyardError(
                f"{self.path} cannot be started: {error.strerror}. Is {self.name} installed whole? "
                f"Choose another with --tool {'|'.join(TOOLS)}."
            ) from error
        if done.returncode != 0:
            raise ShardyardError(
                f"`{self.name} {command[1]}` failed with exit code {done.returncode}. {hint}"
            )


def find_container_cli(name: str | None = None) -> ContainerCli:
    """The tool of this name, or the first that is installed.

    Raises:
        RequestError: It is not installed, or none is.
    """
    for each in TOOLS if name is None else (name,):
        path = shutil.which(each)
        if path is not None:
            return ContainerCli(name=each, path=path)
    missing = f"{name} is not installed" if name else f"none of {', '.join(TOOLS)} is installed"
    raise RequestError(
        f"{missing} on this machine, or not on its PATH. An image is built by one of them. Install "
        "one, such as `apt-get install buildah`; --dry-run shows the Dockerfile without."
    )


def without_tag(image: str) -> str:
    """``host:5000/a:1`` -> ``host:5000/a``."""
    name = image.partition("@")[0]
    head, slash, last = name.rpartition("/")
    return head + slash + last.partition(":")[0]
