"""Line styles of the compared runs: a colour and a dash pattern for each side."""

from dataclasses import dataclass

_COLOURS = (
    "blue", "orange", "green", "red", "purple", "teal", "brown", "pink", "amber", "grey",
)  # fmt: skip
_DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (1.5, 1.5), (6, 2, 1.5, 2))


@dataclass(frozen=True, kw_only=True)
class LineStyle:
    """Style of one side, in every picture and in the legend."""

    colour: str
    """Colour of the style sheet."""
    dashes: tuple[float, ...]
    """Lengths of line and gap; empty: a whole line."""

    @property
    def matplotlib_dashes(self) -> tuple[float, tuple[float, ...]]:
        """Line style as matplotlib takes it: offset and lengths."""
        return (0, self.dashes)

    def swatch(self) -> str:
        """A short line of it, as HTML."""
        pattern = " ".join(f"{3 * length:g}" for length in self.dashes)
        dashes = f' stroke-dasharray="{pattern}"' if pattern else ""
        return (
            '<svg class="look" width="30" height="8" aria-hidden="true"><line x1="1" y1="4" '
            f'x2="29" y2="4" stroke="var(--{self.colour})" stroke-width="2.5"{dashes}/></svg>'
        )


def line_style_of(side: int) -> LineStyle:
    """Return the look of a side by its number; the first always looks the same."""
    colours = len(_COLOURS)
    dashes = _DASHES[side // colours % len(_DASHES)]
    return LineStyle(colour=_COLOURS[side % colours], dashes=dashes)
