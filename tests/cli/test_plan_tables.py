"""What the tables of `shardyard plan` say, on a terminal and of a dry run."""

import re
import subprocess
import sys
from dataclasses import replace

import pytest

from shardyard.cli import main
from shardyard.config.schema.recipe import Parallel
from shardyard.planner.dry_run import DryRun, PhasePeak
from shardyard.planner.format import settings_of
from shardyard.planner.layouts import Candidate, search
from shardyard.planner.plan import Plan, plan_recipe
from shardyard.report.plan.offers import dry_run_section
from shardyard.report.terminal import show
from tests.planner.recipes import resolved_recipe, shape_of
from tests.planner.workloads import layout, p5, workload

IN_A_TERMINAL = """
import os, pty, sys
command = [sys.executable, "-m", "shardyard", *sys.argv[1:]]
sys.exit(os.waitstatus_to_exitcode(pty.spawn(command)))
"""
RENTED = ("model.preset=llama2-7b", "cluster.instance=p5.48xlarge", "run.steps=500")


def screen(columns: int, *words: str) -> list[str]:
    """Lines that a terminal so wide shows, without colours."""
    done = subprocess.run(
        [sys.executable, "-c", IN_A_TERMINAL, *words],
        env={"COLUMNS": str(columns), "LINES": "50", "TERM": "xterm", "NO_COLOR": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    text = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", done.stdout)
    return [line.rstrip() for line in text.splitlines()]


def planned() -> Plan:
    recipe = resolved_recipe(cluster={"nodes": 2, "instance": "p5.48xlarge"})
    return plan_recipe(
        recipe, shape=shape_of("llama2-7b"), steps=500, world_size=16, devices_per_node=8,
        machine=None,
    )  # fmt: skip


@pytest.mark.heavy
@pytest.mark.parametrize("columns", [80, 120])
def test_a_terminal_shows_whole_words_and_few_lines(columns: int) -> None:
    lines = screen(columns, "plan", *RENTED, "cluster.nodes=2", "optim.micro_batch=1")
    is_setting = [line.startswith("  parallel.") for line in lines]
    assert all(
        len(line) <= columns for line, is_one in zip(lines, is_setting, strict=True) if not is_one
    )
    headline = lines[: lines.index("", 2)]
    assert headline[0].startswith("plan: llama2-7b 6.74 B parameters, FULL_SHARD over 16 x H100")
    assert len(headline) <= 12, "ten seconds of reading"
    words = [line.split()[0] for line in headline[2:] if line[:1].strip()]
    assert words == ["memory", "speed", "MFU", "time", "price", "failures"]
    (head,) = [line for line in lines if line.startswith("tokens/s")]
    rows = lines[lines.index(head) + 1 :]
    assert rows.index("") <= 9, "three layouts, each of at most three lines"
    for broken in ("micro-\n", "tokens/\n"):
        assert broken not in "\n".join(lines)


@pytest.mark.heavy
def test_a_narrow_terminal_has_the_settings_of_levers_in_a_table_of_their_own() -> None:
    lines = screen(80, "plan", *RENTED, "optim.micro_batch=1", "--layouts=0", "--details")
    place = next(number for number, line in enumerate(lines) if line.startswith("lever "))
    numbers = lines[place : lines.index("", place)]
    assert numbers[0].split() == ["lever", "device", "fits", "step", "tokens/s", "price"]
    assert all(line.split()[-1].startswith("$") for line in numbers[1:]), "a line each"
    settings = lines[lines.index("", place) + 1 :]
    assert settings[0].split() == ["lever", "settings"]
    assert any(line.endswith(" memory.recompute=full") for line in settings)


def test_a_dry_run_stands_beside_the_arithmetic(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned()
    terms = {term.name: term.bytes for term in plan.memory} | {"temporary": 2**30}
    dry = DryRun(
        moments=(
            PhasePeak(phase="forward", micro_batch=1, operator="aten::mm", bytes=1, terms={}),
            PhasePeak(
                phase="backward", micro_batch=2, operator="aten::_log_softmax",
                bytes=round(plan.memory_bytes / 1.02), terms=terms,
            ),
        ),
        attention="flash", micro_batches=2, seconds=1.0, torch="2.13.0",
    )  # fmt: skip
    show([dry_run_section(plan, dry)])
    text = capsys.readouterr().out
    assert "(torch 2.13.0, flash attention): most in the backward, at aten::_log_softmax" in text
    assert "The plan is +2.0% off." in text
    assert re.search(r"parameters +1\.6 GiB +1\.6 GiB", text)
    assert re.search(r"temporary +0 B +1\.0 GiB", text)


def best() -> Candidate:
    asked = workload("llama2-7b", global_batch=64, dp_shard=16)
    return search(asked, p5(2), best=1).best[0]


@pytest.mark.parametrize(
    ("asked", "settings"),
    [
        (Parallel(), "parallel.zero=1 parallel.dp_shard=4 parallel.tp=2 "),
        (Parallel(tp=8, pp=2), "parallel.zero=1 parallel.dp_shard=4 parallel.tp=2 parallel.pp=1 "),
        (
            Parallel(strategy="HYBRID_SHARD", dp_replicate=8),
            "parallel.strategy=null parallel.dp_replicate=2 parallel.zero=1 parallel.dp_shard=4 ",
        ),
    ],
)
def test_settings_override_what_the_recipe_says_of_the_axes(asked: Parallel, settings: str) -> None:
    degrees = layout(dp_replicate=2, dp_shard=4, tp=2, zero=1)
    candidate = replace(best(), layout=degrees, micro_batch=4, recompute="selective")
    text = " ".join(settings_of(candidate, asked))
    assert text.startswith(settings)
    assert text.endswith("optim.micro_batch=4 memory.recompute=selective")


def test_settings_name_the_exchange_that_the_search_looked_at() -> None:
    candidate = replace(best(), layout=layout(cp=2))
    asked = Parallel(cp=4, cp_exchange="heads")
    exchange = "parallel.cp_exchange=keys_values"
    assert exchange in settings_of(candidate, asked)
    assert exchange not in settings_of(candidate, Parallel(cp=4))
    assert exchange not in settings_of(best(), asked)


@pytest.mark.slow
def test_the_real_model_stands_beside_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["model.preset=llama-tiny", "cluster.instance=p5.48xlarge", "optim.micro_batch=2"]
    assert main(["plan", *arguments, "--dry-run-model"]) == 0
    text = capsys.readouterr().out
    assert "The real model, built and stepped without a device (torch " in text
    found = re.search(r"The plan is ([+-]\d+\.\d)% off", text)
    assert found
    assert abs(float(found.group(1))) < 15
