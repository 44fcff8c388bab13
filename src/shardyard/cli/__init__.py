"""The command line: `shardyard VERB`. One table of verbs; each lives in a file of its own.

`shardyard --help` imports only click: a verb's module is imported when it is called.
"""

# ruff: noqa: ARG002 - click names the parameters of the methods it calls

import difflib
import gc
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

_OBJECTS_TO_COLLECT = 50_000
"""New objects after which Python searches for garbage; its own limit is 700."""

_GROUPS = {
    "Start": {
        "init": "Write a first recipe from four answers.",
        "import": "Turn another tool's configuration into a recipe.",
        "config": "Show a recipe with every value resolved, or document all settings.",
        "plan": "Predict memory, speed, cost and failures before anything starts.",
        "doctor": "Check this machine or a cluster before it costs anything.",
    },
    "Run": {
        "prepare": "Turn text or pictures into training data.",
        "train": "Train on this machine, now.",
        "launch": "Submit a run to Slurm, Kubernetes, AWS Batch or this machine.",
        "resume": "Continue a run from its newest good checkpoint.",
        "scale": "Continue a run on another number of nodes.",
        "cancel": "Ask a launched run to save and stop.",
        "teardown": "Remove everything that launching created.",
    },
    "Watch": {
        "runs": "List runs and their states.",
        "status": "Show the state of a launched run and its job.",
        "top": "Show a run live, with all nodes and ranks.",
        "logs": "Print the output of a launched run.",
        "watch": "Follow a launched run until it ends.",
        "serve": "Show all runs in a browser: list, curves, events.",
        "profile": "Trace some steps of a running job and show where the time goes.",
    },
    "Results": {
        "report": "Write the page and the Markdown summary of a run.",
        "compare": "Compare runs: curves, speed, cost to a target, settings.",
        "study": "Measure or plan how a recipe scales, as a table and a page.",
        "evaluate": "Score a model: perplexity of text, and tasks.",
        "chat": "Talk to the model of a run or a folder.",
        "export": "Write a checkpoint as a Hugging Face folder.",
        "fetch": "Copy the results of a remote run into its folder here.",
    },
    "Clusters": {
        "cluster": "Create, scale and delete an EKS cluster, with proof of deletion.",
        "image": "Build the container image of a run and push it.",
        "bench": "Measure the network between nodes, as nccl-tests does.",
        "drill": "Inject failures into short runs and check that they recover.",
    },
}
"""Heading of the help -> verb -> what it does."""

_VERBS = {verb: does for group in _GROUPS.values() for verb, does in group.items()}
"""Verb -> what it does; `command` of shardyard/cli/<verb>.py is imported when it is called."""

_EXAMPLES = {
    "init": "shardyard init",
    "import": "shardyard import ds_config.json --to recipe.yaml",
    "config": "shardyard config recipe.yaml optim.lr=1e-4",
    "plan": "shardyard plan recipe.yaml cluster.instance=p5.48xlarge",
    "doctor": "shardyard doctor",
    "prepare": "shardyard prepare recipe.yaml",
    "train": "shardyard train model.preset=llama-tiny",
    "launch": "shardyard launch recipe.yaml --on slurm",
    "resume": "shardyard resume my-run",
    "scale": "shardyard scale my-run 4",
    "cancel": "shardyard cancel my-run",
    "teardown": "shardyard teardown my-run",
    "runs": "shardyard runs",
    "status": "shardyard status my-run",
    "top": "shardyard top my-run",
    "logs": "shardyard logs my-run",
    "watch": "shardyard watch my-run",
    "serve": "shardyard serve",
    "profile": "shardyard profile my-run",
    "report": "shardyard report my-run",
    "compare": "shardyard compare my-run other-run",
    "study": "shardyard study recipe.yaml --nodes 1,2,4",
    "evaluate": "shardyard evaluate my-run --text validation.jsonl",
    "chat": "shardyard chat my-run --prompt 'Who are you?'",
    "export": "shardyard export my-run --to my-model",
    "fetch": "shardyard fetch my-run",
    "cluster": "shardyard cluster create recipe.yaml",
    "image": "shardyard image build",
    "bench": "shardyard bench network recipe.yaml --on slurm",
    "drill": "shardyard drill recipe.yaml",
}
"""Verb -> one usual call, which its help shows."""

_EXIT_CODES = (
    "Exit codes: 0 done, 1 failed, 2 wrong request, 3 not available now, 4 no permission, "
    "75 lost node (a restart may continue), 130 interrupted, 143 stopped after saving."
)


_OTHER_WORDS = {
    "start": "train",
    "run": "train",
    "fit": "train",
    "finetune": "train",
    "fine-tune": "train",
    "sft": "train",
    "pretrain": "train",
    "estimate": "plan",
    "cost": "plan",
    "price": "plan",
    "submit": "launch",
    "stop": "cancel",
    "kill": "cancel",
    "delete": "teardown",
    "rm": "teardown",
    "list": "runs",
    "ls": "runs",
    "ps": "runs",
    "show": "status",
    "continue": "resume",
    "log": "logs",
    "convert": "import",
    "eval": "evaluate",
    "test": "evaluate",
    "validate": "config",
    **dict.fromkeys(("generate", "sample", "infer", "inference", "predict", "talk"), "chat"),
    "check": "doctor",
    "tokenize": "prepare",
}
"""Verb of other programs -> the verb that is meant."""

