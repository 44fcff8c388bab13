"""Figures of the pages on the sources: what the command prints today."""

import re
from pathlib import Path

import pytest

import shardyard
from shardyard.units import format_seconds

pytestmark = pytest.mark.heavy

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/tutorials/imagenet-on-spot-nodes.md"
RECIPES = {"EfficientNet-B7": "s2-efficientnet-b7", "ResNet-50": "s2-resnet50"}
_ROW = re.compile(r"^\| *([^|]*?) *\| (\d)(?: x [^|]+)? \| ([\d,]+) \| ([^|]+) \|$", re.M)


def rows() -> list[tuple[str, int, str, str]]:
    """Recipe, nodes, images a second, time of a million images; the model is in its first row."""
    found, recipe = [], ""
    for model, nodes, rate, seconds in _ROW.findall(PAGE.read_text()):
        recipe = RECIPES[model.partition(",")[0]] if model else recipe
        found.append((recipe, int(nodes), rate, seconds))
    return found


def test_the_table_has_both_networks() -> None:
    assert [(recipe, nodes) for recipe, nodes, _, _ in rows()] == [
        *((RECIPES["EfficientNet-B7"], nodes) for nodes in (1, 2, 3)),
        *((RECIPES["ResNet-50"], nodes) for nodes in (1, 2, 4)),
    ]


@pytest.mark.parametrize(("recipe", "nodes", "rate", "seconds"), rows())
def test_the_page_prints_what_the_plan_prints(
    recipe: str, nodes: int, rate: str, seconds: str
) -> None:
    path = ROOT / f"examples/sources/{recipe}.yaml"
    predicted = shardyard.plan(path, "run.epochs=null", "run.steps=1000", f"cluster.nodes={nodes}")
    images_per_s = predicted.plan.speed.tokens_per_s
    assert images_per_s is not None
    assert float(rate.replace(",", "")) == float(f"{images_per_s:.3g}")
    assert seconds == format_seconds(1e6 / images_per_s)
