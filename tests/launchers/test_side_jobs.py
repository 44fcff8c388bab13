"""Side jobs of every launcher: one node, no accelerators, names and lines of their own."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from shardyard.errors import RequestError, StorageError
from shardyard.launchers.aws_batch.launcher import BatchLauncher
from shardyard.launchers.base import SIDE_KINDS, Launcher, LaunchRequest, SideJob
from shardyard.launchers.kubernetes.launcher import KubernetesLauncher
from shardyard.launchers.kubernetes.names import LONGEST
from shardyard.launchers.ledger import SIDE_DETAIL, Ledger, Submission
from shardyard.launchers.local import LocalLauncher
from shardyard.launchers.local_job import JobFile
from shardyard.launchers.log_markers import mark, parse, rebuild
from shardyard.launchers.slurm.launcher import SlurmLauncher
from tests.launchers.batch_requests import batch_request
from tests.launchers.kubernetes.requests import request_for
from tests.launchers.slurm_request import slurm_request

EXPORT = SideJob(kind="export", arguments={"step": 7})
DEVICE_WORDS = (
    "gpus-per-node", "nvidia.com/gpu:", "vpc.amazonaws.com/efa", "instance-type", "hugepages",
    "GPU", "infiniband", "instanceType", "--exclusive", "IPC_LOCK",
)  # fmt: skip
NONCE = "0123456789abcdef"

FAR: list[tuple[Launcher, LaunchRequest]] = [
    (SlurmLauncher(), slurm_request("cluster.instance=p5.48xlarge")),
    (BatchLauncher(), batch_request("cluster.instance=p5.48xlarge", "cluster.nodes=2")),
    (KubernetesLauncher(), request_for("cluster.instance=p5.48xlarge")),
]
ALL: list[tuple[Launcher, LaunchRequest]] = [(LocalLauncher(), slurm_request()), *FAR]


def side_of(request: LaunchRequest, side: SideJob = EXPORT, **changes: object) -> LaunchRequest:
    changed = {"nodes": 1, "devices_per_node": 1, "cluster": None, "side": side, **changes}
    return replace(request, **changed)  # type: ignore[arg-type]


@pytest.mark.parametrize(("launcher", "training"), ALL)
def test_a_side_job_runs_its_own_program_and_is_marked_as_one(
    launcher: Launcher, training: LaunchRequest
) -> None:
    text, side_text = (launcher.render(each).text for each in (training, side_of(training)))
    assert "--side" in side_text and "--place" not in side_text
    assert "--side" not in text and "--place" in text
    assert launcher.render(training).side == {}
    assert launcher.render(side_of(training)).side == {SIDE_DETAIL: EXPORT.label}


@pytest.mark.parametrize(("launcher", "training"), FAR)
def test_no_word_of_accelerators_or_their_network_is_in_a_side_job(
    launcher: Launcher, training: LaunchRequest
) -> None:
    def words_in(request: LaunchRequest) -> set[str]:
        rendered = launcher.render(request)
        text = rendered.text.replace(request.recipe_text, "")
        text = re.sub(r"^options='.*", "", text, flags=re.MULTILINE)  # of srun, to be unset
        return {word for word in DEVICE_WORDS if word in text}

    assert len(words_in(training)) >= 2, "the training has what is looked for"
    assert words_in(side_of(training)) == set()


@pytest.mark.parametrize(("launcher", "training"), FAR)
def test_no_two_jobs_of_a_run_have_one_name(launcher: Launcher, training: LaunchRequest) -> None:
    others = (
        SideJob(kind="export", arguments={"step": 8}),
        *(SideJob(kind=kind) for kind in SIDE_KINDS),
    )
    requests = [
        training,
        side_of(training),
        side_of(training, submission=2),
        *(side_of(training, side) for side in others),
    ]
    names = [launcher.render(each).name for each in requests]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(("launcher", "training"), FAR)
def test_a_run_whose_training_could_be_submitted_has_no_name_too_long_for_a_side_job(
    launcher: Launcher, training: LaunchRequest
) -> None:
    longest = "a" * 53  # of a JobSet with 2 nodes
    others = [replace(training, run_id=f"{longest[:-1]}{last}") for last in "bc"]
    names = [launcher.render(side_of(each)).name for each in others]
    assert len(set(names)) == 2
    if launcher.name == "kubernetes":
        assert max(map(len, names)) + len("-abcde") <= LONGEST


def test_a_job_on_this_machine_is_told_no_place_and_is_never_started_again() -> None:
    (content,) = LocalLauncher().render(side_of(slurm_request())).objects
    job = JobFile(**content)
    assert (job.nodes, job.max_restarts, job.is_side) == (1, 0, True)
    assert "--node-rank" not in LocalLauncher().render(side_of(slurm_request())).text


def test_a_size_that_this_machine_does_not_hold_it_to_is_told() -> None:
    sized = slurm_request("launch.side.memory_gib=4")
    (warning,) = LocalLauncher().render(side_of(sized)).warnings
    assert warning.startswith("launch.side.memory_gib: not used for side jobs on local")
    assert LocalLauncher().render(sized).warnings == ()
    assert LocalLauncher().render(side_of(slurm_request())).warnings == ()


def test_the_label_is_that_of_the_arguments_whatever_their_order() -> None:
    one = SideJob(kind="fetch", arguments={"a": 1, "b": [2]})
    other = SideJob(kind="fetch", arguments={"b": [2], "a": 1})
    assert one.label == other.label
    assert SideJob.from_text(one.to_text()) == one
    assert one.label != replace(one, kind="export").label
    assert one.label != replace(one, arguments={}).label


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", '{"kind": "dance", "arguments": {}}', '{"kind": "export", "arguments": 1}'],
)
def test_what_is_no_side_job_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match=r"not a side job of this version of Shardyard: prepare"):
        SideJob.from_text(text)


def job_with(**details: str) -> Submission:
    return Submission(launcher="other", run_id="r", id="7", name="n", details=details)


def test_a_training_is_no_side_job_and_a_side_job_no_training(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for details in ({}, {SIDE_DETAIL: EXPORT.label}, {SIDE_DETAIL: "fetch-0123456789ab"}):
        ledger.record(job_with(**details))
    assert [job.details for job in ledger.jobs()] == [{}]
    assert len(ledger.side_jobs()) == 2
    assert [job.details for job in ledger.side_jobs(EXPORT.label)] == [{SIDE_DETAIL: EXPORT.label}]


@pytest.mark.parametrize("label", ["export", "../../x-0123456789ab", "export-0123456789ab/.."])
def test_a_label_that_no_side_job_has_is_refused(tmp_path: Path, label: str) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    details = {"folder": str(tmp_path), "nodes": "1", SIDE_DETAIL: label}
    ledger.record(Submission(launcher="slurm", run_id="r", id="7", name="n", details=details))
    with pytest.raises(StorageError, match=r"details\.side=.* is not what slurm calls a job"):
        ledger.side_jobs()


def test_an_answer_is_read_from_a_log_and_stands_in_no_file_of_the_run(tmp_path: Path) -> None:
    content = {"side": EXPORT.label, "exit_code": 0, "result": {"files": 3}}
    line = f"prefix {mark('answer', content, nonce=NONCE)}"
    found = parse(line, nonce=NONCE)
    assert found is not None and (found.kind, found.content) == ("answer", content)
    assert parse(line, nonce="another") is None
    assert rebuild([line], tmp_path, nonce=NONCE) == 0
    assert json.loads(line.partition(" {")[2].join(["{", ""]))["answer"] == content
