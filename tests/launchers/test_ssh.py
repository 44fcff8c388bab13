"""The ssh launcher without a host: what it renders, rejects and asks, and what answers mean."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import shardyard
from shardyard.config.load import dump_recipe, load_recipe
from shardyard.config.rules.check import check
from shardyard.config.schema.launch import Ssh
from shardyard.config.ssh_hosts import hosts_of, parse_host
from shardyard.control.submission import with_machines
from shardyard.errors import (
    AccessError,
    CapacityError,
    RecipeError,
    RequestError,
    ShardyardError,
)
from shardyard.io.files import write_json
from shardyard.launchers.base import JobState, LaunchRequest, SideJob
from shardyard.launchers.ledger import Ledger, Submission
from shardyard.launchers.ssh.client import SSH_ERROR, SshClient, SshResult, remote_path, ssh_error
from shardyard.launchers.ssh.launcher import SshLauncher
from shardyard.launchers.ssh.node_job import state_file
from shardyard.launchers.ssh.on_host import MARK
from shardyard.rundir.layout import RunDir

HOSTS = "launch.ssh.hosts=[gpu1,me@gpu2:2222]"
OK: dict[str, Any] = {
    "version": shardyard.__version__, "host": "a", "writable": True, "others": [], "port": 20001
}  # fmt: skip


@dataclass
class FakeHosts:
    """Answers in the place of ssh: by host and question; None: the connection is refused."""

    answers: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    sees: bool = True

    def __call__(self, argv: Sequence[str], text: str, _timeout_s: float) -> SshResult:
        if "-G" in argv:
            return SshResult(exit_code=0, out=f"user me\nhostname {argv[-1]}.lab\n", err="")
        host, question = argv[-2], json.loads(text)
        self.asked.append((host, question))
        answer = self.answers.get(f"{host} {question['question']}", {})
        if answer is None:
            return SshResult(exit_code=255, out="", err=f"ssh: connect to {host}: No route to host")
        if question["question"] == "check":
            seen = Path(question["probe"]).read_text() if self.sees else None
            answer = {**OK, "seen": seen, **answer}
        return SshResult(exit_code=0, out=f"welcome\n{MARK}{json.dumps(answer)}\n", err="")

    def questions(self) -> list[str]:
        return [f"{host} {question['question']}" for host, question in self.asked]


def request_for(run_dir: Path, *overrides: str, side: SideJob | None = None) -> LaunchRequest:
    recipe = load_recipe([], ["model.preset=llama-tiny", "cluster.nodes=2", "cluster.devices=1",
                              "cluster.device=cpu", HOSTS, *overrides])  # fmt: skip
    return LaunchRequest(
        run_id=run_dir.name, recipe=recipe, recipe_text=dump_recipe(recipe),
        nodes=recipe.cluster.nodes, devices_per_node=int(recipe.cluster.devices), cluster=None,
        run_dir=str(run_dir), side=side,
    )  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "runs" / "r")
    run.path.mkdir(parents=True)
    return run


def submit(run: RunDir, hosts: FakeHosts, *overrides: str, **environ: str) -> Submission:
    launcher = SshLauncher(shell=hosts, environ=environ)
    ledger = Ledger(run.ledger)
    job = launcher.submit(launcher.render(request_for(run.path, *overrides)), ledger)
    ledger.record(job)
    return job


@pytest.mark.parametrize(
    ("text", "name", "user", "port"),
    [
        ("gpu1", "gpu1", None, None),
        ("me@gpu-2.lab:2222", "gpu-2.lab", "me", 2222),
        ("10.0.0.5", "10.0.0.5", None, None),
        ("a.b@[fd00::2]:22", "fd00::2", "a.b", 22),
    ],
)
def test_a_host_has_a_name_and_may_have_user_and_port(
    text: str, name: str, user: str | None, port: int | None
) -> None:
    host = parse_host(text)
    assert host is not None and (host.name, host.user, host.port) == (name, user, port)


ODD = ["-oProxyCommand=x", "me@-x", "a b", "a;b", "gpu1:0", "gpu1:70000", "fd00::2", "", "@a",
       "a@", "$(x)", "a'b", "ä"]  # fmt: skip


@pytest.mark.parametrize("text", ODD)
def test_another_text_is_no_host(text: str) -> None:
    assert parse_host(text) is None
    with pytest.raises(
        RecipeError, match=r"launch\.ssh\.hosts\[0\]=.* is not \[user@\]host\[:port"
    ):
        check(
            load_recipe([], ["model.preset=llama-tiny", f"launch.ssh.hosts={json.dumps([text])}"])
        )


def test_a_hostfile_is_read_as_deepspeed_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# lab\ngpu1 slots=8\n\nme@gpu2:22 slots=4 # old\ngpu3\n")
    hosts, problems = hosts_of(Ssh(hostfile=str(file)))
    assert not problems
    assert [(host.text, host.slots) for host in hosts] == [
        ("gpu1", 8), ("me@gpu2:22", 4), ("gpu3", None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("gpu1\ngpu2 max_slots=3\n", "line 2: 'gpu2 max_slots=3' is not a host and"),
        ("-oX slots=1\n", "line 1: '-oX slots=1' is not a host and"),
        ("gpu1 slots=0\n", "line 1"),
        ("# none\n", "names no host. Write one a line: gpu1."),
        ("gpu1\ngpu2\ngpu1 slots=2\n", "names gpu1 twice"),
        (None, "cannot be read: No such file or directory. Give a file with one host a line."),
    ],
)
def test_a_wrong_hostfile_is_named_with_its_line(
    tmp_path: Path, content: str | None, said: str
) -> None:
    file = tmp_path / "hosts"
    if content is not None:
        file.write_text(content)
    _, problems = hosts_of(Ssh(hostfile=str(file)))
    assert any(said in str(each) and "launch.ssh.hostfile" in str(each) for each in problems)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("launch.ssh.hosts=[a,b,a]",), "launch.ssh.hosts: names a twice"),
        ((HOSTS, "launch.ssh.hostfile=h"), "names 2 hosts too. Keep one of the two."),
        (("launch.ssh.python=-x",), "launch.ssh.python='-x' is not a path"),
        (("launch.ssh.config_file=-x",), "launch.ssh.config_file='-x' is not a path"),
        (("launch.ssh.rendezvous_host=a:1",), "launch.ssh.rendezvous_host=a:1 is not a name or an"),
    ],
)
def test_settings_that_cannot_be_used_are_rejected(overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        check(load_recipe([], ["model.preset=llama-tiny", *overrides]))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("launch.ssh.hosts=[]",), "launch.ssh.hosts: names no host. List them, rank 0 first"),
        (("cluster.nodes=3",), "cluster.nodes=3, but launch.ssh.hosts names 2 hosts: one node"),
        (("launch.ssh.hosts=[]", "launch.ssh.hostfile=HOSTS", "cluster.devices=4"),
         "cluster.devices=4, but launch.ssh.hostfile=HOSTS says b slots=2. Set cluster.devices=2"),
        (("secrets.A=k8s:a/b",), "jobs of ssh cannot read A from k8s"),
        (("cluster.capacity=spot",), "on hosts by ssh the nodes exist already"),
    ],
)  # fmt: skip
def test_what_cannot_be_launched_is_rejected(
    tmp_path: Path, overrides: tuple[str, ...], said: str
) -> None:
    file = tmp_path / "hosts"
    file.write_text("a slots=4\nb slots=2\n")
    words = [each.replace("HOSTS", str(file)) for each in overrides]
    with pytest.raises(RequestError) as caught:
        SshLauncher().render(request_for(tmp_path / "r", *words))
    assert said.replace("HOSTS", str(file)) in str(caught.value)


def test_the_request_is_shown_with_all_commands_and_no_secret(run: RunDir) -> None:
    request = request_for(
        run.path, "launch.env.NAME='two words'", "secrets.HF_TOKEN=env", "elastic.min_nodes=1",
        "launch.ssh.python=~/my venv/bin/python", "launch.ssh.hosts=[gpu1,me@gpu2:2222,gpu3]",
    )  # fmt: skip
    rendered = SshLauncher(environ={"HF_TOKEN": "hidden"}).render(request)
    assert rendered == SshLauncher().render(request)
    assert "hidden" not in rendered.text + json.dumps(rendered.objects)
    assert "export NAME='two words'" in rendered.text
    assert "-l me -p 2222 -- gpu2 " in rendered.text
    assert "BatchMode=yes" in rendered.text and "StrictHostKeyChecking" not in rendered.text
    assert "--node-rank 1 --nodes 2 --rendezvous gpu1:PORT --session SESSION" in rendered.text
    assert "--store-moves" in rendered.text  # the others continue without a lost node
    (warning,) = rendered.warnings
    assert warning == "gpu3: not used, as cluster.nodes=2. To use all hosts, set cluster.nodes=3."
    shown = rendered.text.partition("\n# JOB/recipe.yaml")[0]
    assert all(line.isprintable() for line in shown.splitlines())


def test_a_path_reaches_the_host_as_one_word() -> None:
    for path in ("/opt/a b/python", "a'b; touch x", "$(touch x)", "~/a b"):
        words = ["sh", "-c", f"printf %s {remote_path(path)}"]
        assert path[1:] in remote_path(path).replace("'", "") or "'" in path, words
    assert remote_path("~/v/python") == '"$HOME"/v/python'
    assert remote_path("a b") == "'a b'"


SSH_WORDS: list[tuple[str, type[ShardyardError], str]] = [
    ("ssh: connect to host a port 22: Connection refused", CapacityError, "gpu1 does not answer"),
    ("ssh: connect to host a port 22: No route to host", CapacityError, "runs sshd: ssh gpu1"),
    ("kex_exchange_identification: Connection closed by remote host", CapacityError, "not answer"),
    ("ssh: Could not resolve hostname a: Name or service not known", CapacityError,
     "gpu1 is no name that this machine can resolve"),
    ("No ED25519 host key is known for a and you have requested strict checking.\n"
     "Host key verification failed.", AccessError, "Connect once by hand and accept its key"),
    ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.",
     AccessError, "forget the old key: ssh-keygen -R gpu1"),
    ("me@a: Permission denied (publickey,password).", AccessError, "ssh-copy-id gpu1"),
    ("a: line 3: Bad configuration option: x\na: terminating, 1 bad configuration options",
     RequestError, "ssh rejects its configuration"),
    ("something else", ShardyardError, "does not know these words of ssh. Try by hand: ssh gpu1"),
]  # fmt: skip


@pytest.mark.parametrize(("said", "kind", "text"), SSH_WORDS)
def test_words_of_ssh_have_a_meaning_and_a_fix(
    said: str, kind: type[ShardyardError], text: str
) -> None:
    error = ssh_error("gpu1", said, said.splitlines()[-1], by_hand="gpu1")
    assert type(error) is kind and text in str(error)


@pytest.mark.parametrize(
    ("code", "said", "text"),
    [
        (127, "bash: python9: command not found", "has no Python at python9"),
        (1, "/usr/bin/python9: Error while finding module specification for 'shardyard.launchers."
         "ssh.on_host' (ModuleNotFoundError: No module named 'shardyard')", "has no Shardyard. "
         "Install it there: ssh -p 2222 me@gpu2 python9 -m pip install shardyard"),
        (1, "ModuleNotFoundError: No module named 'shardyard.launchers.ssh'", "another version"),
        (1, "Killed", "python9 failed: Killed"),
    ],
)  # fmt: skip
def test_words_of_a_host_have_a_meaning_and_a_fix(code: int, said: str, text: str) -> None:
    def shell(_argv: Sequence[str], _text: str, _timeout_s: float) -> SshResult:
        return SshResult(exit_code=code, out="", err=said)

    host = parse_host("me@gpu2:2222")
    assert host is not None
    with pytest.raises(ShardyardError) as caught:
        SshClient(python="python9", shell=shell).ask(host, "check")
    assert text in str(caught.value)


def test_a_missing_client_and_a_silent_host_are_named() -> None:
    host = parse_host("gpu1")
    assert host is not None

    def fails(error: Exception) -> Callable[[Sequence[str], str, float], SshResult]:
        def shell(_argv: Sequence[str], _text: str, _timeout_s: float) -> SshResult:
            raise error

        return shell

    with pytest.raises(RequestError, match="sudo apt-get install openssh-client"):
        SshClient(python="p", shell=fails(FileNotFoundError())).ask(host, "check")
    with pytest.raises(CapacityError, match="gpu1 gave no answer for 5 s"):
        SshClient(python="p", shell=fails(subprocess.TimeoutExpired("ssh", 5))).ask(host, "check")
    assert SSH_ERROR == 255


WRONG: list[tuple[dict[str, Any], tuple[str, ...], str]] = [
    ({"version": "0.0.1"}, (), "has Shardyard 0.0.1, and this machine"),
    ({"seen": None}, (), "does not see the run folder"),
    ({"writable": False}, (), "your user number must be the same on all hosts"),
    ({"ends_at_logout": True}, (), "Keep them: ssh -p 2222 me@gpu2 loginctl enable-linger"),
    ({"devices": 2, "device": "cuda"}, ("cluster.devices=8", "cluster.device=cuda"),
     "has 2 accelerators, and cluster.devices=8. Leave the host out, or set cluster.devices=2"),
    ({"devices": 0, "device": "cpu"}, ("cluster.device=cuda",), "cluster.device=cpu."),
    ({"devices_error": "the probe failed"}, ("cluster.device=cuda",), ": the probe failed"),
    ({"others": ["RUN/logs/job-3"]}, (), "still runs a node of this run"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "overrides", "said"), WRONG)
def test_what_a_host_lacks_is_said_before_a_node_is_started(
    run: RunDir, answer: dict[str, Any], overrides: tuple[str, ...], said: str
) -> None:
    text = json.dumps(answer).replace("RUN", str(run.path))
    hosts = FakeHosts({"gpu2 check": json.loads(text)})
    with pytest.raises(ShardyardError) as caught:
        submit(run, hosts, *overrides)
    assert "1 problem, and no node was started" in str(caught.value)
    assert said in str(caught.value)
    assert not any("start" in each for each in hosts.questions())
    assert Ledger(run.ledger).live() == []
    assert not list(run.path.glob(".ssh-check*"))


def test_a_taken_port_and_unlike_devices_are_named(run: RunDir) -> None:
    hosts = FakeHosts({
        "gpu1 check": {"port": None, "devices": 8, "device": "cuda"},
        "gpu2 check": {"devices": 8, "device": "xpu"},
    })  # fmt: skip
    with pytest.raises(ShardyardError, match="rendezvous_port=23456, and it is taken") as caught:
        submit(run, hosts, "cluster.device=auto", "launch.ssh.rendezvous_port=23456")
    assert type(caught.value) is CapacityError
    hosts.answers["gpu1 check"] = {"devices": 8, "device": "cuda"}
    with pytest.raises(RequestError, match="gpu2:2222 has xpu devices, other hosts cuda"):
        submit(run, hosts, "cluster.device=auto")


def test_hosts_that_do_not_reach_the_first_are_named(run: RunDir) -> None:
    hosts = FakeHosts({"gpu2 connect": {"error": "timed out"}})
    with pytest.raises(CapacityError) as caught:
        submit(run, hosts)
    assert "gpu2:2222 cannot reach gpu1 at gpu1.lab:20001 (timed out)" in str(caught.value)
    assert "launch.ssh.rendezvous_host=ADDRESS" in str(caught.value)


def test_silent_hosts_are_named_together(run: RunDir) -> None:
    hosts = FakeHosts({"gpu1 check": None, "gpu2 check": None})
    with pytest.raises(CapacityError, match=r"2 problems(.|\n)*gpu1 does(.|\n)*gpu2:2222 does"):
        submit(run, hosts)


def test_a_job_is_started_on_all_hosts_and_its_secrets_are_sent_on_stdin(run: RunDir) -> None:
    hosts = FakeHosts()
    with pytest.raises(RequestError, match=r"no HF_TOKEN, which a secret.*export HF_TOKEN="):
        submit(run, hosts, "secrets.HF_TOKEN=env")
    job = submit(run, hosts, "secrets.HF_TOKEN=env", HF_TOKEN="hidden")
    started = [(host, asked) for host, asked in hosts.asked if asked["question"] == "start"]
    assert sorted((host, asked["rank"]) for host, asked in started) == [("gpu1", 0), ("gpu2", 1)]
    assert all(asked["secrets"] == {"HF_TOKEN": "hidden"} for _, asked in started)
    assert job.id == job.details["session"] and job.details["hosts"] == "gpu1 me@gpu2:2222"
    content = json.loads((run.path / "logs/job-0/job.json").read_text())
    assert content["rendezvous"] == "gpu1.lab:20001"
    assert [entry.name for entry in Ledger(run.ledger).live()] == ["r/job-0"]
    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert not any(b"hidden" in path.read_bytes() for path in files)
    with pytest.raises(RequestError, match="is being trained already"):
        submit(run, FakeHosts({"gpu1 state": {"alive": True, "draining": False}}))


def test_what_an_aborted_launch_started_is_ended(run: RunDir) -> None:
    hosts = FakeHosts({"gpu2 start": {"error": "no room"}})
    with pytest.raises(ShardyardError, match="gpu2:2222 did not start: no room"):
        submit(run, hosts)
    assert {"gpu1 stop", "gpu2 stop"} <= set(hosts.questions())
    assert Ledger(run.ledger).live() == []


def test_nodes_that_an_aborted_launch_may_have_left_stay_in_the_ledger(
    run: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    hosts = FakeHosts({"gpu2 start": None, "gpu2 stop": None})
    with pytest.raises(CapacityError):
        submit(run, hosts)
    assert "End them with `shardyard teardown r --force`" in caplog.text
    assert [entry.name for entry in Ledger(run.ledger).live()] == ["r/job-0"]


def ended(run: RunDir, *codes: int | None, reason: str = "") -> None:
    for rank, code in enumerate(codes):
        if code is not None:
            content = {"pid": 7, "started": "1", "boot": "b", "exit_code": code, "reason": reason}
            write_json(state_file(run.path / "logs" / "job-0", rank), content)


ALIVE = {"alive": True, "draining": False, "written": {}}
GONE = {"alive": False, "draining": False, "written": {}}


@pytest.mark.parametrize(
    ("codes", "answers", "state", "said"),
    [
        ((None, None), (ALIVE, ALIVE), JobState.RUNNING, "preparing"),
        ((None, None), (ALIVE, None), JobState.RUNNING, "gpu2:2222 does not answer"),
        ((None, None), (ALIVE, GONE), JobState.RUNNING, "gpu2:2222 lost its node"),
        ((0, 0), (None, None), JobState.SUCCEEDED, "exit code 0"),
        ((143, 143), (None, None), JobState.DRAINED, "it was cancelled"),
        ((0, None), (None, None), JobState.FAILED, "me@gpu2:2222 does not answer"),
        ((75, None), (None, GONE), JobState.FAILED, "lost its node"),
        ((75, -9), (None, None), JobState.FAILED, "exit code 75"),
        ((None, None), ({**GONE, "written": {"exit_code": 0}}, GONE), JobState.FAILED, "lost its"),
    ],
)
def test_the_state_comes_of_files_and_answers(
    run: RunDir,
    codes: tuple[int | None, ...],
    answers: tuple[dict[str, Any] | None, ...],
    state: JobState,
    said: str,
) -> None:
    hosts = FakeHosts()
    job = submit(run, hosts)
    hosts.answers = {f"gpu{n} state": answer for n, answer in enumerate(answers, 1)}
    ended(run, *codes, reason="it was cancelled" if codes == (143, 143) else "")
    hosts.asked.clear()
    status = SshLauncher(shell=hosts).status(job)
    assert status.state is state and said in status.reason, status
    assert len(hosts.asked) == codes.count(None), "nodes that have ended are not asked about"


def test_silence_of_all_hosts_is_no_state(run: RunDir) -> None:
    hosts = FakeHosts()
    job = submit(run, hosts)
    hosts.answers = {"gpu1 state": None, "gpu2 state": None}
    with pytest.raises(CapacityError, match="gpu1 does not answer"):
        SshLauncher(shell=hosts).status(job)


def test_hosts_are_not_asked_for_a_folder_that_others_can_write(run: RunDir) -> None:
    hosts = FakeHosts()
    job = submit(run, hosts)
    run.path.chmod(0o777)
    hosts.asked.clear()
    status = SshLauncher(shell=hosts).status(job)
    assert status.state is JobState.RUNNING and "its hosts were not asked" in status.reason
    assert not hosts.asked


def test_a_cancel_asks_hosts_and_leaves_a_file_for_silent_ones(run: RunDir) -> None:
    hosts = FakeHosts()
    job = submit(run, hosts)
    hosts.answers = {"gpu2 stop": None}
    with pytest.raises(CapacityError, match="The other hosts were asked to drain"):
        SshLauncher(shell=hosts).cancel(job)
    assert (run.path / "logs/job-0/stop").is_file()


def test_a_teardown_keeps_the_line_of_a_silent_host(run: RunDir) -> None:
    hosts = FakeHosts()
    job, ledger = submit(run, hosts), Ledger(run.ledger)
    hosts.answers = {"gpu2 stop": None}
    with pytest.raises(CapacityError) as caught:
        SshLauncher(shell=hosts).remove(job, ledger)
    line = str(caught.value).rpartition("has ended: ")[2]
    assert len(ledger.live()) == 1
    assert line == f"echo '{{\"exit_code\": 1}}' | tee {run.path}/logs/job-0/node-1.json"
    ended(run, None, 1)
    hosts.answers = {"gpu1 stop": {"found": False}}
    assert SshLauncher(shell=hosts).remove(job, ledger).removed == []
    assert ledger.live() == []


def test_a_side_job_takes_the_first_host(run: RunDir) -> None:
    side = SideJob(kind="prepare", arguments={})
    launcher = SshLauncher(shell=FakeHosts())
    rendered = launcher.render(request_for(run.path, "launch.side.cpus=2", side=side))
    assert rendered.objects[0]["hosts"] == ["gpu1"]
    assert "shardyard.node.side_job JOB/recipe.yaml" in rendered.text
    assert "launch.side.cpus: not used by ssh" in rendered.warnings[0]


def test_doctor_names_each_host(run: RunDir) -> None:
    hosts = FakeHosts({"gpu1 check": {"devices": 8, "device": "cuda"},
                       "gpu2 check": {"devices": 4, "device": "cuda"}})  # fmt: skip
    launcher = SshLauncher(shell=hosts)
    found = launcher.checks(request_for(run.path, "cluster.device=cuda", "cluster.devices=8"))
    verdicts = {each.name: (each.verdict, each.what) for each in found}
    assert verdicts["gpu1"] == ("ok", f"a, Shardyard {shardyard.__version__}, 8 x cuda")
    assert verdicts["me@gpu2:2222"][0] == "problem"
    assert list(run.path.parent.iterdir()) == [run.path]


def test_an_image_is_not_used(run: RunDir) -> None:
    rendered = SshLauncher().render(request_for(run.path, "launch.image=a@sha256:b"))
    assert "launch.image=a@sha256:b is not used by ssh" in rendered.warnings[0]
    assert sys.executable in rendered.text


@pytest.mark.parametrize(
    ("overrides", "known"),
    [
        ((), ["cluster.nodes=2", "cluster.devices=2"]),
        (("cluster.nodes=1",), ["cluster.devices=4"]),
        (("cluster.nodes=2", "cluster.devices=1"), []),
        (("cluster.instance=p5.48xlarge",), ["cluster.nodes=2"]),
        (("launch.ssh.hosts=[c]",), []),
    ],
)
def test_hosts_and_slots_say_what_a_recipe_leaves_open(
    tmp_path: Path, overrides: tuple[str, ...], known: list[str]
) -> None:
    file = tmp_path / "hosts"
    file.write_text("a slots=4\nb slots=2\n")
    words = ["model.preset=llama-tiny", f"launch.ssh.hostfile={file}", *overrides]
    if "launch.ssh.hosts=[c]" in overrides:  # no slots
        words.remove(f"launch.ssh.hostfile={file}")
        known = ["cluster.nodes=1"]
    assert SshLauncher().machine_settings(load_recipe([], words)) == known
    assert with_machines(words, SshLauncher()) == [*words, *known]


def test_jobs_are_found_on_their_hosts_without_a_folder() -> None:
    jobs = [{"folder": "/runs/r/logs/job-0", "session": "job-0-0a0a0a0a", "pid": 7}]
    hosts = FakeHosts({"gpu1 jobs": {"jobs": jobs}, "gpu2 jobs": {"jobs": jobs}})
    (found,) = SshLauncher(shell=hosts).find(load_recipe([], [HOSTS]))
    assert (found.id, found.run_id, found.where) == ("job-0-0a0a0a0a", "r", "/runs/r")
    assert found.end == "ssh gpu1 kill 7; ssh -p 2222 me@gpu2 kill 7"
    with pytest.raises(RecipeError, match="names no host"):
        SshLauncher(shell=hosts).find(load_recipe([], []))
    hosts.answers["gpu2 jobs"] = None
    with pytest.raises(CapacityError, match="gpu2:2222 does not answer"):
        SshLauncher(shell=hosts).find(load_recipe([], [HOSTS]))
