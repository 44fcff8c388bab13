"""`shardyard init`: four questions, and a recipe with the plan's advice in its comments."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import click

from shardyard.cli.completion import Completer, by, launchers, values_of
from shardyard.cli.options import json_option
from shardyard.control.init import QUESTIONS, InitQuestion, RecipeDraft
from shardyard.control.init_text import commands_of, exists_already, open_issues, text_of, write
from shardyard.errors import RequestError
from shardyard.io.path_option import LocalPath
from shardyard.io.sanitize import sanitize
from shardyard.io.terminal import echo, echo_err, echo_raw

_OFFERED: dict[str, Completer] = {
    "model": values_of("model.preset"),
    "data": values_of("data.source"),
    "where": launchers,
}
"""Question -> what TAB offers."""

_ANSWERS = [
    click.option(
        f"--{question.name}",
        metavar="ANSWER",
        help=f"{question.text} {question.forms}.",
        shell_complete=by(_OFFERED[question.name]) if question.name in _OFFERED else None,
    )
    for question in QUESTIONS
]


def _with_answers(command: Any) -> Any:
    for option in reversed(_ANSWERS):
        command = option(command)
    return command


@click.command()
@click.argument("file", default="recipe.yaml", type=LocalPath(path_type=Path, dir_okay=False))
@_with_answers
@click.option("--force", "is_forced", is_flag=True, help="Overwrite an existing file.")
@click.option("--dry-run", is_flag=True, help="Print the recipe, without writing it.")
@json_option
def command(
    file: Path, *, is_forced: bool, dry_run: bool, as_json: bool, **answers: str | None
) -> None:
    """Ask for model, data, machines and length, and write them to FILE as a recipe.

    Options answer questions in advance. Without a terminal, defaults answer the rest.
    """
    if file.exists() and not (is_forced or dry_run):
        raise RequestError(exists_already(file))
    draft = RecipeDraft(file=file)
    for question in QUESTIONS:
        draft = _taken(draft, question, answers[question.name.replace("-", "_")])
    if draft.planned is not None:
        echo_err(draft.planned.plan.line())
    today = time.strftime("%Y-%m-%d")
    if not dry_run:
        write(draft, today=today, is_forced=is_forced)
    if as_json:
        echo(json.dumps(_as_json(draft, is_written=not dry_run), indent=1))
    elif dry_run:
        echo_raw(text_of(draft, today=today))
    else:
        echo(f"recipe: {file}")
        for line in commands_of(draft):
            echo(f"  {line}")


def _taken(draft: RecipeDraft, question: InitQuestion, answer: str | None) -> RecipeDraft:
    """The draft with one more answer: the option's, a person's, or else the usual one."""
    if answer is not None:
        return question.take(draft, answer)
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        echo_err(
            f"--{question.name} is missing, and no terminal is there to ask: {question.default}"
        )
        return question.take(draft, question.default)
    echo_err(f"\n{question.text} {question.forms}")
    while True:
        words = click.prompt(sanitize(question.name), default=question.default, err=True)
        try:
            return question.take(draft, words)
        except RequestError as error:
            echo_err(f"error: {error}")


def _as_json(draft: RecipeDraft, *, is_written: bool) -> dict[str, Any]:
    planned = draft.planned
    found = None if planned is None else planned.search_result
    return {
        "file": str(draft.file),
        "is_written": is_written,
        "recipe": draft.recipe.model_dump(mode="json", exclude_unset=True),
        "plan": None if planned is None else planned.plan.to_json(),
        "layouts": [] if found is None else [candidate.to_json() for candidate in found.best],
        "look_at": open_issues(draft),
        "commands": commands_of(draft),
    }
