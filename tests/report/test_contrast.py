"""Both themes hold WCAG 2.2 AA: contrast computed from the design tokens of all pages."""

import re
from functools import cache

import pytest

from shardyard.report.html import TEMPLATES

THEMES = ("light", "dark")
SURFACES = ("card", "page")
TEXT_RATIO, GRAPHIC_RATIO = 4.5, 3.0  # WCAG 2.2, 1.4.3 and 1.4.11
CURVES = ("blue", "orange", "green", "red", "grey", "purple", "teal", "amber", "brown", "pink")
"""Colours of lines and of spots that no other part of a chart tells apart."""


@cache
def tokens(theme: str) -> dict[str, str]:
    """Colour tokens of a theme; the dark one changes some of the light one."""
    light, dark = (
        (TEMPLATES / "tokens.css").read_text().split("@media (prefers-color-scheme: dark)")
    )
    found = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})\b", light))
    if theme == "dark":
        found |= dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})\b", dark))
    return found


def rules() -> str:
    return (TEMPLATES / "page.css").read_text()


def luminance(colour: str) -> float:
    """Relative luminance of an sRGB colour, as WCAG defines it."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def text_colours() -> set[str]:
    """Tokens that a rule gives to text; white text on a colour is looked at by itself."""
    return set(re.findall(r"(?<![-\w])color: var\(--([\w-]+)\)", rules())) - {"card"}


def under_card_text() -> set[str]:
    """Tokens of surfaces whose text has the colour of a card, as of a chosen option."""
    blocks = re.findall(r"\{([^{}]*color: var\(--card\)[^{}]*)\}", rules())
    return {name for body in blocks for name in re.findall(r"background: var\(--([\w-]+)\)", body)}


def badges() -> tuple[set[str], float]:
    """Tokens that tint a badge under its text, and the share of the tint."""
    (percent,) = re.findall(r"\.badge \{[^}]*color-mix\(in srgb, var\(--own\) (\d+)%", rules())
    return set(re.findall(r"--own: var\(--([\w-]+)\)", rules())), int(percent) / 100


def mixed(one: str, other: str, share: float) -> str:
    """A mix in sRGB, as ``color-mix`` makes it."""
    pairs = [(int(one[n : n + 2], 16), int(other[n : n + 2], 16)) for n in (1, 3, 5)]
    return "#" + "".join(f"{round(share * a + (1 - share) * b):02x}" for a, b in pairs)


def test_the_ratio_is_that_of_the_standard() -> None:
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)  # W3C's known example


@pytest.mark.parametrize("theme", THEMES)
def test_text_can_be_read_on_every_surface(theme: str) -> None:
    found = tokens(theme)
    assert {"ink", "muted", "good", "warn", "bad"} <= text_colours()
    low = {
        (name, surface): round(contrast(found[name], found[surface]), 2)
        for name in text_colours()
        for surface in SURFACES
        if contrast(found[name], found[surface]) < TEXT_RATIO
    }
    assert low == {}


@pytest.mark.parametrize("theme", THEMES)
def test_badges_and_chosen_options_can_be_read(theme: str) -> None:
    found = tokens(theme)
    tints, share = badges()
    assert {"blue", "ink"} <= under_card_text() and {"green", "orange", "red"} <= tints
    chosen = {name: contrast(found["card"], found[name]) for name in under_card_text()}
    tinted = {
        name: contrast(found["ink"], mixed(found[name], found["card"], share)) for name in tints
    }
    assert {name: ratio for name, ratio in chosen.items() if ratio < TEXT_RATIO} == {}
    assert {name: ratio for name, ratio in tinted.items() if ratio < TEXT_RATIO} == {}


@pytest.mark.parametrize("theme", THEMES)
def test_curves_stand_out_from_their_card(theme: str) -> None:
    found = tokens(theme)
    low = [name for name in CURVES if contrast(found[name], found["card"]) < GRAPHIC_RATIO]
    assert low == []


def test_rules_have_no_colour_of_their_own() -> None:
    outside_print = rules().partition("@media print")[0]
    assert re.findall(r"#[0-9a-fA-F]{3,8}\b", outside_print) == []
