"""What becomes of other programs' environment variables."""

import gzip
import re
from pathlib import Path

import pytest

from shardyard.cli import main
from shardyard.errors import RequestError
from shardyard.foreign_variables import (
    SRUN_DEFAULTS,
    TABLE,
    for_slurm_client,
    is_in_group,
    not_for_sbatch,
    reject_cluster_override,
    reject_multi_process_start,
    remove_for_agent,
)

PAGE = Path(__file__).parents[1] / "docs" / "variables.md"


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}, "srun --ntasks=1"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "without that"),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}, "without mpirun"),
        ({"PMI_SIZE": "4", "PMI_RANK": "3"}, "without mpirun"),
        ({"JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_RANK": "1"}, "without jsrun"),
    ],
)
def test_one_of_several_starts_is_rejected_by_name(environ: dict[str, str], words: str) -> None:
    with pytest.raises(RequestError) as caught:
        reject_multi_process_start("train", environ)
    assert words in str(caught.value)
    assert all(f"{name}={value}" in str(caught.value) for name, value in environ.items())


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # srun --pty
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"},  # a batch script
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"WORLD_SIZE": "8"},
        {"RANK": "0", "WORLD_SIZE": "auto"},
    ],
)
def test_a_single_start_is_taken(environ: dict[str, str]) -> None:
    reject_multi_process_start("train", environ)


@pytest.mark.parametrize("verb", ["train", "resume", "launch", "study", "drill", "bench", "scale"])
def test_every_verb_that_starts_something_asks(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([verb, "r"]) == 2
    assert f"starts `shardyard {verb}` 2 times" in capsys.readouterr().err


def test_clients_of_slurm_get_its_address_and_none_of_its_options() -> None:
    kept = {"SLURM_CONF": "/c", "SLURM_JWT": "t", "PATH": "/bin", "HF_TOKEN": "x"}
    options = ("SBATCH_PARTITION", "SLURM_MEM_PER_NODE", "SQUEUE_FORMAT", "SLURM_TIME_FORMAT")
    assert for_slurm_client({**kept, **dict.fromkeys(options, "1")}) == kept


def _variables_of(client: str) -> set[str]:
    """Those that Slurm's own manual says a client reads."""
    page = Path(f"/usr/share/man/man1/{client}.1.gz")
    if not page.is_file():
        pytest.skip("the manual of Slurm is not installed")
    text = gzip.decompress(page.read_bytes()).decode()
    (_, *sections) = re.split(r'^\.SH "', text, flags=re.MULTILINE)
    (read,) = [each for each in sections if re.match(r"(INPUT )?ENVIRONMENT VARIABLES", each)]
    return set(re.findall(r"^\\fB(S[A-Z]+_[A-Z0-9_]+)", read, re.MULTILINE))


@pytest.mark.parametrize(
    "client", ["sbatch", "srun", "squeue", "sacct", "scancel", "scontrol", "sinfo"]
)
def test_no_option_of_a_client_that_its_manual_names_reaches_it(client: str) -> None:
    named = _variables_of(client)
    assert len(named) > 4
    assert set(for_slurm_client(dict.fromkeys(named, "1"))) <= {"SLURM_CONF", "SLURMD_DEBUG"}


def test_a_job_unsets_each_option_of_srun_that_slurm_does_not_set_for_it() -> None:
    of_the_job = {
        "SLURM_CONF", "SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_JOB_NUM_NODES", "SLURM_NNODES",
        "SLURM_NPROCS", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_GPUS",
        "SLURM_GPUS_PER_NODE", "SLURM_NETWORK", "SLURM_UMASK",
    }  # fmt: skip
    of_messages = {
        "SLURM_PMI_KVS_NO_DUP_KEYS", "SLURM_STEP_KILLED_MSG_NODE_ID",
        "SLURM_SRUN_REDUCE_TASK_EXIT_MSG",
    }  # fmt: skip
    named = _variables_of("srun") | _variables_of("scancel") | _variables_of("scontrol")
    kept = {name for name in named if not is_in_group(SRUN_DEFAULTS, name)}
    assert kept <= of_the_job | of_messages | {
        "SLURM_BITSTR_LEN", "SLURM_CONF_OUT", "SLURM_TOPO_LEN",  # of what scontrol prints
    }  # fmt: skip


@pytest.mark.parametrize("name", ["SLURM_CLUSTERS", "SBATCH_CLUSTERS"])
def test_another_cluster_than_the_configured_one_is_rejected_by_name(name: str) -> None:
    reject_cluster_override({name: "", "SLURM_CLUSTER_NAME": "here"})
    with pytest.raises(RequestError, match=f"{name}=far of this shell.*unset {name}; export SLURM"):
        reject_cluster_override({name: "far"})


def test_an_option_of_sbatch_in_the_shell_is_named_with_the_setting_for_it() -> None:
    told = not_for_sbatch({"SBATCH_PARTITION": "debug", "SBATCH_OUTPUT": "/x", "HOME": "/"})
    assert told is not None and "launch.slurm.partition=debug" in told
    assert "SBATCH_OUTPUT=/x" in told and not_for_sbatch({"HOME": "/"}) is None


def test_the_agent_keeps_only_what_is_not_for_torchs_own() -> None:
    environ = {
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_LOG_LEVEL": "INFO",
        "ACCELERATE_USE_FSDP": "true", "PET_NNODES": "2", "NCCL_DEBUG": "INFO",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "1", "TORCH_LOGS": "all",
    }  # fmt: skip
    remove_for_agent(environ)
    assert set(environ) == {"TORCHELASTIC_LOG_LEVEL", "NCCL_DEBUG", "TORCH_LOGS"}


def test_the_page_has_the_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for row in TABLE:
        assert f"| {row.display} | {row.does} | {row.fate}: {row.handling} |" in page
