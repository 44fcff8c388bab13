"""The verb: what is refused before anything starts, the table of faults, and the page."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from shardyard.cli import main
from shardyard.cli.completion import faults
from shardyard.drill.faults import FAULTS
from shardyard.drill.injectors import turn_bytes
from shardyard.drill.page import render_drill
from shardyard.drill.recipe import DrillRecipe
from shardyard.drill.run import Case, Drill, FaultSelection, select_faults
from shardyard.drill.verdict import evaluate
from shardyard.elastic.faults import ONCE, read_faults
from shardyard.rundir.contracts import FAULTS_VARIABLE
from tests.drill.test_verdict import KILLED, TWIN

RECIPE = ("model.preset=llama-tiny", "cluster.device=cpu", "cluster.devices=2")
ONE_NODE = DrillRecipe(
    words=("a.yaml",), steps=200, save_every=33, nodes=1, devices=2, is_exact=False
)
PAGE = Path(__file__).parents[2] / "docs" / "verbs" / "drill.md"


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        ("cluster.instance=p5.48xlarge", r"cluster\.instance: the recipe is one for a cluster"),
        ("launch.slurm.partition=gpu", r"launch\.slurm: .*only on this machine"),
        ("launch.image=a/b:c", r"launch\.image: .*Take these settings out"),
        ("--faults sigkil", r"unknown fault 'sigkil'\. Use some of sigkill, "),
        ("--faults node-0", r"none of these can be tried \(node-0: the recipe has 1 node"),
        (
            "--faults sigkill,kill-in-load",
            r"no longer has kill-in-load.*Use sigkill, .*`python -m benchmarks\.timed_kills`",
        ),
        (
            "--faults kill-in-snapshot",
            r"no longer has kill-in-snapshot.*Use sigkill with elastic\.snapshot_every=2",
        ),
        (
            "--faults network-cut,joining-node",
            r"joining-node: the recipe has 1 node; cluster\.nodes=2 launches two here",
        ),
        ("--repeat 1000", r"more runs than the 2,000 .*smaller --repeat"),
        ("--steps 3", "--steps"),
        (
            "--mtbf 20",
            r"--mtbf: a drill no longer .*Use `--faults sigkill --repeat 20`",
        ),
        ("--for 60 --faults sigkill", r"--for: .*`python -m benchmarks\.killed_run`"),
    ],
)
def test_a_wrong_request_is_refused_before_anything_starts(
    words: str, wrong: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    given = [
        word for word in RECIPE if not words.startswith("cluster.instance") or "=cpu" not in word
    ]
    assert main(["drill", *given, *words.split()]) == 2
    assert re.search(wrong, capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_of_phases_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recipe = tmp_path / "phased.yaml"
    recipe.write_text(
        "model: {preset: llama-tiny}\nphases: [{run: {steps: 2}}, {run: {steps: 2}}]\n"
    )
    assert main(["drill", str(recipe)]) == 2
    assert "phases: a drill runs one short piece" in capsys.readouterr().err


def test_the_dry_run_lists_what_is_possible_and_why_the_rest_is_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["drill", *RECIPE, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"sigkill +rank +a rank is killed: SIGKILL to its process", out)
    assert re.search(r"lost-node +- +not possible here: the recipe has 1 node", out)


def test_faults_are_tried_once_each_in_the_order_asked() -> None:
    assert select_faults("abort,sigkill,abort", ONE_NODE, repeat=1).names == ("abort", "sigkill")
    asked = select_faults(None, replace(ONE_NODE, nodes=2), repeat=1)
    assert "node-0" in asked.names
    assert asked.impossible["agent"] == "of a run on one node; this one has 2"
    assert "--steps 500 leaves room" in asked.impossible["pulses"]
    assert "pulses" in select_faults(None, replace(ONE_NODE, steps=500), repeat=1).names


def test_a_fault_that_the_recipe_or_the_machine_does_not_allow_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = replace(ONE_NODE, nodes=2, min_nodes=2)
    names = "sigkill,joining-node,network-cut"
    monkeypatch.setattr("shardyard.drill.network._TUN", Path("/nothing/here"))
    why = select_faults(names, whole, repeat=1).impossible
    assert why["joining-node"].startswith("the run needs all 2 nodes; elastic.min_nodes")
    assert why["network-cut"].startswith("it needs networks of its own")
    for name in ("joining-node", "bad-node"):
        assert not FAULTS[name].impossible_reason(replace(whole, min_nodes=1))
    assert FAULTS["bit"].impossible_reason(whole).startswith("it is not looked for")
    asked = select_faults("bit,abort", replace(whole, checks_bits=True), repeat=1)
    assert asked.names == ("bit", "abort")
    few = asked.after_reference(replace(whole, checks_bits=True, replicas=2))
    assert few.names == ("abort",) and "it takes 3 to tell which is wrong" in few.impossible["bit"]
    assert asked.after_reference(replace(whole, checks_bits=True, replicas=4)).names == asked.names


@pytest.mark.parametrize("name", FAULTS)
def test_a_row_of_the_table_is_whole(name: str) -> None:
    fault = FAULTS[name]
    assert bool(fault.strike) != bool(fault.inside), "either from outside, or by the worker"
    assert f"`{name}`" in PAGE.read_text()
    if fault.named is None:
        return
    re.compile(fault.named.words)
    assert fault.named.who in ("", fault.acts_on)


@pytest.mark.parametrize("name", [name for name in FAULTS if FAULTS[name].inside])
def test_a_worker_understands_every_fault_that_it_is_to_make(name: str) -> None:
    fault = FAULTS[name]
    text = f"{fault.inside}@3" + ("" if fault.is_everywhere else ":1")
    struck = read_faults({FAULTS_VARIABLE: text}, rank=1)
    assert struck != read_faults({})
    assert (read_faults({FAULTS_VARIABLE: text}, rank=0) == read_faults({})) != fault.is_everywhere
    again = read_faults({FAULTS_VARIABLE: text}, rank=1, generation=1)
    assert (again == read_faults({})) != fault.is_everywhere, "a restart is not hit again"


def test_exceptions_are_raised_at_their_step_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    before_step = read_faults({FAULTS_VARIABLE: "exception@3:0"}).before_step
    before_step(2)
    with pytest.raises(RuntimeError, match="a drill raised this"):
        before_step(3)
    assert '@shardyard-fault {"kind": "exception", "step": 3' in capsys.readouterr().out
    with pytest.raises(MemoryError):
        ONCE["memory-error"]()


def test_damage_keeps_the_size_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(bytes(range(256)))
    turn_bytes(file)
    assert len(file.read_bytes()) == 256 and file.read_bytes()[:192] == bytes(range(192))
    assert file.read_bytes()[-1] == 0


def test_the_page_has_a_row_a_bar_and_what_was_wrong(tmp_path: Path) -> None:
    drill = Drill(
        drilled=ONE_NODE, folder=tmp_path, seed=0, reference=TWIN,
        impossible={"node-0": "the recipe has <1> node"},
    )  # fmt: skip
    bad = replace(KILLED, number=1, events=KILLED.events[1:])
    for facts in (KILLED, bad):
        verdict = evaluate(FAULTS["sigkill"], facts, TWIN, is_exact_requested=False)
        drill.cases.append(Case(observations=facts, result=verdict))
    page = render_drill(drill)
    assert "1 of 2" in page and "the recipe has &lt;1&gt; node" in page
    assert 'class="detect"' in page and "not noticed" in page
    assert not drill.is_good and "2 equal" in page
    (row,) = drill.to_json()["rows"]
    assert (row["cases"], row["noticed"], row["equal"], row["good"]) == (2, 1, 2, 1)
    assert row["problems"] == {"not noticed": 1}


def test_faults_are_completed_behind_a_comma() -> None:
    assert [item.value for item in faults("seg", {})] == ["segfault"]
    assert "sigkill,sigstop" in [item.value for item in faults("sigkill,sig", {})]
    assert "sigkill,sigkill" not in [item.value for item in faults("sigkill,sig", {})]


def test_a_folder_of_another_drill_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "runs").mkdir()
    assert main(["drill", *RECIPE, "--dir", str(tmp_path)]) == 2
    assert "a drill has been there" in capsys.readouterr().err


def test_without_namespaces_no_disk_is_filled_and_no_network_cut() -> None:
    asked = FaultSelection(names=("sigkill", "full-shm", "network-cut"), impossible={}, repeat=1)
    asked = asked.outside("refused")
    assert asked.names == ("sigkill",)
    assert asked.impossible == {
        "full-shm": "it needs file systems of its own: refused",
        "network-cut": "it needs networks of its own: refused",
    }
