"""Metrics of the accuracy report against hand arithmetic and published values."""

import math

import pytest

from benchmarks import accuracy_metrics as metrics
from benchmarks.accuracy_metrics import Pair, Share


def pairs(*numbers: tuple[float, float]) -> list[Pair]:
    return [Pair(predicted=predicted, measured=measured) for predicted, measured in numbers]


def test_error_and_bias_of_one_too_fast_and_one_too_slow() -> None:
    ratios = [1.2, 0.9, 1.0]
    assert metrics.mape(ratios) == pytest.approx((0.2 + 0.1 + 0) / 3)
    assert metrics.bias(ratios) == pytest.approx((0.2 - 0.1 + 0) / 3)


def test_nothing_to_compare_is_none() -> None:
    assert metrics.mape([]) is None
    assert metrics.bias([]) is None
    assert metrics.p90([]) is None
    assert metrics.mape_scaled([]) is None


def test_p90_lies_between_the_ninth_and_the_tenth_of_ten_errors() -> None:
    ratios = [1 + i / 100 for i in range(1, 11)]
    assert metrics.p90(ratios) == pytest.approx(0.09 + 0.1 * 0.01)


def test_the_best_scalar_beats_every_other_on_a_fine_grid() -> None:
    ratios = [0.5, 0.8, 0.85, 1.4, 3.0]
    least = min(sum(abs(s / 1000 * r - 1) for r in ratios) / len(ratios) for s in range(100, 3000))
    scaled = metrics.mape_scaled(ratios)
    assert scaled is not None
    assert scaled <= least + 1e-9


def test_a_common_factor_is_taken_away_whole() -> None:
    assert metrics.mape_scaled([1.7, 1.7, 1.7]) == pytest.approx(0)


def test_one_row_has_no_scaled_error() -> None:
    assert metrics.mape_scaled([1.7]) is None


def test_spearman_of_the_textbook_example() -> None:
    # IQ and hours of television of ten people: Wikipedia, Spearman's rank correlation, example
    iq = (86, 97, 99, 100, 101, 103, 106, 110, 112, 113)
    hours = (2, 20, 28, 27, 50, 29, 7, 17, 6, 12)
    assert metrics.spearman(pairs(*zip(iq, hours, strict=True))) == pytest.approx(-29 / 165)


def test_equal_predictions_find_no_order_and_equal_measurements_have_none() -> None:
    assert metrics.spearman(pairs((5, 1), (5, 2), (5, 3))) == 0
    assert metrics.spearman(pairs((1, 5), (2, 5), (3, 5))) is None


def test_ties_share_a_rank() -> None:
    # measured ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4: covariance 4.5, variances 4.5 and 5
    group = pairs((1, 10), (2, 20), (3, 20), (4, 30))
    assert metrics.spearman(group) == pytest.approx(4.5 / math.sqrt(4.5 * 5))


def test_regret_is_the_slowdown_of_the_layout_picked() -> None:
    assert metrics.regret(pairs((9, 80), (7, 100), (5, 90))) == pytest.approx(0.25)
    assert metrics.regret(pairs((9, 100), (7, 80), (5, 90))) == 0


def test_layouts_predicted_equal_count_with_their_mean_regret() -> None:
    assert metrics.regret(pairs((9, 80), (9, 100), (5, 90))) == pytest.approx(0.125)


def test_wilson_interval_of_no_hit_in_ten() -> None:
    # 0 of 10: z^2 / (n + z^2) = 3.8415 / 13.8415 (Newcombe 1998, Statist. Med. 17, table I)
    share = Share(hits=0, total=10)
    low, high = share.interval() or (None, None)
    assert low == 0
    assert high == pytest.approx(0.2775, abs=1e-4)


def test_a_share_of_nothing_has_neither_value_nor_interval() -> None:
    assert Share(hits=0, total=0).value is None
    assert Share(hits=0, total=0).interval() is None


def test_leave_one_out_applies_the_factor_of_the_others() -> None:
    answer = metrics.leave_one_source_out({"a": [2.0, 2.0, 2.0], "b": [2.0], "c": [1.0]})
    # c is left out: the others are twice too fast, so c comes out at half: 50 % wrong
    assert answer["c"] == {"scalar": pytest.approx(0.5), "mape": pytest.approx(0.5)}
    # a is left out: geometric mean of 1/2 and 1
    assert answer["a"]["scalar"] == pytest.approx(math.sqrt(0.5))


def test_one_source_has_no_others() -> None:
    assert metrics.leave_one_source_out({"a": [1.1]}) == {}
