"""The only output to the terminal, tables too, and the outermost line of every program there.

No printed text can act on the terminal (sanitize.py). Errors become messages and exit
codes here.
"""

import errno
import io
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from shardyard.errors import EXIT_INTERRUPTED, ShardyardError
from shardyard.io.sanitize import sanitize
from shardyard.log import LOG
from shardyard.own_processes import signals_as_exceptions

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer


def echo(text: object = "") -> None:
    """Print on stdout: the answer of a verb."""
    click.echo(sanitize(str(text)))


def echo_err(text: object) -> None:
    """Print a verb's messages on stderr, at once; its answer goes elsewhere."""
    print(sanitize(str(text)), file=sys.stderr, flush=True)


def echo_raw(text: str) -> None:
    """Print on stdout without a change: what the user wrote, or asked for as it is."""
    sys.stdout.write(text)
    sys.stdout.flush()


def run(program: click.Command, arguments: Sequence[str] | None = None, *, obj: Any = None) -> int:
    """Run a program of the command line; returns the exit code.

    Args:
        arguments: None: those that the process was started with.
        obj: What its commands find as ``context.obj``.
    """
    _survive_closed_terminal()
    with logs_to_stderr(), signals_as_exceptions():
        return _run(program, arguments, obj)


class _DetachableStream(io.FileIO):
    """A terminal that may be closed while this process continues; then output is dropped."""

    def write(self, data: "Buffer") -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno not in (errno.EIO, errno.ENXIO):
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())  # for libraries and for programs started later, too
            os.close(nowhere)
            return len(memoryview(data).cast("B"))


def _survive_closed_terminal() -> None:
    """Let a closed terminal end neither a training nor its report."""
    for name, stream in (("stdout", sys.__stdout__), ("stderr", sys.__stderr__)):
        is_replaced = getattr(sys, name) is not stream  # by a test, or outlived already
        if stream is None or is_replaced or stream.closed or not stream.isatty():
            continue
        raw = io.BufferedWriter(_DetachableStream(stream.fileno(), "w", closefd=False))
        outlived = io.TextIOWrapper(
            raw, encoding=stream.encoding, errors=stream.errors, line_buffering=True
        )
        setattr(sys, name, outlived)


class _StderrHandler(logging.Handler):
    """Prints messages of operations, next to their results, as lines on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        echo_err(f"{'warning: ' * (record.levelno >= logging.WARNING)}{record.getMessage()}")


@contextmanager
def logs_to_stderr() -> Iterator[None]:
    """Show messages of operations on stderr; only once if calls are nested."""
    if any(isinstance(handler, _StderrHandler) for handler in LOG.handlers):
        yield
        return
    handler, level, propagates = _StderrHandler(), LOG.level, LOG.propagate
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    LOG.propagate = False  # a package that sets up the root logger would print it again
    try:
        yield
    finally:
        LOG.removeHandler(handler)
        LOG.setLevel(level)
        LOG.propagate = propagates


def _run(program: click.Command, arguments: Sequence[str] | None, obj: Any) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    # Accepted anywhere, as it is added to a command that has just failed.
    is_debugging = "--debug" in given
    words = [argument for argument in given if argument != "--debug"]
    try:
        # Not program.main(): it would turn a broken pipe into exit code 1, a failed run.
        with program.make_context("shardyard", words, obj=obj) as context:
            code = program.invoke(context)
        if sys.stdout is not None:  # started with it closed, as by `>&-`
            sys.stdout.flush()
        return int(code or 0)
    except click.exceptions.Exit as leaving:  # --help, --version
        return leaving.exit_code
    except click.ClickException as error:
        echo_err(f"error: {_describe(error)}")
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        echo_err("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return _end_quietly()
    except ShardyardError as error:
        if is_debugging:
            _show_traceback()
        echo_err(f"error: {error.described}")
        return error.exit_code
    except OSError as error:  # of stdout, or of a file that nobody thought would refuse
        if is_debugging:
            _show_traceback()
        where = f" ({error.filename})" if error.filename else ""
        echo_err(
            f"error: {error.strerror or error}{where}. The operating system could not read or "
            "write. Check that the place exists, is yours and has room; --debug shows where it "
            "was."
        )
        return 1
    except Exception as error:  # noqa: BLE001 - the outermost line
        if is_debugging:
            _show_traceback()
        echo_err(f"error: {type(error).__name__}: {error}. {_error_origin(error)}")
        return 1


def _error_origin(error: Exception) -> str:
    from shardyard.plugins import raised_by  # reads all packages' metadata: only for a bug

    plug_in = raised_by(error)
    if plug_in is None:
        return (
            "This is a bug of shardyard, not of your request. Run the same command with --debug to "
            "see where it happened, and report it."
        )
    return (
        f"It was raised in {plug_in.what}, which shardyard calls. Run the same command with "
        "--debug to see where, and report it to the authors of that package."
    )


def _describe(error: click.ClickException) -> str:
    where = getattr(error, "ctx", None)
    see = f" See `{where.command_path} --help`." if where else ""
    text = error.format_message()
    return f"{text}{'' if text.endswith(('.', '?')) else '.'}{see}"


def _end_quietly() -> int:
    """The reader of our output, such as `head`, has had enough: end without a word."""
    # Nothing more can be written, not even what Python flushes at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _show_traceback() -> None:
    import traceback  # only for --debug

    traceback.print_exc()


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "") -> None:
    """Print rows under column names; the last column may be long."""
    rows = [[sanitize(cell) for cell in row] for row in rows]
    if sys.stdout is not None and sys.stdout.isatty():
        _draw(columns, rows, title=title)
        return
    if title:
        echo(title)
    for line in _aligned([columns, *rows] if any(columns) else rows):
        echo(f"  {line}" if title else line)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _draw(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        box=None,
        show_header=any(columns),
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    for place, name in enumerate(columns):
        # Names and values stay whole; what is long, a sentence, folds in the last column.
        table.add_column(name, overflow="fold", no_wrap=place == 0)
    for row in rows:
        *first, last = [Text(cell) for cell in row]
        last.stylize("dim")
        table.add_row(*first, last)
    Console(highlight=False).print(table)
