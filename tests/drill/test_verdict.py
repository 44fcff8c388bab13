"""The judgement of a case, from facts made by hand: no run is started."""

from dataclasses import replace
from typing import Any

import pytest

from shardyard.drill.faults import FAULTS
from shardyard.drill.observations import BitDiff, CommandExit, Leftovers, RunObservations
from shardyard.drill.verdict import CaseResult, compare, evaluate


def event(t: float, kind: str, generation: int = 0, **fields: Any) -> dict[str, Any]:
    return {"t": t, "kind": kind, "attempt": 0, "generation": generation, **fields}


FINISHED = event(20.0, "run_finished", 1)
LOST = event(
    10.5, "worker_lost", rank=1, node="here", signal="SIGKILL", cause="was killed by SIGKILL"
)
TWIN = RunObservations(
    fault="twin", number=0, seed=0, rank=0, node=0, asked_step=5, struck_t=None,
    events=(FINISHED,), losses={1: 3.0, 2: 2.5, 3: 2.25}, worlds=dict.fromkeys((1, 2, 3), 2),
    samples={0: 7, 1: 3}, digests={"rank-0.safetensors": "ab"}, last_checkpoint=3,
)  # fmt: skip
KILLED = replace(
    TWIN, fault="sigkill", rank=1, struck_t=10.0, steps_again=1,
    events=(
        LOST,
        event(11.75, "rendezvous", 1, seconds=0.25),
        event(12.0, "checkpoint_loaded", 1, seconds=0.5, step=2),
        event(12.75, "model_ready", 1),
        event(13.0, "first_step", 1, step=3),
        FINISHED,
    ),
)  # fmt: skip


EQUAL = BitDiff(outcome="equal", why="3 steps and all tensors of step 3")
DIFFERENT = BitDiff(
    outcome="different", why="step 3; model.a of step 3, written by rank 1", step=3,
    tensor="model.a", rank=1,
)  # fmt: skip


def judged(
    facts: RunObservations, fault: str = "sigkill", *, is_exact_asked: bool = False
) -> CaseResult:
    return evaluate(FAULTS[fault], facts, TWIN, is_exact_requested=is_exact_asked)


def test_a_fault_that_was_noticed_named_and_mended_is_good() -> None:
    verdict = judged(KILLED)
    assert verdict.is_good and verdict.is_noticed and verdict.is_cause_right
    assert (verdict.noticed_s, verdict.exact, verdict.steps_lost) == (0.5, "equal", 1)
    assert verdict.phases == {
        "detect": 0.5, "restart": 1.0, "rendezvous": 0.25, "init": 0.5, "load": 0.5,
        "first step": 0.25,
    }  # fmt: skip
    assert verdict.next_step_s == 13.0 - 10.0


@pytest.mark.parametrize(
    "other",
    [
        {**LOST, "rank": 0},
        {**LOST, "cause": "SystemError: something else", "signal": None},
        {**LOST, "kind": "worker_hung"},
    ],
)
def test_another_rank_or_another_cause_is_not_right(other: dict[str, Any]) -> None:
    verdict = judged(replace(KILLED, events=(other, *KILLED.events[1:])))
    assert verdict.is_noticed and not verdict.is_cause_right
    assert verdict.problems == ("another cause was named",)


def test_a_healthy_rank_that_is_named_too_makes_the_cause_wrong() -> None:
    verdict = judged(replace(KILLED, events=({**LOST, "rank": 0}, *KILLED.events)))
    assert not verdict.is_cause_right


def test_what_was_said_before_the_fault_is_no_notice_of_it() -> None:
    early = {**LOST, "t": 9.0}
    verdict = judged(replace(KILLED, events=(early, *KILLED.events[1:])))
    assert not verdict.is_noticed and "not noticed" in verdict.problems
    assert verdict.noticed_s is None


def test_a_run_that_the_drill_had_to_end_has_noticed_nothing() -> None:
    given_up = "no progress for 60 s: the drill ended the run"
    ended = CommandExit(
        command="shardyard train",
        t=80.0,
        exit_code=1,
        last_words="the agent of r ended with SIGKILL",
    )
    killed = replace(ended, exit_code=-9)
    facts = replace(KILLED, fault="agent", events=(), given_up=given_up, ends=(killed,))
    verdict = judged(facts, "agent")
    assert verdict.problems == ("not noticed", given_up)
    assert verdict.exact == "not proven" and "ended at step 3 of 3" in verdict.why
    noticed = judged(replace(facts, ends=(ended,), events=(FINISHED,)), "agent")
    assert (noticed.noticed_s, noticed.is_cause_right) == (70.0, True)


