"""Real runs by ssh on two hosts: the losses of a local job, cancelled, lost and resumed."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardyard.control.job import launched_of
from shardyard.launchers.base import JobState, JobStatus
from shardyard.rundir.jsonl import read_lines, read_steps
from shardyard.rundir.layout import RunDir
from tests.e2e.shardyard import Answer, Place, make_place, wait_for, wait_for_step
from tests.launchers.launched_script import (
    SCRIPT,
    WAIT_AT_STEP,
    assert_losses_are_those_of_plain_torch,
)
from tests.launchers.sshd_hosts import SshdHosts, sshd_hosts

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
STEPS = 12
RECIPE = f"""\
model: {{preset: llama-tiny}}
data: {{source: FOLDER/text, dir: FOLDER/prepared, vocab_size: 300, seq_len: 16, workers: 1}}
run: {{steps: {STEPS}}}
optim: {{lr: 1e-3, global_batch: 2, micro_batch: 1}}
parallel: {{strategy: FULL_SHARD}}
cluster: {{device: cpu, devices: 1, nodes: 2}}
checkpoint: {{every: 5}}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("shared")
    (folder / "text").mkdir()
    for number, source in enumerate(sorted((ROOT / "src/shardyard/io").glob("*.py"))):
        (folder / "text" / f"{number}.txt").write_text(source.read_text())
    (folder / "tiny.yaml").write_text(RECIPE.replace("FOLDER", str(folder)))
    with make_place(folder) as made:
        yield made


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory, place: Place) -> Iterator[SshdHosts]:
    folder = tmp_path_factory.mktemp("ssh")
    paths = os.pathsep.join(str(ROOT / name) for name in ("src", "."))
    with sshd_hosts(
        folder, "gpu1", "gpu2", OMP_NUM_THREADS="1", TMPDIR=str(place.scratch), PYTHONPATH=paths
    ) as running:
        text = f"launch: {{ssh: {{hosts: [gpu1, gpu2], config_file: {running.config_file}}}}}\n"
        (place.folder / "ssh.yaml").write_text(text)
        yield running


def launch(place: Place, run_id: str, *words: str) -> Answer:
    return place.run("launch", "tiny.yaml", "ssh.yaml", "--on", "ssh", "--yes", "--json",
                     f"run.id={run_id}", *words)  # fmt: skip


def status_of(place: Place, run_id: str) -> JobStatus:
    return launched_of(place.run_dir(run_id)).status()


def losses(run_dir: RunDir) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read_lines(run_dir.metrics) if "loss" in line}


def test_two_hosts_train_as_two_local_nodes_do(place: Place, hosts: SshdHosts) -> None:
    answer = launch(place, "far", "secrets.HF_TOKEN=env")
    assert answer.code == 2 and "the environment has no HF_TOKEN" in answer.err
    token = "hf_" + "Zq9" * 11 + "x"
    answer = place.run("launch", "tiny.yaml", "ssh.yaml", "--on", "ssh", "--yes", "run.id=far",
                       "secrets.HF_TOKEN=env", HF_TOKEN=token)  # fmt: skip
    assert answer.code == 0, answer.err
    watched = place.run("watch", "far")
    assert watched.code == 0, watched.err + place.run("logs", "far").out
    assert status_of(place, "far").state is JobState.SUCCEEDED
    local = place.run("launch", "tiny.yaml", "--on", "local", "--yes", "run.id=near")
    assert local.code == 0 and place.run("watch", "near").code == 0
    assert losses(place.run_dir("far")) == losses(place.run_dir("near"))
    assert len(losses(place.run_dir("far"))) == STEPS
    hosts.wait_for_no_process()
    written = [path for path in place.run_dir("far").path.rglob("*") if path.is_file()]
    assert not [path for path in written if token.encode() in path.read_bytes()]
    assert place.run("teardown", "far", "--yes").code == 0


def test_a_cancelled_run_leaves_no_process_and_resumes(place: Place, hosts: SshdHosts) -> None:
    run_dir = place.run_dir("stopped")
    assert launch(place, "stopped", "run.steps=100000").code == 0
    again = launch(place, "stopped", "run.steps=100000")
    assert again.code == 2 and "exists already" in again.err
    wait_for_step(run_dir, 3)
    refused = place.run("resume", "stopped", "--yes")
    assert refused.code == 2 and "Two at once would overwrite" in refused.err
    assert place.run("cancel", "stopped").code == 0
    assert place.run("watch", "stopped").code == 143
    hosts.wait_for_no_process()
    done = max(losses(run_dir))
    answer = place.run("resume", "stopped", "--yes", f"run.steps={done + 3}")
    assert answer.code == 0, answer.err
    assert place.run("watch", "stopped").code == 0
    assert max(losses(run_dir)) == done + 3
    hosts.wait_for_no_process()


