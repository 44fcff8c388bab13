"""Studies beside each other: speed and scaling of each size, and what is not concluded."""

import json
import sys
from html import unescape
from pathlib import Path

import pytest

from shardyard.cli import main
from shardyard.errors import RequestError
from shardyard.report.study.compare import compare_studies, read_study
from tests.report.study.some_studies import write_measured, write_published

OLD = {1: 1000.0, 2: 1900.0, 4: 3600.0}


def test_what_is_faster_everywhere_scales_alike(tmp_path: Path) -> None:
    old = write_measured(tmp_path, "old", OLD)
    new = write_measured(tmp_path, "new", {size: 1.2 * rate for size, rate in OLD.items()})
    found = compare_studies([[read_study(old)], [read_study(new)]])
    ours = [size for size in found.sizes if size.side == 1]
    assert [size.speed.verdict for size in ours if size.speed] == ["faster"] * 3
    for size in ours:
        assert size.speed and size.speed.ratio == pytest.approx(1 / 1.2, rel=0.01)
        alone = OLD[size.accelerators] / size.accelerators / 1000
        assert size.efficiency == pytest.approx(alone, rel=0.01)
    scalings = [size.scaling for size in ours]
    assert scalings[0] is None
    assert [each.verdict for each in scalings[1:] if each] == ["inconclusive"] * 2
    assert found.unit == "tokens" and found.base == 1
    assert [each.name for each in found.settings] == ["optim.lr"]
    assert found.settings_of == ("old-n1", "new-n1")


def test_what_loses_more_on_more_accelerators_scales_worse(tmp_path: Path) -> None:
    old = write_measured(tmp_path, "old", OLD)
    new = write_measured(tmp_path, "new", {1: 1000.0, 2: 1900.0, 4: 2880.0})  # 72 % for 90 %
    found = compare_studies([[read_study(old)], [read_study(new)]])
    last = found.sizes[-1]
    assert last.scaling is not None and last.scaling.verdict == "worse"
    assert last.scaling.ratio == pytest.approx(0.8, rel=0.01)
    assert last.scaling.low < 0.8 < last.scaling.high < 1


def test_repeats_that_took_turns_are_one_side(tmp_path: Path) -> None:
    sides: tuple[list[Path], list[Path]] = ([], [])
    for number in range(3):
        for side, (name, factor) in enumerate((("old", 1.0), ("new", 0.97))):
            rates = {size: factor * rate for size, rate in OLD.items()}
            began_t = 1e9 + 1e5 * (2 * number + side)
            sides[side].append(
                write_measured(tmp_path, f"{name}-{number}", rates, began_t=began_t, seed=number)
            )
    found = compare_studies([[read_study(folder) for folder in side] for side in sides])
    assert found.name(0) == "old-0 and 2 more"
    speeds = [size.speed for size in found.sizes if size.side == 1]
    assert [speed.verdict for speed in speeds if speed] == ["slower"] * 3
    assert all(speed and speed.how.startswith("3 pairs of runs") for speed in speeds)


def test_of_published_numbers_nothing_is_concluded(tmp_path: Path) -> None:
    old = write_measured(tmp_path, "old", OLD)
    paper = write_published(tmp_path, "paper", {2: 4000.0, 8: 12800.0})
    found = compare_studies([[read_study(old)], [read_study(paper)]])
    assert found.base == 2
    assert all(size.speed is None and size.scaling is None for size in found.sizes)
    of_paper = {size.accelerators: size.efficiency for size in found.sizes if size.side == 1}
    assert of_paper == {1: None, 2: 1.0, 4: None, 8: 0.8}


def test_a_size_whose_run_is_gone_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_measured(tmp_path, "old", OLD)
    write_measured(tmp_path, "new", OLD)
    (tmp_path / "new-n4" / "recipe.yaml").unlink()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["compare", "old", "new", "--runs-dir", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert "No speed is judged of new on 4" in " ".join(shown.err.split())
    assert "matplotlib is not installed" in shown.err


@pytest.mark.heavy
def test_the_page_has_both_pictures_and_json_the_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_measured(tmp_path, "old", OLD)
    write_measured(tmp_path, "new", {1: 1000.0, 2: 1900.0, 4: 2880.0})
    assert main(["compare", "old", "new", "--runs-dir", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    page = unescape(Path(told["page"]).read_text())
    assert page.count("<svg") == 2 and "optim.lr" in page and "inconclusive" in page
    assert told["sizes"][-1]["scaling"]["verdict"] == "worse"
    assert [study["name"] for study in told["studies"]] == ["old", "new"]
    assert main(["compare", "old", "new", "--runs-dir", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert "worse" in shown.out and shown.out.splitlines()[-1] == str(tmp_path / "compare.html")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda table: table.pop("series"), "is not the table of a study"),
        (lambda table: table.update(version=9), "is of version 9"),
        (lambda table: table["series"].append(table["series"][0]), "holds 2 series"),
        (lambda table: table["series"][0].update(rows=[]), "no size of this study was measured"),
        (lambda table: table["series"][0]["rows"][0].update(run_id="../../x"), "no name of a fol"),
        (lambda table: table["series"][0]["rows"][0].update(tokens_per_s=-1), "not above 0"),
    ],
)  # fmt: skip
def test_a_table_that_is_not_whole_is_refused(tmp_path: Path, change: object, says: str) -> None:
    folder = write_published(tmp_path, "paper", {1: 10.0})
    table = json.loads((folder / "table.json").read_text())
    change(table)  # type: ignore[operator]
    (folder / "table.json").write_text(json.dumps(table))
    with pytest.raises(RequestError, match=says):
        read_study(folder)
