"""The launching verbs as a user types them, on this machine, from launch to tear-down."""

import signal

from tests.e2e.shardyard import Answer, Place, wait_for_step

ENDLESS = ("run.steps=1000000", "checkpoint.every=1000000", "task.eval_every_steps=null")


def test_a_run_is_launched_watched_listed_and_removed_with_the_losses_of_train(
    place: Place, base: Answer
) -> None:
    launched = place.run(
        "launch", "tiny.yaml", "--on", "local", "--yes", "--json", "run.id=far",
        "task.generate_tokens=4",
    )  # fmt: skip
    assert launched.code == 0, launched.err
    assert "plan: llama-tiny" in launched.err
    watched = place.run("watch", "far")
    assert watched.code == 0, watched.err
    assert "step 24/24" in watched.out and "shardyard report" in watched.err
    status = place.run("status", "fa", "--json").json
    assert (status["state"], status["exit_code"]) == ("succeeded", 0)
    assert (status["job_id"], status["run"]["step"]) == (launched.json["job_id"], 24)
    assert status["run"]["loss"] == base.json["loss"], "bit-equal to train"
    assert place.run("logs", "far").out == watched.out
    row = next(row for row in place.run("runs", "--json").json if row["id"] == "far")
    assert (row["state"], row["job"]["launcher"]) == ("finished", "local")
    assert "over already" in place.run("cancel", "far").out
    assert place.run("launch", "tiny.yaml", "--on", "local", "--yes", "run.id=far").code == 2
    removed = place.run("teardown", "far", "--yes", "--json").json
    assert removed["left"] == []
    assert "all objects of run far are removed" in place.run("teardown", "far").out


def test_a_run_goes_on_after_ctrl_c_is_cancelled_and_is_submitted_again(
    place: Place, prepared: Answer
) -> None:
    assert prepared.code == 0
    run_dir = place.run_dir("again")
    given = ("launch", "tiny.yaml", "--on", "local", "--yes", "run.id=again", *ENDLESS)
    assert place.run(*given).code == 0
    with place.start("watch", "again") as watching:
        wait_for_step(run_dir, 2)
        watching.send(signal.SIGINT)
        left = watching.wait()
    assert left.code == 130 and "the job continues" in left.err
    running = place.run("status", "again", "--json").json
    assert running["state"] == "running"
    refused = place.run("resume", "again", "--yes")
    assert refused.code == 2 and "Two at once" in refused.err
    assert place.run("cancel", "again").code == 0
    ended = place.run("watch", "again")
    assert ended.code == 143 and "shardyard resume again" in ended.err
    done = run_dir.checkpoint_steps()[-1]
    resumed = place.run("resume", "again", "--yes", "--follow", f"run.steps={done + 3}")
    assert resumed.code == 0, resumed.err
    assert f"continuing from step {done}" in resumed.out
    assert run_dir.checkpoint_steps()[-1] == done + 3
