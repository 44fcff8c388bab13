"""Bounds on what a chat template may take: steps, time, memory and the length of its text.

Jinja's sandbox keeps a template from Python's own objects and ``range`` from more than 100,000
numbers. Loops in loops, ``"x" * 10**10`` and texts that double in a loop stay possible there.
"""

import functools
import resource
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jinja2
import jinja2.nodes
import jinja2.sandbox
import jinja2.utils
import jinja2.visitor

MOST_STEPS = 5_000_000
"""Rounds of loops, and calls of macros, functions and filters, in one text."""
MOST_S = 30.0
"""Processor time of one text."""
MOST_PARTS = 1_000_000
"""Most parts of a value that a template builds."""
MOST_CHARACTERS = 64 * 2**20
MOST_BYTES = 2**30
"""Memory that a process may take in addition while a template renders."""
_MOST_BITS = 100_000
"""Most bits of a whole number."""
_STEPS_A_LOOK = 64
_PAGES = Path("/proc/self/statm")


class BoundsError(Exception):
    """A template takes more than it may; completes "the template ..."."""


class BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which each step of a template counts.

    Call ``begin`` before each text.
    """

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.begin()
        del self.globals["lipsum"]  # makes as many words as it is told to
        self.filters = {name: self._with_step_count(each) for name, each in self.filters.items()}

    def begin(self) -> None:
        """Count from zero."""
        self._steps = 0
        self._started_s = time.thread_time()

    def step(self) -> None:
        """Count one more.

        Raises:
            BoundsError: It is one too many, or its time is over.
        """
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise BoundsError(f"takes more than {MOST_STEPS:,} steps")
        if self._steps % _STEPS_A_LOOK == 0 and time.thread_time() - self._started_s > MOST_S:
            raise BoundsError(f"takes more than {MOST_S:g} s of processor time")

    def call(__self, __context: Any, __obj: Any, *args: Any, **values: Any) -> Any:  # noqa: N805 - as Jinja names them
        __self.step()
        if __obj == __self.step:
            return ""
        if __obj == __self.weighed:
            return weighed(*args)
        return weighed(super().call(__context, __obj, *args, **values))

    def weighed(self, value: Any) -> Any:
        """A value that the template built, which is not too large."""
        return weighed(value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.step()
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length(), right.bit_length()
            made = left.bit_length() * abs(right) if operator == "**" else sum(bits)
            if made > _MOST_BITS:
                raise BoundsError(f"computes a number of more than {_MOST_BITS:,} bits")
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        template = super()._parse(source, name, filename)
        _Steps().visit(template)
        _Values().visit(template)
        return template

    def _with_step_count(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)  # with the marks by which Jinja passes a context
        def counted(*args: Any, **values: Any) -> Any:
            self.step()
            return function(*args, **values)

        return counted


class _Steps(jinja2.visitor.NodeVisitor):
    """Makes each round of a loop and each call of a macro begin with a step."""

    def visit_For(self, node: jinja2.nodes.For) -> None:  # noqa: N802 - as Jinja names them
        self._begin_with_step(node)

    def visit_Macro(self, node: jinja2.nodes.Macro) -> None:  # noqa: N802 - as Jinja names them
        self._begin_with_step(node)

    def visit_CallBlock(self, node: jinja2.nodes.CallBlock) -> None:  # noqa: N802 - as Jinja names them
        self._begin_with_step(node)

    def _begin_with_step(self, node: Any) -> None:
        self.generic_visit(node)
        step = jinja2.nodes.Call(
            jinja2.nodes.EnvironmentAttribute("step"), [], [], None, None, lineno=node.lineno
        )
        node.body.insert(0, jinja2.nodes.ExprStmt(step, lineno=node.lineno))


class _Values(jinja2.visitor.NodeTransformer):
    """Makes each list, tuple and dict that a template writes a weighed one."""

    def visit_List(self, node: jinja2.nodes.List) -> jinja2.nodes.Node:  # noqa: N802 - as Jinja names them
        return self._weighed(node)

    def visit_Dict(self, node: jinja2.nodes.Dict) -> jinja2.nodes.Node:  # noqa: N802 - as Jinja names them
        return self._weighed(node)

    def visit_Tuple(self, node: jinja2.nodes.Tuple) -> jinja2.nodes.Node:  # noqa: N802 - as Jinja names them
        return self._weighed(node) if node.ctx == "load" else node

    def _weighed(self, node: Any) -> jinja2.nodes.Node:
        self.generic_visit(node)
        weigh = jinja2.nodes.EnvironmentAttribute("weighed")
        return jinja2.nodes.Call(weigh, [node], [], None, None, lineno=node.lineno)


def weighed(value: Any) -> Any:
    """A value as it is. Lists that hold one list twice, forty times over, have 2**40 parts.

    Raises:
        BoundsError: It has too many parts.
    """
    left, parts = [value], 0
    while left:
        each = left.pop()
        if isinstance(each, Mapping):
            children: Collection[Any] = each.values()
        elif isinstance(each, list | tuple):
            children = each
        elif isinstance(each, jinja2.utils.Namespace):
            children = object.__getattribute__(each, "_Namespace__attrs").values()
        else:
            continue
        parts += 1 + len(children)
        if parts > MOST_PARTS:
            raise BoundsError(f"builds a value of more than {MOST_PARTS:,} parts")
        left.extend(children)
    return value


def join_pieces(pieces: Iterator[str]) -> str:
    """The text of pieces.

    Raises:
        BoundsError: It is too long.
    """
    text: list[str] = []
    length = 0
    for piece in pieces:
        length += len(piece)
        if length > MOST_CHARACTERS:
            raise BoundsError(f"writes more than {MOST_CHARACTERS:,} characters")
        text.append(piece)
    return "".join(text)


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Let this process take only ``MOST_BYTES`` more while the block runs, where Linux counts them.

    Raises:
        BoundsError: It wanted more.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = _address_space_bytes() + MOST_BYTES
    is_set = limit > MOST_BYTES and all(
        each == resource.RLIM_INFINITY or limit < each for each in (soft, hard)
    )
    if is_set:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    except MemoryError as error:
        raise BoundsError(f"takes more than {MOST_BYTES:,} bytes of memory") from error
    finally:
        if is_set:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _address_space_bytes() -> int:
    """Return the address space of this process in bytes; 0 if this is not Linux."""
    try:
        return int(_PAGES.read_bytes().split()[0]) * resource.getpagesize()
    except OSError:
        return 0
