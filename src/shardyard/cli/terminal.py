"""The one way to the terminal: nothing that is printed there can act on it (printable.py)."""

import sys

import click

from shardyard.printable import printable


def tell(text: object = "") -> None:
    """Print on stdout: the answer of a verb."""
    click.echo(printable(str(text)))


def say(text: object) -> None:
    """Print on stderr, at once: what a verb says beside its answer."""
    print(printable(str(text)), file=sys.stderr, flush=True)


def tell_exactly(text: str) -> None:
    """Print on stdout without a change: what the user wrote, or asked for as it is."""
    sys.stdout.write(text)
    sys.stdout.flush()
