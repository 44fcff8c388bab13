"""The command line: `shardyard VERB`. One table of verbs; each lives in a file of its own.

`shardyard --help` imports only click: a verb's module is imported when it is called.
"""

# ruff: noqa: ARG002 - click names the parameters of the methods it calls

import difflib
import importlib
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from shardyard import __version__
from shardyard.foreign_variables import reject_multi_process_start
from shardyard.io.terminal import echo, run

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_VERBS = {
    "init": "writes a first recipe from four answers, with the plan's advice in its comments",
    "import": "turns configurations of other tools into a recipe, each line with its origin",
    "config": "shows a recipe resolved, each value with its reason; documents every setting",
    "plan": "predicts memory, speed and cost before anything is started",
    "prepare": "turns text into token shards",
    "train": "trains here and now",
    "resume": "continues a run from its newest sound checkpoint",
    "launch": "submits a run to Slurm, Kubernetes, AWS Batch or this machine",
    "status": "says how a launched run and its job stand",
    "logs": "prints the output of a launched run",
    "watch": "follows a launched run until its end",
    "top": "shows a run as it stands, all nodes and ranks",
    "profile": "traces some steps of a run that trains, and tables where their time went",
    "cancel": "asks a launched run to save and end",
    "scale": "goes on with another number of nodes",
    "teardown": "removes what launching created elsewhere",
    "runs": "lists the runs and how they stand",
    "serve": "shows all runs of a folder in a browser: list, curves, events",
    "fetch": "brings what a run made elsewhere into its folder here",
    "export": "writes a checkpoint as a Hugging Face folder",
    "report": "writes a run's page and Markdown summary",
    "study": "runs or plans a recipe on several numbers of nodes: a scaling table and page",
    "compare": "puts runs side by side: curves, speed, cost to a target, what differs",
    "drill": "breaks short runs of a recipe here, and tables what became of them",
    "bench": "measures the network between the nodes of a recipe, in nccl-tests' table",
    "image": "builds the container that runs it, and pushes it to a registry",
    "cluster": "makes an EKS cluster, scales it, and removes it with proof that nothing is left",
    "doctor": "looks at this machine or a cluster before it costs anything",
}
"""Verb -> what it does; `command` of shardyard/cli/<verb>.py is imported when it is called."""


_STARTS = frozenset({"train", "resume", "launch", "scale", "study", "drill", "bench"})
"""Verbs that start something which must not be started twice."""


class _Verbs(click.Group):
    """A group whose commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return None
        command = importlib.import_module(f"shardyard.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        verb = args[0]
        if verb not in _VERBS and not verb.startswith("-"):
            near = difflib.get_close_matches(verb, _VERBS, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"Verbs are {', '.join(_VERBS)}."
            raise click.UsageError(f"there is no verb {verb!r}. {hint}", ctx)
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> "list[CompletionItem[str]]":
        """Verbs from the table: click's own way would import them all."""
        from click.shell_completion import CompletionItem  # only where a shell asks

        verbs = [
            CompletionItem(verb, help=what)
            for verb, what in _VERBS.items()
            if verb.startswith(incomplete)
        ]
        return [*verbs, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(list(_VERBS.items()))


@click.group(
    cls=_Verbs,
    invoke_without_command=True,
    subcommand_metavar="VERB [ARGUMENTS]...",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="A recipe is one or more YAML files and section.key=value overrides, such as "
    "optim.lr=3e-4. Start with: shardyard train model.preset=llama-tiny",
)
@click.version_option(__version__, prog_name="shardyard", message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error.")
@click.pass_context
def shardyard(ctx: click.Context) -> None:
    """Train a model on many accelerators from one recipe."""
    if ctx.invoked_subcommand is None:
        echo(ctx.get_help())
    elif ctx.invoked_subcommand in _STARTS:
        reject_multi_process_start(ctx.invoked_subcommand, os.environ)


def main(
    arguments: Sequence[str] | None = None, *, launchers: Mapping[str, Any] | None = None
) -> int:
    """Run the command line; returns the exit code.

    Args:
        launchers: Name -> launcher, instead of those that there are (``launchers/base.py``).
    """
    if os.environ.get("_SHARDYARD_COMPLETE"):  # a shell asks, at each TAB
        from shardyard.cli.completion import answer

        return run(click.Command("shardyard", callback=lambda: answer(shardyard)), [])
    return run(shardyard, arguments, obj=launchers)
