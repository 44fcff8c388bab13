"""The command line: `shardyard VERB`. One table of verbs; each lives in a file of its own.

`shardyard --help` imports nothing but click: a verb's module is imported when it is called. This
file is also the outermost line of every process of the command line: here errors become messages
and exit codes.
"""

# ruff: noqa: ARG002 - click names the parameters of the methods it calls

import difflib
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from shardyard import __version__
from shardyard.cli.terminal import say, tell
from shardyard.errors import EXIT_INTERRUPTED, ShardyardError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_VERBS = {
    "config": "shows a recipe resolved, each value with its reason; documents every setting",
    "plan": "predicts memory, speed and cost before anything is started",
    "prepare": "turns text into token shards",
    "train": "trains here and now",
    "resume": "continues a run from its newest sound checkpoint",
    "launch": "submits a run to Slurm, Kubernetes, AWS Batch or this machine",
    "status": "says how a launched run and its job stand",
    "logs": "prints the output of a launched run",
    "watch": "follows a launched run until its end",
    "cancel": "asks a launched run to save and end",
    "scale": "goes on with another number of nodes",
    "teardown": "removes what launching created elsewhere",
    "runs": "lists the runs and how they stand",
    "fetch": "brings what a run made elsewhere into its folder here",
    "export": "writes a checkpoint as a Hugging Face folder",
    "report": "writes a run's page and Markdown summary",
    "image": "builds the container that runs it, and pushes it to a registry",
    "doctor": "looks at this machine or a cluster before it costs anything",
}
"""Verb -> what it does; `command` of shardyard/cli/<verb>.py is imported when it is called."""


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
        tell(ctx.get_help())


def main(
    arguments: Sequence[str] | None = None,
    *,
    program: click.Command = shardyard,
    launchers: Mapping[str, Any] | None = None,
) -> int:
    """Run the command line; returns the exit code.

    Args:
        launchers: Name -> launcher, instead of those that there are (``launch/base.py``).
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    # Accepted anywhere, as it is added to a command that has just failed.
    is_debugging = "--debug" in given
    words = [argument for argument in given if argument != "--debug"]
    try:
        if os.environ.get("_SHARDYARD_COMPLETE"):  # a shell asks, at each TAB
            from shardyard.cli.completion import answer

            answer(program)
            return 0
        # Not program.main(): it would turn a broken pipe into exit code 1, a failed run.
        with program.make_context("shardyard", words, obj=launchers) as context:
            code = program.invoke(context)
        if sys.stdout is not None:  # started with it closed, as by `>&-`
            sys.stdout.flush()
        return int(code or 0)
    except click.exceptions.Exit as leaving:  # --help, --version
        return leaving.exit_code
    except click.ClickException as error:
        say(f"error: {_describe(error)}")
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        say("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return _end_quietly()
    except ShardyardError as error:
        if is_debugging:
            _show_traceback()
        say(f"error: {error}")
        return error.exit_code
    except OSError as error:  # of stdout, or of a file that nobody thought would refuse
        if is_debugging:
            _show_traceback()
        where = f" ({error.filename})" if error.filename else ""
        say(
            f"error: {error.strerror or error}{where}. The operating system refused to read or "
            "write. Check that the place exists, is yours and has room; --debug shows where it was."
        )
        return 1
    except Exception as error:  # noqa: BLE001 - the outermost line
        if is_debugging:
            _show_traceback()
        say(
            f"error: {type(error).__name__}: {error}. This is a bug of shardyard, not of your "
            "request. Run the same command with --debug to see where it happened, and report it."
        )
        return 1


def _describe(error: click.ClickException) -> str:
    where = getattr(error, "ctx", None)
    see = f" See `{where.command_path} --help`." if where else ""
    if isinstance(error, click.NoSuchOption):
        return (
            f"there is no option {error.option_name}. Settings have no dashes, they are given as "
            f"section.key=value, such as run.steps=100.{see}"
        )
    return f"{error.format_message()}{see}"


def _end_quietly() -> int:
    """The reader of our output, such as `head`, has had enough: end without a word."""
    # Nothing more can be written, not even what Python flushes at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _show_traceback() -> None:
    import traceback  # only for --debug

    traceback.print_exc()
