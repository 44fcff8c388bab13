"""`shardyard image build|push`: the container that runs training on other machines."""

import json

import click

from shardyard.cli.options import json_option
from shardyard.errors import RequestError
from shardyard.image.build import build_of, push_of
from shardyard.image.container_cli import TOOLS
from shardyard.io.terminal import echo

_base_option = click.option(
    "--base",
    default="cuda-efa",
    show_default=True,
    help="Base: cpu, cuda-efa, cuda126-efa (V100), gaudi, gaudi:IMAGE, dlc:IMAGE (AWS deep "
    "learning container), or the EC2 instance type of the nodes.",
)
_tool_option = click.option(
    "--tool", type=click.Choice(TOOLS), help="Build tool. Default: the first found."
)


@click.group()
def command() -> None:
    """Build a container image with Shardyard, and push it to a registry."""


@command.command()
@_base_option
@_tool_option
@click.option("--tag", help="Image name. Default: shardyard:VERSION-BASE.")
@click.option("--dry-run", is_flag=True, help="Print the Dockerfile, without building it.")
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

    Arguments after -- go to the build tool: -- --build-arg PIP_INDEX_URL=https://mirror.example/simple
    """
    if options and not options[0].startswith("-"):
        raise RequestError(
            f"{options[0]!r} is not an option of the build tool. --base chooses the base image, "
            "--tag the image's name. The tool's own options come after --, such as -- "
            "--network=host."
        )
    wanted = build_of(base, tag)
    if dry_run:
        text = wanted.dockerfile
        plain = {"base": wanted.base.image, "tag": wanted.name, "dockerfile": text}
        echo(json.dumps(plain, indent=1) if as_json else text.removesuffix("\n"))
        return
    used = wanted.run(tool, options)
    answer = {"image": wanted.name, "base": wanted.base.image, "tool": used}
    echo(json.dumps(answer, indent=1) if as_json else wanted.name)


@command.command()
@click.argument("to")
@_base_option
@_tool_option
@click.option("--tag", help="Name of the built image. Default: shardyard:VERSION-BASE.")
@click.option(
    "--dry-run", is_flag=True, help="Show what would be pushed and created, without doing it."
)
@json_option
def push(
    to: str, *, base: str, tool: str | None, tag: str | None, dry_run: bool, as_json: bool
) -> None:
    """Push the image to TO (registry/name:tag), and print its digest.

    A missing Amazon ECR repository is created. The ECR password is passed on stdin and not kept.
    """
    wanted = push_of(to, base, tag)
    if dry_run:
        repository = None if wanted.registry is None else wanted.registry.repository
        plan = {"push": wanted.local, "to": wanted.remote, "ecr_repository": repository}
        echo(json.dumps(plan, indent=1) if as_json else _words(plan))
        return
    digest = wanted.run(tool)
    pinned = wanted.pinned(digest)
    answer = {"image": wanted.remote, "digest": digest, "launch.image": pinned}
    echo(json.dumps(answer, indent=1) if as_json else f"launch.image={pinned}")


def _words(plan: dict[str, str | None]) -> str:
    made = plan["ecr_repository"]
    created = f", and create the ECR repository {made} if it is missing" if made else ""
    return f"would push {plan['push']} to {plan['to']}{created}"