_MERGE = "Merge adapters while exporting: shardyard export RUN --to my-model --merged"
_SWEEP = (
    "Start one run for each value, then compare them: shardyard compare RUN RUN (docs/python.md)"
)
_NO_VERB_NEEDED = {
    **dict.fromkeys(("merge", "merge_lora", "merge-lora"), _MERGE),
    **dict.fromkeys(("sweep", "tune", "grid"), _SWEEP),
}
"""Verb of other programs -> what to do instead, as there is no such verb."""


_STARTS = frozenset({"train", "resume", "launch", "scale", "study", "drill", "bench"})
"""Verbs that start something which must not be started twice."""


_WORDS = "shardyard.words"
"""Key of the words after `shardyard` in the context."""


def _no_verb(words: Sequence[str]) -> str:
    """Say which verb is meant, as a command to paste."""
    verb, *rest = words
    if verb in _NO_VERB_NEEDED:
        return f"unknown verb {verb!r}. {_NO_VERB_NEEDED[verb]}."
    near = [_OTHER_WORDS[verb]] if verb in _OTHER_WORDS else []
    near = near or difflib.get_close_matches(verb, _VERBS, n=1)
    if not near:
        return f"unknown verb {verb!r}. Verbs are {', '.join(_VERBS)}."
    from shardyard.config.secrets import shown_command  # only here: help needs none of it

    meant = shown_command(["shardyard", near[0], *rest])
    return f"unknown verb {verb!r}. Did you mean `{meant}`?"


def _no_option(error: click.NoSuchOption, words: Sequence[str]) -> str:
    """Say which option or setting is meant."""
    name = f"unknown option {error.option_name}."
    near = difflib.get_close_matches(error.option_name, error.possibilities or (), n=1, cutoff=0.8)
    if near:
        return f"{name} Did you mean {near[0]}?"
    command = None if error.ctx is None else error.ctx.command
    parameters = [] if command is None else command.params
    if not any(each.name in ("recipe", "overrides") for each in parameters):
        options = [each.opts[0] for each in parameters if isinstance(each, click.Option)]
        return f"{name} It has {', '.join(options)}."
    from shardyard.control.request import option_hint  # only here: it imports the schema

    key, equals, value = error.option_name.partition("=")
    place = words.index(error.option_name) + 1 if error.option_name in words else len(words)
    if not equals and place < len(words):
        value = words[place]
    hint = option_hint(key, value)
    meant = hint or "Such as run.steps=100."
    return f"{name} Settings have no dashes, they are section.key=value. {meant}"


class _Verbs(click.Group):
    """A group whose commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return None
        command = importlib.import_module(f"shardyard.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        command.epilog = f"Example:  {_EXAMPLES[cmd_name]}\n\n{_EXIT_CODES}"
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        verb = args[0]
        if verb not in _VERBS and not verb.startswith("-"):
            raise click.UsageError(_no_verb(args), ctx)
        ctx.meta[_WORDS] = list(args)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            raise click.UsageError(_no_option(error, ctx.meta[_WORDS]), error.ctx) from error
        except click.MissingParameter as error:
            verb = ctx.meta[_WORDS][0]
            text = f"{error.format_message().rstrip('.')}. For example: {_EXAMPLES[verb]}."
            raise click.UsageError(text, error.ctx) from error

    def shell_complete(self, ctx: click.Context, incomplete: str) -> "list[CompletionItem[str]]":
        """Verbs from the table: click's own way would import them all."""
        from click.shell_completion import CompletionItem  # only where a shell asks

        verbs = [
            CompletionItem(verb, help=does.rstrip("."))
            for verb, does in _VERBS.items()
            if verb.startswith(incomplete)
        ]
        return [*verbs, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, verbs in _GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl([(verb, does.rstrip(".")) for verb, does in verbs.items()])


@click.group(
    cls=_Verbs,
    invoke_without_command=True,
    subcommand_metavar="VERB [ARGUMENTS]...",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="A recipe is one or more YAML files and section.key=value overrides, such as "
    "optim.lr=3e-4.\n\nTry first:  shardyard train model.preset=llama-tiny\n\n"
    f"Help for a verb:  shardyard train --help\n\n{_EXIT_CODES}",
)
@click.version_option(__version__, prog_name="shardyard", message="%(prog)s %(version)s")
@click.option(
    "--debug", is_flag=True, expose_value=False, help="Show the Python traceback of errors."
)
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
    # Modules and schemas are no garbage, and searches for it take an eighth of a plan's time.
    gc.set_threshold(_OBJECTS_TO_COLLECT)
    if os.environ.get("_SHARDYARD_COMPLETE"):  # a shell asks, at each TAB
        from shardyard.cli.completion import answer

        return run(click.Command("shardyard", callback=lambda: answer(shardyard)), [])
    exit_code = run(shardyard, arguments, obj=launchers)
    if arguments is None:  # The process ends, and would search all modules for garbage once more.
        gc.freeze()
    return exit_code
