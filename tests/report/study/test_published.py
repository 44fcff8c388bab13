"""Published scaling tables, read from a CSV: the efficiencies that their sources print come out."""

import re
from pathlib import Path

import pytest

from shardyard.errors import RequestError
from shardyard.report.study.published import read_table
from shardyard.report.study.rows import ScalingSeries
from shardyard.report.study.scaling import points, series_notes

SCALING = Path(__file__).parents[3] / "benchmarks" / "groundtruth" / "scaling"


def efficiencies(series: ScalingSeries) -> list[float]:
    """In percent, without the first size's 100."""
    found = [point.efficiency for point in points(series)]
    assert found[0] is not None and found[0].value == 1
    return [100 * figure.value for figure in found[1:] if figure is not None]


def test_s4s_seven_rows_give_the_efficiencies_that_it_prints() -> None:
    large, big = (read_table(SCALING / f"s4-bert-{name}.csv") for name in ("large", "1.5b"))
    assert len(large.rows) + len(big.rows) == 7
    assert [round(value, 2) for value in efficiencies(large)] == [98.04, 95.88, 90.39]
    assert [round(value, 1) for value in efficiencies(big)] == [85.1, 82.7]
    for series in (large, big):
        printed = [float(row.printed.removesuffix(" %")) for row in series.rows]
        for value, source in zip([100.0, *efficiencies(series)], printed, strict=True):
            assert abs(value - source) <= 0.05


def test_s4s_rates_of_an_accelerator_are_those_that_it_prints() -> None:
    large, big = (read_table(SCALING / f"s4-bert-{name}.csv") for name in ("large", "1.5b"))
    found = [
        round(row.rate.samples_per_s / row.accelerators, 2)
        for series in (large, big)
        for row in series.rows
        if row.rate is not None and row.rate.samples_per_s is not None
    ]
    assert found == [172.47, 169.10, 165.36, 155.90, 34.58, 29.43, 28.59]


def test_nemos_speed_ups_are_those_that_it_prints() -> None:
    series = read_table(SCALING / "nemo-t5-3b.csv")
    first = series.rows[0].accelerators
    speed_ups = [100.0, *efficiencies(series)]
    for value, row in zip(speed_ups, series.rows, strict=True):
        speed_up = value / 100 * row.accelerators / first
        assert f"{speed_up:.2f}".rstrip("0").rstrip(".") + "x" == row.printed


def test_llm_foundrys_efficiencies_are_the_ratios_of_its_printed_mfu() -> None:
    series = read_table(SCALING / "llm-foundry-mpt-7b.csv")
    assert series.hold == "batch-per-device"
    first = series.rows[0].mfu
    assert first is not None
    for value, row in zip(efficiencies(series), series.rows[1:], strict=True):
        assert row.mfu is not None
        assert value == pytest.approx(100 * row.mfu / first, abs=0.05)
    assert all(point.is_scaling for point in points(series))


def test_nvidias_weak_scaling_is_what_it_prints() -> None:
    series = read_table(SCALING / "nvidia-bert-dgx2.csv")
    assert series.hold == "batch-per-device"
    for value, row in zip(efficiencies(series), series.rows[1:], strict=True):
        # it cuts its decimals off instead of rounding
        assert value / 100 * row.accelerators == pytest.approx(float(row.printed), abs=0.0101)


def test_a_table_whose_settings_change_is_not_called_scaling() -> None:
    series = read_table(SCALING / "llm-foundry-mpt-760m.csv")
    found = points(series)
    assert found[0].changed == ()
    assert all(point.changed == ("accumulation 4 -> 1",) for point in found[1:])
    assert "not called scaling" in " ".join(series_notes(series))


def test_epoch_times_that_a_source_only_draws_come_out_in_the_same_form(tmp_path: Path) -> None:
    path = tmp_path / "epochs.csv"
    path.write_text("nodes,accelerators,epoch_s\n1,8,1000\n2,16,520\n3,24,355\n")
    series = read_table(path)
    assert [round(value, 1) for value in efficiencies(series)] == [96.2, 93.9]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty. Its first line names the columns"),
        ("accelerators,samples_per_s\n", "has a header and no rows"),
        ("accelerators,sample_per_s\n8,1\n", "is 'samples_per_s' meant?"),
        ("nodes,samples_per_s\n1,8\n", "accelerators is missing"),
        ("accelerators,nodes\n8,1\n", "a rate is missing: one of samples_per_s"),
        ("accelerators,samples_per_s\n8,fast\n", "row 2: samples_per_s='fast' is not a number"),
        ("accelerators,samples_per_s\n8,-1\n", "row 2: samples_per_s='-1' is not a number above 0"),
        ("accelerators,samples_per_s\n8.5,1\n", "accelerators='8.5' is not a whole number"),
        ("accelerators,samples_per_s\n,1\n", "row 2: accelerators is empty"),
        ("accelerators,samples_per_s\n8,\n", "no rate in one row"),
        ("accelerators,samples_per_s,tokens_per_s\n8,1,2\n", "samples_per_s and tokens_per_s in"),
        ("accelerators,samples_per_s,tokens_per_s\n8,1,\n16,,2\n", "rates of different kinds"),
        ("accelerators,samples_per_s\n8,1\n8,2\n", "8 accelerators are in several rows"),
    ],
)
def test_a_wrong_table_is_refused_with_its_place(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(RequestError, match=re.escape(says)):
        read_table(path)


def test_a_table_that_is_not_there_names_one_that_is(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"cannot be read as text: No such file.*s4-bert-large"):
        read_table(tmp_path / "none.csv")


def test_numbers_may_be_written_as_sources_print_them(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text('accelerators,samples_per_s,printed\n8,"1,379.76",100 %\n16,2705.57,-\n')
    assert [round(value, 2) for value in efficiencies(read_table(path))] == [98.04]
