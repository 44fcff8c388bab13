"""`shardyard image build|push`: the container that runs training on other machines."""

import json
import tempfile
from pathlib import Path

import click

from shardyard import __version__
from shardyard.cli.options import json_option
from shardyard.errors import RequestError
from shardyard.image.dockerfile import (
    is_image,
    parse_base,
    refuse_unfit,
    render_dockerfile,
    write_context,
)
from shardyard.image.ecr import ecr_registry
from shardyard.image.tool import TOOLS, find_tool, without_tag
from shardyard.terminal import say, tell

_base_option = click.option(
    "--base",
    default="cuda-efa",
    show_default=True,
    help="cpu, cuda-efa, gaudi, gaudi:IMAGE or dlc:IMAGE (an AWS deep learning container).",
)
_tool_option = click.option(
    "--tool", type=click.Choice(TOOLS), help="Program that builds; by default the first found."
)


@click.group()
def command() -> None:
    """Build the image that runs shardyard, and push it to a registry."""


@command.command()
@_base_option
@_tool_option
@click.option("--tag", help="Name of the image; by default shardyard:VERSION-BASE.")
@click.option("--dry-run", is_flag=True, help="Print the Dockerfile; build nothing.")
@json_option
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="[-- TOOL_OPTION...]")
def build(
    *,
    base: str,
    tool: str | None,
    tag: str | None,
    dry_run: bool,
    as_json: bool,
    options: tuple[str, ...],
) -> None:
    """Build an image with this version of shardyard and the versions of this environment.

    What stands behind -- goes to the tool: -- --build-arg PIP_INDEX_URL=https://mirror.example/simple
    """
    if options and not options[0].startswith("-"):
        raise RequestError(
            f"{options[0]!r} is no option of a tool that builds. What it is built on is --base, "
            "and the image's name is --tag. Behind -- stand the tool's own options, such as "
            "-- --network=host."
        )
    chosen = parse_base(base)
    name = _image_name(tag or _default_tag(base), "--tag")
    text = render_dockerfile(chosen)
    if dry_run:
        plain = {"base": chosen.image, "tag": name, "dockerfile": text}
        tell(json.dumps(plain, indent=1) if as_json else text.removesuffix("\n"))
        return
    refuse_unfit(chosen)
    program = find_tool(tool)
    with tempfile.TemporaryDirectory(prefix="shardyard-image-") as folder:
        write_context(Path(folder), chosen)
        with program.logged_in_to_read(chosen.image):
            program.build(Path(folder), name, options)
    answer = {"image": name, "base": chosen.image, "tool": program.name}
    tell(json.dumps(answer, indent=1) if as_json else name)


@command.command()
@click.argument("to")
@_base_option
@_tool_option
@click.option("--tag", help="Name of the image that was built; by default shardyard:VERSION-BASE.")
@click.option("--dry-run", is_flag=True, help="Say what would be pushed and created; do nothing.")
@json_option
def push(
    to: str, *, base: str, tool: str | None, tag: str | None, dry_run: bool, as_json: bool
) -> None:
    """Push the image to TO (registry/name:tag), and say its digest.

    A repository of Amazon ECR is created where it is missing; its password goes to the tool by
    stdin and is forgotten afterwards.
    """
    local = _image_name(tag or _default_tag(base), "--tag")
    remote = _image_name(to, "TO")
    registry = ecr_registry(remote)
    if dry_run:
        repository = None if registry is None else registry.repository
        plan = {"push": local, "to": remote, "ecr_repository": repository}
        tell(json.dumps(plan, indent=1) if as_json else _words(plan))
        return
    program = find_tool(tool)
    if registry is not None and registry.create():
        say(f"created ECR repository {registry.repository}")
    digest = program.push(local, remote)
    pinned = remote if digest is None else f"{without_tag(remote)}@{digest}"
    answer = {"image": remote, "digest": digest, "launch.image": pinned}
    tell(json.dumps(answer, indent=1) if as_json else f"launch.image={pinned}")


def _words(plan: dict[str, str | None]) -> str:
    made = plan["ecr_repository"]
    created = f", and create the ECR repository {made} if it is missing" if made else ""
    return f"would push {plan['push']} to {plan['to']}{created}"


def _default_tag(base: str) -> str:
    return f"shardyard:{__version__}-{parse_base(base).kind}"


def _image_name(text: str, option: str) -> str:
    if not is_image(text):
        raise RequestError(
            f"{option} {text!r} is no name of an image. Write registry/name:tag in lower case, "
            "such as 123456789012.dkr.ecr.us-east-1.amazonaws.com/shardyard:1."
        )
    return text