def test_a_fault_that_never_struck_proves_nothing() -> None:
    verdict = judged(replace(KILLED, struck_t=None, missed="rank 1 had ended"))
    assert verdict.problems == ("it never struck: rank 1 had ended",)
    assert not verdict.is_noticed and not verdict.is_cause_right


def test_nothing_need_be_said_of_lost_power_but_no_other_loss_may_be() -> None:
    facts = replace(KILLED, fault="power", events=KILLED.events[1:])
    assert judged(facts, "power").is_good
    assert not judged(replace(facts, events=KILLED.events), "power").is_cause_right


def test_a_lost_node_is_named_by_its_number() -> None:
    lost = event(10.5, "node_lost", node="here", node_rank=1, ranks=[1], cause="silent")
    facts = replace(KILLED, fault="lost-node", node=1, events=(lost, *KILLED.events[1:]))
    assert judged(facts, "lost-node").is_cause_right
    assert not judged(replace(facts, node=0), "lost-node").is_cause_right


def test_the_first_tensor_that_differs_is_told_with_its_rank() -> None:
    facts = replace(KILLED, digests={"rank-0.safetensors": "cd"}, bits=DIFFERENT)
    verdict = judged(facts)
    assert verdict.differs == {"step": 3, "rank": 1, "tensor": "model.a"}
    assert verdict.problems == (f"different: {DIFFERENT.why}",)
    assert judged(KILLED).differs is None


def test_a_clock_that_was_moved_back_hides_no_loss() -> None:
    lost = {**LOST, "t": LOST["t"] - 3600.0}
    facts = replace(KILLED, fault="clock-step", events=(lost, FINISHED))
    assert judged(facts, "clock-step").problems == ("a loss was reported, but none happened",)
    assert judged(replace(facts, events=(FINISHED,)), "clock-step").is_good


def test_what_is_left_over_is_a_problem_and_named() -> None:
    left = Leftovers(processes=("7: sleep",), shared_memory=("sem.mp-a", "sem.mp-b"))
    assert judged(replace(KILLED, left=left)).problems == (
        "left over: 1 processes, 2 shared memory",
    )


@pytest.mark.parametrize(
    ("changed", "outcome"),
    [
        ({}, ("equal", "losses, samples, weights and states of the optimizer")),
        ({"losses": {1: 3.0, 2: 2.5000001, 3: 2.25}}, ("different", "losses from step 2 on")),
        ({"samples": {0: 7, 1: 4}}, ("different", "samples from position 1 on")),
        ({"samples": {0: 7, 1: 3, 2: 9}}, ("different", "samples more than the twin's")),
        (
            {"digests": {"rank-0.safetensors": "cd"}},
            ("not proven", "the last checkpoints were not compared"),
        ),
        (
            {"digests": {"rank-0.safetensors": "cd"}, "bits": DIFFERENT},
            ("different", "step 3; model.a of step 3, written by rank 1"),
        ),
        (
            {"digests": {"rank-0.safetensors": "cd"}, "bits": EQUAL},
            ("equal", "losses, samples, and 3 steps and all tensors of step 3"),
        ),
        (
            {"losses": {1: 3.0, 2: 2.4, 3: 2.25}, "bits": DIFFERENT},
            ("different", "losses from step 2 on; step 3; model.a of step 3, written by rank 1"),
        ),
        ({"digests": {}}, ("not proven", "no last checkpoint to compare")),
        ({"last_checkpoint": 2}, ("not proven", "no last checkpoint to compare")),
        ({"events": (LOST,)}, ("not proven", "the run ended at step 3 of 3")),
    ],
)
def test_the_three_outcomes(changed: dict[str, Any], outcome: tuple[str, str]) -> None:
    assert compare(replace(KILLED, **changed), TWIN, is_exact_requested=False) == outcome


def test_other_ranks_prove_nothing_unless_the_recipe_is_exact() -> None:
    resized = replace(KILLED, worlds={1: 2, 2: 1, 3: 1}, losses={1: 3.0, 2: 2.51, 3: 2.25})
    outcome, why = compare(resized, TWIN, is_exact_requested=False)
    assert outcome == "not proven" and "1 ranks instead of 2 from step 2 on" in why
    assert compare(resized, TWIN, is_exact_requested=True) == ("different", "losses from step 2 on")
    before = replace(resized, losses={1: 3.5, 2: 2.51, 3: 2.25})
    assert compare(before, TWIN, is_exact_requested=False)[0] == "different"
    assert judged(resized, is_exact_asked=False).is_good
