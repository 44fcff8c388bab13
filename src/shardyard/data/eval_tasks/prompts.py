"""Texts of a task: templates, choices and examples with answers, as lm-evaluation-harness has them.

Rules of lm-evaluation-harness 0.4.13, so that numbers can be compared:

- A template that is the name of a column gives that column's value. Others are Jinja's.
- A context is the description, the examples with answers, and the question. A choice follows after
  ``target_delimiter``; the target of a ``loglikelihood`` task follows directly.
- If ``doc_to_text`` gives the number of a choice, the choices are contexts of one target.
"""

import ast
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from shardyard.data.eval_tasks.task import EvalTask, Row, Template
from shardyard.data.template_bounds import (
    BoundedEnvironment,
    BoundsError,
    bounded_memory,
    join_pieces,
)
from shardyard.errors import RequestError

SHOTS_SEED = 1234
"""Seed of the examples with answers: the harness's default."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """One question of a task, in text."""

    contexts: tuple[str, ...]
    """Context of each request; one for generation, none where a whole text is scored."""
    continuations: tuple[str, ...]
    """Continuation of each context; of a rolling task the whole text."""
    choices: tuple[str, ...] = ()
    """Choices without the delimiter."""
    target: Any = None
    """Number of a choice, numbers of choices, a text or texts."""


def build_examples(
    task: EvalTask, rows: Sequence[Row], shot_rows: Sequence[Row], limit: int | None
) -> list[Example]:
    """Return the questions of a task.

    Args:
        rows: Rows of the split that is scored.
        shot_rows: Rows of the split for examples with answers.
        limit: Most questions; None: all.

    Raises:
        RequestError: A template does not render, or gives another kind of value than needed.
    """
    build = _Builder(task, rows, shot_rows)
    chosen = rows if limit is None else rows[:limit]
    return [build.example(row, f"task {task.name}, row {n}") for n, row in enumerate(chosen)]


def example_of_json(content: Mapping[str, Any]) -> Example:
    """Read an example that was written as JSON."""
    fields = ("contexts", "continuations", "choices")
    return Example(**{name: tuple(content[name]) for name in fields}, target=content["target"])


class _Builder:
    def __init__(self, task: EvalTask, rows: Sequence[Row], shot_rows: Sequence[Row]) -> None:
        self.task = task
        self.columns = set(rows[0])
        self.templates = Templates(task.name)
        self.shot_rows: list[Row] = list(task.shots.samples or shot_rows)
        self.random = random.Random(SHOTS_SEED)
        # the harness compares the names of the splits, and takes one without a name for the same
        self.excludes_own = task.shots.split == task.test_split
        first = f"task {task.name}, row 0"
        self.has_several_contexts = (
            task.output_type == "multiple_choice"
            and isinstance(self._text(rows[0], first), int)
        )  # fmt: skip

    def example(self, row: Row, location: str) -> Example:
        task = self.task
        target = self._target(row, location)
        if task.output_type == "loglikelihood_rolling":
            return Example(
                contexts=(), continuations=(_as_text(target, location, "doc_to_target"),)
            )
        head = self._head(row, location)
        text = self._text(row, location)
        if task.output_type == "multiple_choice":
            return self._multiple_choice(row, head, text, target, location)
        context = head + _as_text(text, location, "doc_to_text")
        if task.output_type == "loglikelihood":
            wanted = _as_text(target, location, "doc_to_target")
            return Example(contexts=(context,), continuations=(wanted,))
        if task.doc_to_choice is not None:
            target = _chosen(self._choices(row, location), target, location)
        texts = [str(each) for each in target] if isinstance(target, list) else str(target)
        return Example(contexts=(context,), continuations=(), target=texts)

    def _multiple_choice(
        self, row: Row, head: str, text: Any, target: Any, location: str
    ) -> Example:  # fmt: skip
        choices = self._choices(row, location)
        delimiter = self.task.target_delimiter
        if self.has_several_contexts:
            contexts = tuple(head + each for each in choices)
            continuations = (f"{delimiter}{target}",) * len(choices)
            gold = text
        else:
            context = head + _as_text(text, location, "doc_to_text")
            contexts = (context,) * len(choices)
            continuations = tuple(f"{delimiter}{each}" for each in choices)
            gold = target
        return Example(
            contexts=contexts,
            continuations=continuations,
            choices=tuple(choices),
            target=_gold(gold, choices, location),
        )

    def _head(self, row: Row, location: str) -> str:
        """Description and examples with answers."""
        task = self.task
        description = task.description
        if description in row:
            description = str(row[description])
        elif description:
            description = self.templates.render(description, row, location)
        shots = [self._shot(each, f"{location}, its example") for each in self._shots_for(row)]
        return description + "".join(shots)

    def _shot(self, row: Row, location: str) -> str:
        task = self.task
        text, answer = self._text(row, location), self._target(row, location)
        choices = None if task.doc_to_choice is None else self._choices(row, location)
        if self.has_several_contexts:
            assert choices is not None
            text, choices = _chosen(choices, text, location), None
        question = _as_text(text, location, "doc_to_text")
        if answer in (None, ""):
            return question
        if choices and isinstance(answer, int):
            answer = _chosen(choices, answer, location)
        elif isinstance(answer, list):
            answer = answer[0]
        wanted = _as_text(answer, location, "doc_to_target")
        return f"{question}{task.target_delimiter}{wanted}{task.fewshot_delimiter}"

    def _shots_for(self, row: Row) -> list[Row]:
        """Choose the examples of a question, in the harness's order of random numbers."""
        number, pool = self.task.shots.number, self.shot_rows
        if not number:
            return []
        others = [each for each in pool if each != row] if self.excludes_own else pool
        if len(others) < number:
            raise RequestError(
                f"task {self.task.name}: num_fewshot={number}, but split "
                f"{self.task.shot_split!r} has {len(others)} rows to choose from. Set a smaller "
                "num_fewshot, or a fewshot_split with more rows."
            )
        if self.task.shots.sampler == "first_n":
            return others[:number]
        if not self.excludes_own:
            return self.random.sample(pool, number)
        if len(pool) < number + 1:
            raise RequestError(
                f"task {self.task.name}: num_fewshot={number} needs {number + 1} rows in split "
                f"{self.task.shot_split!r}, which has {len(pool)}. Set a smaller num_fewshot."
            )
        drawn = [each for each in self.random.sample(pool, number + 1) if each != row][:number]
        return drawn if len(drawn) == number else self.random.sample(others, number)

    def _text(self, row: Row, location: str) -> Any:
        value = self._value(self.task.doc_to_text, row, location)
        has_number = self.task.doc_to_choice is not None and value[1]
        return int(value[0]) if has_number and value[0].isdigit() else value[0]

    def _target(self, row: Row, location: str) -> Any:
        value, is_rendered = self._value(self.task.doc_to_target, row, location)
        if not is_rendered:
            return value
        if value.isdigit() and self.task.doc_to_choice is not None:
            return int(value)
        if len(value) >= 2 and value[0] == "[" and value[-1] == "]":
            try:
                return ast.literal_eval(value)
            except (SyntaxError, ValueError):
                return value
        return value

    def _choices(self, row: Row, location: str) -> list[str]:
        template = self.task.doc_to_choice
        assert template is not None
        if isinstance(template, dict):
            choices: Any = list(template.values())
        else:
            choices, is_rendered = self._value(template, row, location)
            if is_rendered:
                try:
                    choices = ast.literal_eval(choices)
                except (SyntaxError, ValueError) as error:
                    raise RequestError(
                        f"{location}: doc_to_choice gives {choices[:60]!r}, which is not a list of "
                        'texts. Write a template that gives one, such as {{["yes", "no"]}}.'
                    ) from error
        is_list = isinstance(choices, list | tuple) and len(choices) > 0
        if not is_list or not all(isinstance(each, str) and each for each in choices):
            raise RequestError(
                f"{location}: doc_to_choice gives {str(choices)[:60]!r}; it must give a list of "
                "texts, none of them empty."
            )
        return list(choices)

    def _value(self, template: Template, row: Row, location: str) -> tuple[Any, bool]:
        """Value of a template for a row, and whether Jinja rendered it."""
        if not isinstance(template, str):
            return template, False
        if template in self.columns:
            return row[template], False
        return self.templates.render(template, row, location), True


