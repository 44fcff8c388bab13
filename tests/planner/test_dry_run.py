"""The dry run is asked for in a process; whatever goes wrong there is one clear message."""

import json
import sys
import time
from typing import Any

import pytest

from shardyard.config.layout import Layout
from shardyard.config.schema.recipe import Recipe
from shardyard.errors import RecipeError, RequestError, ShardyardError
from shardyard.families.shape import ModelShape
from shardyard.planner.dry_run import DryRun, OnPhase, dry_run
from tests.planner.recipes import resolved_recipe, shape_of

SIXTEEN = Layout(dp_replicate=1, dp_shard=16, zero=3)


def moment(phase: str, **terms: int) -> dict[str, Any]:
    total = sum(terms.values())
    return {
        "phase": phase, "micro_batch": 1, "operator": "aten::mm", "bytes": total, "terms": terms,
    }  # fmt: skip


ANSWER = {
    "moments": [moment("forward", activations=5), moment("backward", activations=5, temporary=2)],
    "attention": "flash",
    "micro_batches": 1,
    "seconds": 0.5,
    "torch": "2.13.0",
}


def ask(
    code: str,
    *,
    recipe: Recipe | None = None,
    shape: ModelShape | None = None,
    layout: Layout = SIXTEEN,
    told: OnPhase | None = None,
) -> DryRun:
    """A dry run that a line of Python answers instead of the model."""
    return dry_run(
        recipe or resolved_recipe(),
        shape or shape_of("llama2-7b"),
        layout,
        on_phase=told,
        program=[sys.executable, "-c", code],
    )


@pytest.mark.heavy
def test_the_peak_is_the_moment_that_holds_most() -> None:
    answer = ask(f"print('a warning'); print('''{json.dumps(ANSWER)}''')")
    assert (answer.peak.phase, answer.peak.bytes) == ("backward", 7)
    assert answer.attention == "flash"


@pytest.mark.heavy
def test_the_program_is_told_recipe_shape_and_layout() -> None:
    code = (
        "import json, sys; asked = json.load(sys.stdin); "
        f"answer = json.loads('''{json.dumps(ANSWER)}'''); "
        "answer['attention'] = [asked['recipe']['data']['seq_len'], "
        "asked['shape']['num_hidden_layers'], asked['layout']['dp_shard']]; "
        "print(json.dumps(answer))"
    )
    assert ask(code).attention == [4096, 32, 16]  # type: ignore[comparison-overlap]


@pytest.mark.heavy
def test_a_refusal_of_the_training_half_is_passed_on_as_it_is() -> None:
    code = "import sys; print('no block has a module named x', file=sys.stderr); sys.exit(2)"
    with pytest.raises(RequestError, match=r"^no block has a module named x$"):
        ask(code)


@pytest.mark.heavy
def test_a_crash_is_named_with_its_last_line() -> None:
    code = "import sys; print('out of luck', file=sys.stderr); sys.exit(3)"
    with pytest.raises(ShardyardError, match=r"exit code 3: out of luck\. .* is valid without"):
        ask(code)


@pytest.mark.heavy
@pytest.mark.parametrize("code", ["pass", "print('hello')", "print('{}')"])
def test_an_answer_that_describes_no_memory_is_refused(code: str) -> None:
    with pytest.raises(ShardyardError, match="did not answer with a description of memory"):
        ask(code)


@pytest.mark.heavy
def test_phases_are_told_as_they_begin_and_are_not_the_answer() -> None:
    told: list[tuple[str, int, int]] = []
    phases = [{"phase": f"phase {n}", "done": n, "of": 2} for n in range(2)]
    lines = "; ".join(f"print('''{json.dumps(line)}''')" for line in [*phases, ANSWER])
    answer = ask(lines, told=lambda *phase: told.append(phase))
    assert answer.peak.bytes == 7
    assert told == [("starting torch", 0, 0), ("phase 0", 0, 2), ("phase 1", 1, 2)]


@pytest.mark.heavy
def test_a_program_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardyard.planner.dry_run._TIMEOUT_S", 0.5)
    with pytest.raises(ShardyardError, match=r"gave no answer in .* is valid without"):
        ask("import time; time.sleep(60)")


@pytest.mark.heavy
def test_ctrl_c_leaves_no_program_behind() -> None:
    def interrupt(_phase: str, _done: int, of: int) -> None:
        if of:
            raise KeyboardInterrupt

    code = """import json, time; print(json.dumps({"phase": "x", "done": 0, "of": 1}), flush=True)
time.sleep(60)"""
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        ask(code, told=interrupt)
    assert time.monotonic() - began < 30


def test_a_pipeline_is_refused_because_fake_ranks_send_nothing() -> None:
    layout = Layout(dp_replicate=1, dp_shard=8, pp=2, zero=3)
    with pytest.raises(RecipeError, match=r"parallel\.pp=2: a stage waits .* have no other ranks"):
        ask("raise SystemExit(9)", layout=layout)


def test_offload_is_refused_because_fake_devices_have_one_memory() -> None:
    recipe = resolved_recipe(memory={"offload": "activations"})
    with pytest.raises(RecipeError, match=r"memory\.offload=activations: .* Use none for a dry"):
        ask("raise SystemExit(9)", recipe=recipe)


def test_a_compiled_model_is_refused_because_fused_memory_is_not_seen() -> None:
    recipe = resolved_recipe(model={"compile": True})
    with pytest.raises(RecipeError, match=r"model\.compile=true: .* Use false for a dry run"):
        ask("raise SystemExit(9)", recipe=recipe)