def test_a_lost_host_is_named_and_the_run_resumes(place: Place, hosts: SshdHosts) -> None:
    run_dir = place.run_dir("lossy")
    assert launch(place, "lossy", "run.steps=100000").code == 0
    wait_for_step(run_dir, 6)
    hosts.stop("gpu2")
    status = status_of(place, "lossy")
    assert status.state is JobState.RUNNING and "gpu2 does not answer" in status.reason
    hosts.start("gpu2")
    hosts.lose("gpu2")
    cancelled = place.run("cancel", "lossy")
    assert cancelled.code == 3 and "The other hosts were asked to drain" in cancelled.err
    wait_for(lambda: status_of(place, "lossy").state.is_over)
    shown = place.run("status", "lossy").out
    assert "failed" in shown and "gpu2 does not answer" in shown
    torn = place.run("teardown", "lossy", "--yes")
    assert torn.code == 3 and "gpu2 does not answer" in torn.err
    hosts.start("gpu2")
    wait_for(lambda: not hosts.processes())
    assert place.run("resume", "lossy", "--yes", "run.steps=20").code == 0
    assert place.run("watch", "lossy").code == 0
    assert place.run("teardown", "lossy", "--yes").code == 0
    hosts.wait_for_no_process()


_FAILING = """\
#!/bin/sh
text=$(cat)
case "$SHARDYARD_TEST_HOST$text" in
*gpu2*'"question": "start"'*) echo "no room left" >&2; exit 1 ;;
esac
printf %s "$text" | exec {python} "$@"
"""


def test_an_aborted_launch_ends_what_it_started(place: Place, hosts: SshdHosts) -> None:
    python = place.folder / "python"
    python.write_text(_FAILING.format(python=sys.executable))
    python.chmod(0o755)
    answer = launch(place, "early", f"launch.ssh.python={python}")
    assert answer.code == 1 and "gpu2" in answer.err and "no room left" in answer.err
    assert not place.run_dir("early").path.exists()
    hosts.wait_for_no_process()


def test_all_that_is_wrong_with_hosts_is_named_at_once(place: Place, hosts: SshdHosts) -> None:
    config, key, known = place.folder / "config", hosts.folder / "user_key", "known_hosts"
    here = f"  HostName 127.0.0.1\n  Port {hosts.ports['gpu1']}\n  IdentitiesOnly yes\n"
    here += "  GlobalKnownHostsFile /dev/null\n"
    config.write_text(
        f"Host strange\n{here}  UserKnownHostsFile /dev/null\n  IdentityFile {key}\n"
        f"Host locked\n{here}  UserKnownHostsFile {hosts.folder / known}\n  IdentityFile /none\n"
        "Host off\n  HostName 127.0.0.1\n  Port 9\n"
    )
    answer = launch(
        place, "bad", f"launch.ssh.config_file={config}", "cluster.nodes=3", "optim.global_batch=3",
        "launch.ssh.hosts=[strange,locked,off]",
    )  # fmt: skip
    assert answer.code == 2
    assert "the hosts have 3 problems, and no node was started" in answer.err
    assert "strange is unknown to this machine's known_hosts" in answer.err
    assert "locked accepts none of your keys" in answer.err
    assert "off does not answer" in answer.err
    assert not place.run_dir("bad").path.exists()


@pytest.mark.slow
def test_hosts_run_a_script_that_is_cancelled_and_resumed(place: Place, hosts: SshdHosts) -> None:
    (place.folder / "train.py").write_text(SCRIPT)
    run_dir = place.run_dir("mine")
    answer = place.run(
        "launch", "ssh.yaml", "--on", "ssh", "--yes", "run.id=mine", "launch.code=[train.py]",
        "cluster.nodes=2", "cluster.devices=1", "cluster.device=cpu",
        "--", "python", "train.py", "2",
    )  # fmt: skip
    assert answer.code == 0, answer.err
    wait_for_step(run_dir, WAIT_AT_STEP)
    assert place.run("cancel", "mine").code == 0
    wait_for(lambda: status_of(place, "mine").state.is_over)
    assert status_of(place, "mine").state is JobState.DRAINED
    hosts.wait_for_no_process()
    (place.folder / "train.py").unlink()  # the hosts have what was launched
    answer = place.run("resume", "mine", "--yes")
    assert answer.code == 0, answer.err
    wait_for(lambda: status_of(place, "mine").state.is_over)
    assert status_of(place, "mine").state is JobState.SUCCEEDED, place.run("logs", "mine").out
    assert_losses_are_those_of_plain_torch(run_dir)
    lines = read_steps(run_dir.metrics)
    assert {(line["attempt"], line["world_size"]) for line in lines} == {(0, 2), (1, 2)}
    hosts.wait_for_no_process()
