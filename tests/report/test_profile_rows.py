"""A profile on the page, in report.md and in words."""

import json
from html import unescape
from pathlib import Path

from shardyard.report.page import HEADS, profile_rows, profile_words, write_report
from shardyard.report.run_data import read_run
from shardyard.report.walltime import account, total_phases
from shardyard.rundir.jsonl import EventWriter
from tests.report.synthetic import write_whole_run
from tests.rundir.test_profiles import profile_of

TERMS = [
    {
        "name": name, "reason": "why", "predicted_s": predicted_s, "measured_s": measured_s,
        "lowest_s": 0.1, "lowest_rank": 2, "highest_s": 0.9, "highest_rank": 5, "is_part": is_part,
    }
    for name, predicted_s, measured_s, is_part in (
        ("compute", 0.2, 0.4, False), ("attention", 0.1, 0.1, True), ("launch", None, 0.1, False),
    )
]  # fmt: skip


def test_rows_are_the_terms_and_their_sum() -> None:
    profile = profile_of(7, ranks=[2, 5], terms=TERMS, world_size=8)
    rows = profile_rows(profile)
    assert all(len(row) == len(HEADS) for row in rows)
    assert rows[0][:6] == ("compute", "200 ms", "400 ms", "80.0 %", "100 ms (rank 2)",
                           "900 ms (rank 5)")  # fmt: skip
    assert [row[0] for row in rows] == ["compute", "- attention", "launch", "a step"]
    assert rows[2][1] == "-"
    assert rows[3][1:4] == ("200 ms", "500 ms", "100 %")


def test_words_tell_the_cost_and_what_is_missing() -> None:
    words = profile_words(profile_of(7, usual_s=None, steps=1, missing={"3": "no room"}))
    assert words.startswith("Step 7 on 1 rank of 1: 500 ms a step, no step came before")
    assert words.endswith("No trace of rank 3: no room.")
    assert "25% longer than the 400 ms of those before" in profile_words(profile_of(7))


def test_the_report_shows_all_profiles_and_their_part_of_the_wall_time(tmp_path: Path) -> None:
    run = write_whole_run(tmp_path)
    before = total_phases(account(read_run(run)))
    profile = profile_of(7)
    run.profile(7).mkdir(parents=True)
    (run.profile(7) / "profile.json").write_text(json.dumps(profile.to_json()))
    events = EventWriter(run.events, attempt=1, generation=0)
    told = {**profile_of(9).to_json(), "stood_still_s": 0.25}
    events.write("profiled", id="b", step=9, profile=told)
    events.close()
    write_report(run)
    for text in (run.report_html.read_text(), run.report_markdown.read_text()):
        assert "Where a step's time went" in unescape(text)
        assert "Steps 7 to 8 on 1 rank of 1" in text
        assert "Steps 9 to 10" in text
    assert "profiles/step-00000009" in run.report_html.read_text()
    after = total_phases(account(read_run(run)))
    assert after["profile"] - before.get("profile", 0.0) == 0.25
