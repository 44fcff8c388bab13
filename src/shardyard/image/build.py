"""The image that runs training: built from what is here, pushed to a registry."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardyard import __version__
from shardyard.errors import RequestError
from shardyard.image.container_cli import find_container_cli, without_tag
from shardyard.image.dockerfile import (
    Base,
    check_base_image,
    is_image,
    parse_base,
    render_dockerfile,
    write_context,
)
from shardyard.image.ecr import Registry, ecr_registry
from shardyard.log import info


@dataclass(frozen=True, kw_only=True)
class Build:
    """An image to build; checked, but not built."""

    base: Base
    name: str

    @property
    def dockerfile(self) -> str:
        return render_dockerfile(self.base)

    def run(self, tool: str | None = None, options: Sequence[str] = ()) -> str:
        """Build it; the name of the program that did.

        Args:
            tool: Program that builds; None: the first found.
            options: Its own.
        """
        check_base_image(self.base)
        program = find_container_cli(tool)
        with tempfile.TemporaryDirectory(prefix="shardyard-image-") as folder:
            write_context(Path(folder), self.base)
            with program.logged_in_to_read(self.base.image):
                program.build(Path(folder), self.name, options)
        return program.name


@dataclass(frozen=True, kw_only=True)
class Push:
    """A push to do; checked, but not done."""

    local: str
    remote: str
    registry: Registry | None
    """Amazon's registry, in which a missing repository is created; None: another registry."""

    def run(self, tool: str | None = None) -> str | None:
        """Push it; its digest, where the tool says one."""
        program = find_container_cli(tool)
        if self.registry is not None and self.registry.create():
            info(f"created ECR repository {self.registry.repository}")
        return program.push(self.local, self.remote)

    def pinned(self, digest: str | None) -> str:
        """Return the value to set as launch.image."""
        return self.remote if digest is None else f"{without_tag(self.remote)}@{digest}"


def build_of(base: str, tag: str | None = None) -> Build:
    """Return the build on a base; raises an error if its name is invalid."""
    return Build(base=parse_base(base), name=_name(tag or _default_tag(base), "--tag"))


def push_of(to: str, base: str, tag: str | None = None) -> Push:
    """Return the push to a registry; raises an error if a name is invalid."""
    local, remote = _name(tag or _default_tag(base), "--tag"), _name(to, "TO")
    return Push(local=local, remote=remote, registry=ecr_registry(remote))


def _default_tag(base: str) -> str:
    return f"shardyard:{__version__}-{parse_base(base).kind}"


def _name(text: str, option: str) -> str:
    if not is_image(text):
        raise RequestError(
            f"{option} {text!r} is not a name of an image. Write registry/name:tag in lower case, "
            "such as 123456789012.dkr.ecr.us-east-1.amazonaws.com/shardyard:1."
        )
    return text
