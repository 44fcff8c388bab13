"""How the curves of a side look: ten colours, then the same again in other dashes."""

from dataclasses import dataclass

_COLOURS = (
    "blue", "orange", "green", "red", "purple", "teal", "brown", "pink", "amber", "grey",
)  # fmt: skip
_DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (1.5, 1.5), (6, 2, 1.5, 2))


@dataclass(frozen=True, kw_only=True)
class Look:
    """Of one side, on every picture and in the legend."""

    colour: str
    """Of the style sheet."""
    dashes: tuple[float, ...]
    """Lengths of line and gap; empty: a whole line."""

    @property
    def matplotlib_dashes(self) -> tuple[float, tuple[float, ...]]:
        """As matplotlib takes a line's style: offset and lengths."""
        return (0, self.dashes)

    def swatch(self) -> str:
        """A short line of it, as HTML."""
        pattern = " ".join(f"{3 * length:g}" for length in self.dashes)
        dashes = f' stroke-dasharray="{pattern}"' if pattern else ""
        return (
            '<svg class="look" width="30" height="8" aria-hidden="true"><line x1="1" y1="4" '
            f'x2="29" y2="4" stroke="var(--{self.colour})" stroke-width="2.5"{dashes}/></svg>'
        )


def look_of(side: int) -> Look:
    """By the side's number; the first is drawn alike whatever is beside it."""
    colours = len(_COLOURS)
    dashes = _DASHES[side // colours % len(_DASHES)]
    return Look(colour=_COLOURS[side % colours], dashes=dashes)
