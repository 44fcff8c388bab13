"""A run that fails tells the address that its recipe names by a secret."""

import os
import signal

from tests.control.receiver import receiver
from tests.e2e.shardyard import Answer, Place, events, wait_for_step


def test_a_run_whose_rank_is_killed_tells_so(place: Place, base: Answer) -> None:
    assert base.code == 0
    run_dir = place.run_dir("alarmed")
    with receiver() as found:
        (place.folder / "alerts.yaml").write_text(
            "secrets: {OWN: env:OWN_ADDRESS}\nobserve: {alerts: [{when: [failed], webhook: OWN}]}\n"
        )
        os.environ["OWN_ADDRESS"] = found.address
        try:
            words = ("train", "tiny.yaml", "alerts.yaml", "run.id=alarmed", "run.steps=1000000")
            with place.start(*words, "elastic.max_restarts=0") as running:
                wait_for_step(run_dir, 3)
                os.kill(events(run_dir, "attempt_started")[0]["workers"][1]["pid"], signal.SIGKILL)
                assert running.wait().code == 1
        finally:
            del os.environ["OWN_ADDRESS"]
    (told,) = found.came
    assert told["text"].startswith("alarmed: failed: ") and "rank 1" in told["text"]
    files = [path for path in run_dir.path.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if b"token-that-nobody-sees" in path.read_bytes()]
