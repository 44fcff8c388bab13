"""`shardyard plan`: a rented cluster is planned at once, without data and without torch."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardyard.cli import main
from shardyard.planner import instance_search

P4D = Path(__file__).parents[2] / "benchmarks" / "groundtruth" / "nccl_all_reduce_2x_p4d_4efa.csv"

RECIPE = """
model: {preset: llama2-7b}
data: {source: ./my-text}
cluster: {nodes: 2, instance: p5.48xlarge}
optim: {micro_batch: 1}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "smallest.yaml"
    path.write_text(RECIPE)
    return str(path)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The answer in JSON."""
    assert main(["plan", *arguments, "--json"]) == 0
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return content


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What is said of a wrong request, on one line; nothing else is printed."""
    assert main(["plan", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    return " ".join(shown.err.split())


def test_the_smallest_useful_recipe_is_planned_without_its_data(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", recipe]) == 0
    text = capsys.readouterr().out
    assert text.startswith("plan: llama2-7b 6.74 B parameters, FULL_SHARD over 16 x H100 SXM")
    for word in ("memory", "fits", "tokens/s", "MFU", "$110.08 an hour", "2026-07-20"):
        assert word in text
    assert "length known once the data is prepared" in text
    assert "Rule of the field" not in text, "ten seconds of reading"


STUCK = (
    "model.preset=llama3.1-405b", "cluster.instance=p5.48xlarge", "cluster.nodes=16384",
    "optim.global_batch=131072", "run.steps=10000", "--layouts=0",
)  # fmt: skip
"""131,072 devices, of which one fails every few minutes, and 500 steps from save to save."""


def test_a_run_that_would_not_advance_has_no_price_and_no_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "plan.html"
    assert main(["plan", *STUCK, f"--page={page}"]) == 0
    text = capsys.readouterr().out
    assert "the run would not advance." in text
    rows = {line.split()[0]: line for line in text.splitlines() if line}
    assert rows["price"].split()[1] == "-" and "per million tokens" not in text
    assert "with start, saves and failures" not in text
    assert "the run would not advance." in page.read_text()
    assert "with start, saves and failures" not in page.read_text()
    found = planned(capsys, *STUCK)
    assert found["advances"] is False
    for name in ("wall_s", "usd", "usd_per_million_tokens", "failures"):
        assert found[name] is None
    assert "the run would not advance." in found["failures_reason"]
    often = planned(capsys, *STUCK, "checkpoint.every=5")
    assert often["advances"] is True and often["usd"] > 0


def test_pods_with_fewer_interfaces_are_slower_and_the_plan_says_why(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = [
        planned(capsys, recipe, "--layouts=0", f"launch.kubernetes.efa={number}")["speed"]
        for number in ("auto", 32, 8, 1, 0)
    ]
    auto, all_of_them, some, one, none = (rate["tokens_per_s"] for rate in rates)
    assert auto == all_of_them
    assert all_of_them > some > one > none
    assert main(["plan", recipe, "--layouts=0", "launch.kubernetes.efa=0"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "network TCP launch.kubernetes.efa=0, and p5.48xlarge has 32: 21 Gb/s a node" in said
    assert main(["plan", recipe, "--layouts=0"]) == 0
    assert "network" not in capsys.readouterr().out


def test_details_begin_with_the_rule_and_give_every_term_a_reason(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", recipe, "--details", "--layouts", "0"]) == 0
    text = capsys.readouterr().out
    # 20 bytes x 6,738,415,616 parameters = 125.5 GiB, a sixteenth of it 7.8 GiB
    assert (
        "20 bytes a trained parameter (Adam, mixed precision) = 125.5 GiB, split over 16: 7.8 GiB"
        in text
    )
    for term in ("activations", "reserved", "matrix products", "all-gather", "989 TFLOP/s"):
        assert term in text
    assert "32 blocks x 4,096 tokens, recompute none" in text


def test_details_tell_what_snapshots_are_for(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for every, told in (("null", False), ("auto", True)):
        options = [f"elastic.snapshot_every={every}", "run.steps=500", "--details"]
        assert main(["plan", recipe, *options, "--layouts", "0"]) == 0
        text = capsys.readouterr().out
        assert ("in memory, as for one failure every" in text) == told


def test_the_best_layouts_come_with_reasons_and_settings(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", recipe, "--layouts", "2"]) == 0
    text = capsys.readouterr().out
    assert "legal layouts fit. The fastest:" in text
    assert "of the step computes" in text
    assert re.search(r"The first is \d+% faster than this recipe:", text)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "asked",
    [
        (),
        ("parallel.strategy=FULL_SHARD",),
        ("parallel.dp_replicate=2", "parallel.tp=4", "memory.recompute=full"),
    ],
)
def test_the_settings_that_are_advised_make_the_recipe_the_first_layout(
    recipe: str, capsys: pytest.CaptureFixture[str], asked: tuple[str, ...]
) -> None:
    assert main(["plan", recipe, *asked]) == 0
    advice = capsys.readouterr().out.splitlines()[-1].split()
    before = planned(capsys, recipe, *asked)
    after = planned(capsys, recipe, *asked, *advice)
    assert after["step_s"] == pytest.approx(before["search"]["best"][0]["step_s"])
    assert after["step_s"] < before["step_s"]
    assert main(["plan", recipe, *asked, *advice]) == 0
    assert "faster than this recipe" not in capsys.readouterr().out


def test_no_layouts_are_searched_where_none_are_asked_for(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "search" not in planned(capsys, recipe, "--layouts", "0")
    assert len(planned(capsys, recipe, "--layouts", "1")["search"]["best"]) == 1


def test_details_say_why_other_families_lost(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", recipe, "--details"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"tp 8 +\d+\.\d% slower at best: .*tensor parallel", text)


def test_what_cannot_fit_says_by_how_much_and_what_would(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", recipe, "model.preset=llama3.1-405b"]) == 0
    text = capsys.readouterr().out
    assert "does not fit" in text.splitlines()[2]
    # 350 GiB are what the nearest needs beyond the 80 of a device
    assert re.search(
        r"The nearest is .*: 4\d\d\.\d GiB are 5\d\d% of 80\.0 GiB, 3\d\d\.\d GiB too", text
    )
    found = re.search(
        r"It fits on devices with more memory, or as .* on (\d+) nodes:\n  (.*)\n", text
    )
    assert found
    nodes, settings = found.groups()
    assert settings.startswith(f"cluster.nodes={nodes} parallel.zero=")
    there = planned(capsys, recipe, "model.preset=llama3.1-405b", *settings.split())
    assert there["fits"] == "fits"


NO_OFFLOAD = ["precision.reduce=exact"]
"""Excludes every memory.offload."""


def test_what_fits_on_nothing_larger_says_what_else_helps(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["model.preset=llama3.1-405b", "optim.global_batch=16", "cluster.instance=g6.48xlarge"]
    given += NO_OFFLOAD
    assert main(["plan", recipe, *given]) == 0
    text = capsys.readouterr().out
    assert "too much on each device. Use devices with more memory, a smaller model or" in text


def test_a_recipe_that_does_not_fit_is_given_settings_that_do(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["model.preset=llama3-8b", "cluster.instance=p4d.24xlarge", "cluster.nodes=1"]
    assert main(["plan", recipe, *given]) == 0
    text = capsys.readouterr().out
    assert "This recipe does not fit. The first does:" in text
    settings = text.splitlines()[-1].split()
    assert planned(capsys, recipe, *given, *settings)["fits"] == "fits"


def test_one_device_has_a_search_too(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("cluster.instance=p5.4xlarge", "cluster.nodes=1", *NO_OFFLOAD)
    one = planned(capsys, recipe, *words)
    assert one["fits"] == "does not fit"
    assert one["search"]["nearest"]["layout"]["dp_shard"] == 1
    assert one["search"]["enough_nodes"] >= 2


def test_a_length_gives_time_price_and_failures(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", recipe, "run.tokens=2000000000", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["steps"] == 477  # 2e9 / (1,024 samples x 4,096 tokens), rounded up
    assert plan["wall_s"] > plan["seconds"]
    assert plan["failures"]["expected_failures"] > 0
    assert plan["usd"] == pytest.approx(
        plan["wall_s"] / 3600 * (110.08 + 55.04 * plan["spare_nodes"])
    )
    # the price of a token is that of a step, without failures
    alone_usd = plan["seconds"] / 3600 * 110.08
    assert plan["usd_per_million_tokens"] == pytest.approx(1e6 * alone_usd / plan["tokens"])
    assert sum(term["seconds"] for term in plan["time"]) == pytest.approx(plan["step_s"])
    assert plan["search"]["legal"] > plan["search"]["fitting"] > 0


# --- offers -------------------------------------------------------------------------------------


def test_offers_need_a_length(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = refusal(capsys, recipe, "--offers")
    assert "needs the length of the run, which is known once the data is prepared." in text
    assert "Give run.steps, run.samples or run.tokens" in text


@pytest.mark.heavy
def test_a_deadline_gets_an_instance_and_the_settings_that_keep_it(
    recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    types = ("p5.48xlarge", "p4d.24xlarge", "g6e.48xlarge")
    monkeypatch.setattr(instance_search, "instance_names", lambda: types)
    length = "run.tokens=2000000000"
    assert main(["plan", recipe, length, "--deadline", "6h", "--layouts", "0"]) == 0
    text = capsys.readouterr().out
    found = re.search(
        r"The cheapest within 6 h: (\d+) x ([^\s,]+).*, \$([\d.,]+)\*?:\n  (.*)", text
    )
    assert found
    nodes, name, usd, settings = found.groups()
    assert settings.startswith(f"cluster.instance={name} cluster.nodes={nodes} ")
    there = planned(capsys, recipe, length, *settings.split())
    assert there["wall_s"] < 6 * 3600
    assert there["usd"] == pytest.approx(float(usd.replace(",", "")), abs=0.01)


@pytest.mark.system
@pytest.mark.slow
def test_a_wish_that_nothing_meets_is_told_what_comes_nearest(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["run.tokens=2000000000", "--budget", "$10", "--deadline", "1 min", "--layouts", "0"]
    assert main(["plan", recipe, *asked]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("None is within 1 min and for at most $10.00. The cheapest is ")
    assert re.search(r"; the fastest is \d+ x \S+, \d+ min", last)


@pytest.mark.system
@pytest.mark.slow
def test_offers_without_a_named_machine_do_not_talk_of_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ["model.preset=llama3.2-1b", "data.source=./my-text", "run.samples=100000"]
    assert main(["plan", *asked, "--offers"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("plan: llama3.2-1b 1.24 B parameters, ")
    assert "legal layouts" not in text
    assert "MFU" not in text
    found = planned(capsys, *asked, "--budget", "1,000")
    assert found["assumed_instance"] == found["offers"]["picked"]["instance"]
    assert found["offers"]["picked"]["usd"] <= 1000


# --- batch and quality --------------------------------------------------------------------------


def test_a_larger_batch_is_priced_in_samples(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """24,576 sequences a step against a critical batch of 98,304, as a BERT was trained on DL1."""
    asked = ["model.preset=bert-1.5b", "task.name=masked_lm", "optim.global_batch=24576"]
    asked += ["--critical-batch", "98,304"]
    assert main(["plan", recipe, *asked, "--layouts", "0"]) == 0
    text = capsys.readouterr().out
    assert "1.25 x the fewest samples at 24,576 a step, and 1.50 x at twice that: 1.20 x" in text
    assert planned(capsys, recipe, *asked)["samples_factor"] == pytest.approx(1.25)


# --- calibration --------------------------------------------------------------------------------


def test_a_measured_table_replaces_the_network(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [recipe, "cluster.instance=p4d.24xlarge", "parallel.strategy=FULL_SHARD"]
    plain = planned(capsys, *given)
    table = planned(capsys, *given, "--calibrate", str(P4D))
    assert table["measured"] == [
        "link between nodes: measured, nccl_all_reduce_2x_p4d_4efa.csv, 16 ranks"
    ]
    assert table["step_s"] != plain["step_s"]
    assert main(["plan", *given, "--calibrate", str(P4D)]) == 0
    assert "link between nodes: measured" in capsys.readouterr().out


def test_a_run_scales_the_step_that_was_planned(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = planned(capsys, recipe)
    run = tmp_path / "a-run"
    (run / "attempts" / "1").mkdir(parents=True)
    (run / "attempts" / "1" / "plan.json").write_text(json.dumps(plain))
    measured_s = 1.25 * plain["step_s"]
    lines = [
        {"attempt": 1, "generation": 0, "step": step, "step_time_s": measured_s}
        for step in range(1, 7)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    scaled = planned(capsys, recipe, "--calibrate", str(run))
    assert scaled["step_s"] == pytest.approx(measured_s)
    assert "run a-run, attempt 1" in scaled["measured"][0]
    best, plain_best = scaled["search"]["best"][0], plain["search"]["best"][0]
    assert best["step_s"] == pytest.approx(1.25 * plain_best["step_s"])


@pytest.mark.heavy
def test_nothing_is_calibrated_where_no_accelerator_is_planned(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = refusal(capsys, "model.preset=llama-tiny", "cluster.device=cpu", "--calibrate", "a.csv")
    assert "none is planned here. Name one with cluster.instance or cluster.file." in text


def test_a_missing_calibration_is_refused_with_what_it_may_be(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", recipe, "--calibrate", "nowhere.csv"]) == 2
    text = capsys.readouterr().err
    assert "nowhere.csv does not exist" in text
    assert "profile of a step or ceilings of a device (.json), or the folder of a run" in text


def test_a_measured_profile_changes_the_speed_and_is_named(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = {
        "kind": "step_profile", "device": "NVIDIA H100 80GB HBM3", "number_format": "bf16",
        "matmul_flops_per_s": 300e12, "kernel_s": 8e-6,
    }  # fmt: skip
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile))
    assert main(["plan", recipe, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert main(["plan", recipe, "--json", "--calibrate", str(path)]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["measured"] == ["rates of H100 SXM: measured, profile.json"]
    assert plan["step_s"] > 1.3 * plain["step_s"]


# --- machines ----------------------------------------------------------------------------------


def test_a_device_without_bf16_is_planned_in_fp16(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    there = planned(capsys, recipe, "cluster.instance=p3.16xlarge", "--layouts=0")
    assert there["speed"]["tokens_per_s"] > 0
    assert there["peak"]["flops_per_s"] == 125e12
    said = refusal(capsys, recipe, "cluster.instance=p3.16xlarge", "precision.compute=bf16")
    assert "precision.compute=bf16: V100 16GB has no bf16 products" in said


def test_a_cluster_of_ones_own_is_planned(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text(
        "accelerator: H100 SXM\ndevices_per_node: 8\nnetwork_gbps: 3200\nusd_per_node_hour: 20"
    )
    own = planned(capsys, recipe, "cluster.instance=null", f"cluster.file={path}")
    rented = planned(capsys, recipe)
    assert own["price"]["usd_per_hour"] == 40
    assert own["device"] == rented["device"]
    assert own["search"]["legal"] == rented["search"]["legal"]


@pytest.mark.heavy
def test_a_plan_needs_no_torch(recipe: str) -> None:
    program = (
        "import sys; from shardyard.cli import main; code = main(sys.argv[1:]);"
        "sys.exit(code or any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "plan", recipe], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


# --- what fits ----------------------------------------------------------------------------------

TOO_LARGE = (
    "model.preset=llama2-13b", "cluster.instance=g6e.12xlarge", "optim.global_batch=256",
    "data.seq_len=2048", "run.steps=1000",
)  # fmt: skip


def test_offload_is_searched_before_nothing_fits_and_what_is_printed_fits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = planned(capsys, *TOO_LARGE)
    assert (found["fits"], found["search"]["fitting"]) == ("does not fit", 0)
    assert found["search"]["more_fitting"] > 0 and found["search"]["enough"] is None
    for best in found["search"]["best"]:
        again = planned(capsys, *TOO_LARGE, *best["settings"], "--layouts=0")
        assert again["fits"] == best["fits"] == "fits"
        assert again["device_bytes"] == pytest.approx(best["device_bytes"], rel=1e-6)
        assert again["step_s"] == pytest.approx(best["step_s"], rel=1e-6)
    assert main(["plan", *TOO_LARGE]) == 0
    shown = capsys.readouterr().out
    assert "None of 504 legal layouts fits as the recipe is. With other settings" in shown
    first = " ".join(found["search"]["best"][0]["settings"])
    assert f"This recipe does not fit. The first does:\n  {first}\n" in shown
    assert "memory.offload=" in first


@pytest.mark.parametrize(
    "word", ["optim.ema_decay=0.999", "optim.name=lamb", "precision.reduce=exact"]
)
def test_an_offload_that_the_recipe_excludes_is_not_offered(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (*TOO_LARGE, "optim.micro_batch=1", "optim.lr=1e-4", word)
    found = planned(capsys, *words)
    for best in found["search"]["best"]:
        assert "memory.offload=params" not in best["more"]
        assert planned(capsys, *words, *best["settings"], "--layouts=0")["fits"] == best["fits"]


# --- offers -------------------------------------------------------------------------------------

A_RUN = (
    "model.preset=llama2-7b", "optim.global_batch=1024", "run.steps=20000", "optim.micro_batch=1",
)  # fmt: skip


@pytest.fixture
def few_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two types to rent, so that a comparison of all takes a second."""
    monkeypatch.setattr(instance_search, "instance_names", lambda: ("p4d.24xlarge", "g7e.48xlarge"))
    monkeypatch.setattr(instance_search, "NODES", (4, 8))


@pytest.mark.heavy
@pytest.mark.usefixtures("few_types")
def test_the_plan_and_the_page_of_a_deadline_are_those_of_the_machine_that_is_picked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "plan.html"
    found = planned(capsys, *A_RUN, "--deadline=30d", f"--page={page}")
    picked = found["offers"]["picked"]
    assert found["assumed_instance"] == picked["instance"] != "p5.48xlarge"
    assert found["nodes"] == picked["nodes"]
    for name in ("wall_s", "usd"):
        assert found[name] == pytest.approx(picked[name], rel=1e-6)
    lead = page.read_text().split('class="lead">')[1].split("</p>")[0]
    assert f"{picked['devices']} x {picked['device']}" in lead
    assert picked["candidate"]["more"] == ["model.compile=true"]


@pytest.mark.heavy
@pytest.mark.usefixtures("few_types")
def test_spot_goes_with_a_deadline_and_a_reservation_does_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    usual = planned(capsys, *A_RUN, "--deadline=30d")
    spot = planned(capsys, *A_RUN, "cluster.capacity=spot", "--deadline=30d")
    assert spot["wall_s"] > usual["wall_s"]
    assert spot["failures"]["expected_failures"] > usual["failures"]["expected_failures"]
    assert "at most: spot has a price of the day" in spot["price"]["source"]
    reserved = refusal(capsys, *A_RUN, "cluster.capacity=reservation:cr-0123456789abcdef0",
                       "--deadline=30d")  # fmt: skip
    assert "is a reservation of one instance type" in reserved
    assert "cluster.capacity=null" in reserved


def test_the_price_has_the_spare_nodes_that_the_time_assumes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = (*A_RUN, "cluster.instance=p5.48xlarge", "cluster.nodes=32", "--layouts=0")
    found = planned(capsys, *words)
    spares = found["failures"]["spare_nodes"]
    assert found["spare_nodes"] == spares > 0
    hours = found["wall_s"] / 3600
    assert found["usd"] == pytest.approx(hours * 55.04 * (32 + spares))
    assert main(["plan", *words]) == 0
    assert f"an hour; with {spares} spare node" in capsys.readouterr().out


def test_spot_changes_failures_time_saves_and_price_of_a_plan(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = (*A_RUN, "cluster.instance=p5.48xlarge", "cluster.nodes=32", "--layouts=0")
    usual, spot = planned(capsys, *words), planned(capsys, *words, "cluster.capacity=spot")
    for name in ("wall_s", "usd"):
        assert spot[name] > usual[name]
    assert spot["failures"]["expected_failures"] > 1.3 * usual["failures"]["expected_failures"]
    best = "best_interval_steps"
    assert spot["failures"][best] < usual["failures"][best]


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("machine", "compute", "is_marked"),
    [
        ("g7e.48xlarge", "fp8", True),
        ("p4d.24xlarge", "fp32", True),
        ("p5.48xlarge", "fp8", False),
        ("p4d.24xlarge", "bf16", False),
    ],
)
def test_a_rate_that_nobody_measured_is_marked_wherever_it_is_shown(
    machine: str,
    compute: str,
    is_marked: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = tmp_path / "plan.html"
    words = (*A_RUN, f"cluster.instance={machine}", "cluster.nodes=8", "model.preset=llama3.2-1b",
             f"precision.compute={compute}", "--layouts=1")  # fmt: skip
    assert main(["plan", *words, f"--page={page}"]) == 0
    shown = capsys.readouterr().out
    assert ("* not measured: " in shown) is is_marked
    lines = shown.splitlines()
    best = lines[next(n for n, line in enumerate(lines) if line.startswith("tokens/s")) + 1]
    assert ("*" in best.split("  ")[0]) is is_marked
    assert (f"no {compute} product was timed" in page.read_text()) is is_marked
    assert bool(planned(capsys, *words)["speed"]["unmeasured"]) is is_marked
