"""A public configuration under its own framework and as an imported recipe: the same losses.

Both run for real, as in `benchmarks/imported_behaviour.py`, which has more of them.
"""

from pathlib import Path

import pytest

from benchmarks.imported_behaviour import BAR, CASES, STEPS, lay_out, measure

pytestmark = [pytest.mark.slow]


@pytest.mark.parametrize(
    "name", ["Trainer, cosine, warm-up a share", "accelerate, FSDP 2", "script, fsdp"]
)
def test_an_imported_recipe_trains_as_its_source_does(name: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    found = measure(CASES[name], tmp_path / "case", lay_out(tmp_path))
    assert len(found["ours"]) == len(found["theirs"]) == STEPS
    assert found["largest_difference"] <= BAR
    assert found["fall"] > 10 * BAR  # it learns, so that another rate would be seen
