"""The page read back by a parser: well-formed, whole, escaped, alone."""

import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

from shardyard.io.files import write_json
from shardyard.report.page import write_report
from shardyard.report.run_data import read_run
from shardyard.report.timeline import describe
from shardyard.rundir.confusion import Confusion, read_confusion, write_confusion
from shardyard.rundir.layout import RunDir
from tests.report.synthetic import SAMPLE, RunWriter, resolved_run, write_whole_run

VOID = {"meta", "br", "hr", "img", "link", "input"}
SECTIONS = (
    "curves-section",
    "wall-time-section",
    "plan-section",
    "sample-section",
    "checkpoints-section",
    "timeline-section",
    "settings-section",
    "manifest-section",
)


class Page(HTMLParser):
    """Tags matched with their ends, ids, text and table rows of a page."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.rows: list[list[str]] = []
        self.text: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "action"):
                self.addresses.append(value or "")
            assert not name.startswith("on"), f"script in {tag} {name}"
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data

    def row(self, first: str) -> list[str]:
        return next(row for row in self.rows if row and row[0] == first)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    run = write_whole_run(tmp_path_factory.mktemp("runs"))
    write_report(run)
    return run


def test_the_report_says_how_its_sample_was_drawn(run: RunDir) -> None:
    page = run.report_html.read_text()
    assert "<h2>Sample, greedy</h2>" in page
    assert "What the model wrote at the end of the run; the prompt is blue" in page
    assert "## Sample, greedy" in run.report_markdown.read_text()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, ""),
        ({"temperature": 0.7}, "drawn at temperature 0.7"),
        ({"temperature": 0.7, "top_k": 0}, "drawn at temperature 0.7"),
        (
            {"temperature": 0.7, "top_k": 40},
            "drawn from the 40 likeliest tokens at temperature 0.7",
        ),
        ({"temperature": 0.0, "top_k": 0}, "greedy"),
    ],
)
def test_a_sample_is_named_by_its_settings(
    tmp_path: Path, settings: dict[str, float], words: str
) -> None:
    run = write_whole_run(tmp_path)
    lines = [json.loads(line) for line in run.events.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "run_finished":
            del line["temperature"]
            line.update(settings)
    run.events.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert read_run(run).sampling_method == words


def test_texts_of_the_first_best_and_last_step_are_shown(tmp_path: Path) -> None:
    writer = RunWriter(RunDir(tmp_path / "run"), resolved_run())
    writer.begin()
    writer.start()
    for step in range(20, 121, 20):
        writer.steps(step - 19, step)
        if step == 80:
            for name in ("loss", "perplexity"):
                writer.lines[-1]["eval"][name] = 0.1
        texts = [{"prompt": "<a>", "text": f"``` of {step}"}, {"prompt": "b", "text": "c"}]
        writer.event("generated", step=step, seconds=0.1, texts=texts)
    run = writer.write()
    write_report(run)
    page, words = run.report_html.read_text(), run.report_markdown.read_text()
    for step, which in ((20, "first"), (80, "best"), (120, "last")):
        assert f"Step {step} ({which})" in page and f"Step {step} ({which})" in words
        assert f"``` of {step}" in words
    assert "Step 40" not in words and "&lt;a&gt;" in page


@pytest.fixture(scope="module")
def page(run: RunDir) -> Page:
    return Page(run.report_html.read_text())


def test_the_page_is_well_formed_and_whole(page: Page) -> None:
    assert page.open == []
    assert set(SECTIONS) <= set(page.ids)
    assert page.tags["svg"] == 6


def test_no_id_stands_twice(page: Page) -> None:
    assert [name for name, times in Counter(page.ids).items() if times > 1] == []


def test_the_page_needs_no_network_and_no_script(page: Page, run: RunDir) -> None:
    assert page.tags["script"] == page.tags["link"] == page.tags["img"] == 0
    assert all(address.startswith("#") for address in page.addresses), page.addresses
    assert "url(http" not in run.report_html.read_text()


def test_text_from_outside_is_text(page: Page) -> None:
    assert page.tags["i"] == page.tags["b"] == 0
    text = "".join(page.text)
    assert SAMPLE in text
    assert "<oom>" in text
    assert "step 60 is damaged: <i>model.safetensors: 12 bytes short</i>" in text
    assert "Step 61 was not saved, as it is not finite: rank 0: model.x holds <i>NaN</i>" in text
    assert "by model size <b>" in text


def test_the_phases_on_the_page_add_up(page: Page) -> None:
    def seconds(cell: str) -> float:
        return float(cell.removesuffix(" s").replace(",", ""))

    start = page.rows.index(page.row("productive"))
    end = page.rows.index(page.row("running time"))
    between, wall = page.row("between attempts"), page.row("wall time")
    for column in (1, 2, 3):
        summed = sum(seconds(row[column]) for row in page.rows[start:end])
        running = seconds(page.rows[end][column])
        assert summed == pytest.approx(running, abs=0.1)
        assert running + seconds(between[column]) == pytest.approx(seconds(wall[column]), abs=0.1)
    shares = [row[4] for row in page.rows[start : end + 1]]
    assert between[4] == wall[4] == "" and shares[-1] == "100 %"
    summed = sum(float(share.removesuffix(" %")) for share in shares[:-1])
    assert summed == pytest.approx(100, abs=0.5)


def test_the_headline_and_the_settings_are_on_the_page(page: Page) -> None:
    text = " ".join("".join(page.text).split())
    assert "Finished: 120 of 120 steps" in text
    assert "below the unigram entropy of the corpus (6.123)" in text
    assert "plan: llama-laptop 2.36 M parameters" in text
    assert page.row("optim.lr")[1:] == ["0.001", "by model size <b>"]
    assert page.row("optim.global_batch")[1:] == ["16", "given"]
    assert page.row("packages.torch")[1] == "2.13.0"


def test_every_attempt_and_loss_is_in_the_timeline(page: Page) -> None:
    lost = next(row for row in page.rows if "worker_lost" in row)
    assert "rank 1 on laptop: killed by SIGKILL" in lost[-1]
    assert [row[2] for row in page.rows if row[3:4] == ["rendezvous"]] == ["0.0", "0.1", "1.0"]


def test_a_straggler_is_told_with_both_times() -> None:
    event = {"kind": "straggler", "rank": 3, "node": "n1", "compute_s": 0.41, "peers_s": 0.2}
    assert describe(event) == "rank 3 on n1: computes 410 ms a step, its peers 200 ms"
    assert describe({**event, "is_over": True}).endswith("200 ms, no longer a straggler")
    held_up = describe({**event, "is_held_up": True})
    assert "410 ms a step on average, held up now and then, its peers" in held_up
    stopped = {**event, "what": "stopped", "stopped_share": 0.661}
    words = "rank 3 on n1: its process is stopped now and then, 66% of the time"
    assert describe(stopped) == words
    assert describe({**stopped, "is_over": True}) == "rank 3 on n1: its process is stopped no more"


def test_late_samples_a_slow_link_and_a_slow_network_are_told_as_what_they_are() -> None:
    late = {"kind": "straggler", "rank": 3, "node": "n1", "what": "data", "is_since_start": True}
    times = {"compute_s": 0.3, "peers_s": 0.2}
    words = "rank 3 on n1: computes and waits for samples 300 ms a step, its peers 200 ms, so since"
    assert describe({**late, **times}).startswith(words)
    link = {"kind": "slow_link", "ranks": [0, 8], "nodes": ["n0", "n1"], "is_over": True}
    assert describe({**link, "exchange_s": 0.05, "peers_s": 0.02}) == (
        "link of 2 ranks from 0 to 8 on n0, n1: collectives take 50 ms a step, those of its peers "
        "20 ms, no longer slow"
    )
    network = {"kind": "device_problem", "node": "n1", "device": None, "problem": "slow_network"}
    assert describe({**network, "cause": "1 Gbit/s"}) == "n1: 1 Gbit/s"


def test_a_node_that_is_left_out_is_told_with_the_cause() -> None:
    event = {"kind": "node_left_out", "node": "b", "node_rank": 1, "machine": "7f", "cause": "lost"}
    assert describe(event) == "b: lost"


def test_a_new_interval_is_told_with_what_it_weighs() -> None:
    event = {"kind": "checkpoint_interval", "every": 1200, "blocked_s": 0.05, "mtbf_s": 86_400.0}
    assert describe(event) == (
        "every 1,200 steps: one stops training for 50 ms, and failures come 1 d apart"
    )


def test_colours_follow_the_page(run: RunDir) -> None:
    html = run.report_html.read_text()
    svg = html[html.index("<svg") : html.rindex("</svg>")]
    assert "var(--blue)" in svg
    assert "#0a0a0" not in svg
    assert "prefers-color-scheme: dark" in html


def test_markdown_has_the_same_numbers_and_fences_the_sample(run: RunDir) -> None:
    text = run.report_markdown.read_text()
    assert "| productive | 1 min 12 s |" in text
    assert "unigram entropy 6.123" in text
    assert f"```text\n{SAMPLE}\n```" in text
    assert "FULL\\_SHARD" in text


JPEG = "/9j/2Q=="
"""The first and the last bytes of a JPEG file, in base64."""


def test_predicted_images_are_in_the_page_with_both_classes(tmp_path: Path) -> None:
    run = write_whole_run(tmp_path)
    images = [
        {"jpeg": JPEG, "label": "cat", "predicted": "cat", "probability": 0.75},
        {"jpeg": JPEG, "label": "<b>dog", "predicted": "cat", "probability": 0.5},
    ]
    write_json(run.predictions, images)
    write_report(run)
    html = run.report_html.read_text()
    page = Page(html)
    assert page.open == [] and page.tags["img"] == 2 and page.tags["b"] == 0
    assert [a for a in page.addresses if a[:1] != "#"] == [f"data:image/jpeg;base64,{JPEG}"] * 2
    assert 'alt="true: &lt;b&gt;dog, predicted: cat, 50.0 %"' in html
    assert "2 validation images from all over the split" in html and ": 1 predicted right" in html
    assert "| \\<b\\>dog | cat | 50.0 % |" in run.report_markdown.read_text()


@pytest.mark.parametrize(
    "images",
    [
        '[{"jpeg": "PHN2Zz4=", "label": "a", "predicted": "a", "probability": 1}]',  # <svg>
        '[{"jpeg": "/9j/ onload", "label": "a", "predicted": "a", "probability": 1}]',
        '[{"jpeg": "/9j/2Q=="}]',
        '{"jpeg": 1}',
        "[1]",
        "not JSON",
    ],
)
def test_a_file_of_other_predictions_shows_no_image(tmp_path: Path, images: str) -> None:
    run = write_whole_run(tmp_path)
    run.predictions.write_text(images)
    assert read_run(run).predictions == ()


def test_confusions_of_the_last_validation_are_a_table(tmp_path: Path) -> None:
    run = write_whole_run(tmp_path)
    pairs = [("<b>dog", "cat", 7), ("owl", "cat", 1)]
    confusion = Confusion(
        step=20, classes=100, predictions=40, right=30, names=["cat", "<b>dog", "owl"],
        matrix=[[9, 0, 0], [7, 5, 0], [1, 0, 2]], pairs=pairs,
    )  # fmt: skip
    write_confusion(run, confusion)
    assert read_confusion(run) == confusion
    write_report(run)
    page = Page(run.report_html.read_text())
    assert page.open == [] and page.tags["b"] == 0
    text = run.report_markdown.read_text()
    assert "step 20: 75.0 % of 40 predictions are right" in text
    assert "The 3 classes in most confusions, of 100:" in text
    assert "| \\<b\\>dog | 7 | 5 | 0 |" in text and "| owl | cat | 1 |" in text


@pytest.mark.parametrize("text", ["[1]", "{}", '{"step": "x"}', "not JSON"])
def test_another_file_of_confusions_shows_none(tmp_path: Path, text: str) -> None:
    run = write_whole_run(tmp_path)
    run.confusion.write_text(text)
    assert read_run(run).confusion is None
    write_report(run)
    assert "Confusion matrix" not in run.report_markdown.read_text()


@pytest.mark.parametrize("ends", [None, 1])
def test_a_run_without_a_single_step_has_a_page(tmp_path: Path, ends: int | None) -> None:
    writer = RunWriter(RunDir(tmp_path / "run"), resolved_run())
    writer.begin()
    if ends is not None:
        writer.start()
        writer.end(ends, "the model's folder <gone> is missing")
    run = writer.write()
    write_report(run)
    page = Page(run.report_html.read_text())
    assert page.open == []
    assert "No step was finished yet." in "".join(page.text)


@pytest.mark.heavy
def test_thousands_of_steps_make_no_heavier_page(tmp_path: Path) -> None:
    writer = RunWriter(RunDir(tmp_path / "run"), resolved_run(steps=20_000))
    writer.begin()
    writer.start()
    writer.steps(1, 20_000)
    run = writer.write()
    write_report(run)
    html = run.report_html.read_text()
    assert len(html) < 600_000
    assert Page(html).open == []
    assert re.search(r"[\d,]+ checkpoints, evaluations and counts of cost are left out here", html)


def test_a_module_of_ones_own_has_a_page_without_plan_and_shape(tmp_path: Path) -> None:
    run = write_whole_run(tmp_path)
    for number in run.attempts():
        content = json.loads(run.resolved(number).read_text())
        write_json(run.resolved(number), {**content, "shape": None})
        run.plan(number).unlink()
    summary = write_report(run)
    page = Page(run.report_html.read_text())
    assert page.open == []
    assert (
        "plan.json is missing or not readable, so the run cannot be compared with its plan."
    ) in page.text
    assert summary.mfu is None


def test_tags_are_on_both_pages(tmp_path: Path) -> None:
    resolved = resolved_run(run={"tags": {"team": "nlp", "project": "search"}})
    writer = RunWriter(RunDir(tmp_path / "run"), resolved)
    writer.begin()
    writer.start()
    write_report(writer.write())
    for name in ("report.html", "report.md"):
        assert "Tags: project=search, team=nlp" in (tmp_path / "run" / name).read_text()


def test_trackers_are_links_and_a_folder_of_an_offline_client_is_none(tmp_path: Path) -> None:
    writer = RunWriter(RunDir(tmp_path / "run"), resolved_run())
    writer.begin()
    writer.start()
    writer.event("tracked", service="mlflow", address="https://old.example/runs/1")
    writer.event("tracked", service="mlflow", address="https://mlflow.example/#/runs/<1>")
    writer.event("tracked", service="wandb", address="javascript:alert(1)")
    write_report(writer.write())
    page = (tmp_path / "run" / "report.html").read_text()
    link = "https://mlflow.example/#/runs/&lt;1&gt;"
    assert f'<a href="{link}">{link}</a>' in page
    assert "<code>javascript:alert(1)</code>" in page and 'href="javascript' not in page


def test_a_report_shows_no_file_that_a_link_points_to(run: RunDir, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of another place")
    kept = run.sample.read_text()
    run.sample.unlink()
    run.sample.symlink_to(secret)
    try:
        assert read_run(run).sample is None
    finally:
        run.sample.unlink()
        run.sample.write_text(kept)