def _as_text(value: Any, location: str, field: str) -> str:
    if not isinstance(value, str):
        raise RequestError(
            f"{location}: {field} gives {str(value)[:60]!r} ({type(value).__name__}), not a text. "
            "Write it as a template, such as {{COLUMN}}."
        )
    return value


def _chosen(choices: Sequence[str], number: Any, location: str) -> str:
    return choices[_gold(number, choices, location)] if not isinstance(number, list) else choices[0]


def _gold(target: Any, choices: Sequence[str], location: str) -> Any:
    """Number of the right choice, or numbers of the right choices."""
    if isinstance(target, list):
        return [_gold(each, choices, location) for each in target]
    if isinstance(target, bool):
        target = int(target)
    number = choices.index(target) if isinstance(target, str) and target in choices else target
    if not isinstance(number, int) or not 0 <= number < len(choices):
        raise RequestError(
            f"{location}: doc_to_target gives {str(target)[:60]!r}, which is neither the number "
            f"(from 0) nor the text of one of its {len(choices)} choices."
        )
    return number


class Templates:
    """Renders the templates of a task in Jinja's sandbox, within bounds of time and memory."""

    def __init__(self, task: str) -> None:
        self._task = task
        self._environment = BoundedEnvironment(
            undefined=jinja2.StrictUndefined, keep_trailing_newline=True
        )
        self._environment.filters["regex_replace"] = _regex_replace
        self._compiled: dict[str, jinja2.Template] = {}

    def render(self, template: str, row: Mapping[str, Any], location: str) -> str:
        """Return the text of a row.

        Raises:
            RequestError: The template cannot be read, fails, or takes more than it may.
        """
        try:
            if template not in self._compiled:
                self._compiled[template] = self._environment.from_string(template)
            self._environment.begin()
            with bounded_memory():
                return join_pieces(self._compiled[template].generate(**row))
        except BoundsError as error:
            raise RequestError(f"{location}: the template {template[:60]!r} {error}.") from error
        except Exception as error:
            raise RequestError(
                f"{location}: the template {template[:60]!r} does not render: {error}. The row has "
                f"{', '.join(row)}."
            ) from error


def _regex_replace(text: str, pattern: str, replacement: str, count: int = 0) -> str:
    return re.sub(pattern, replacement, text, count=count)
