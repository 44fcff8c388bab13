"""Every row of the table happens: exit code, words, and nothing left that no ledger names.

docs/errors.md shows the whole messages of some. When one changes, record them anew:
``SHARDYARD_RECORD_MESSAGES=1 python -m pytest tests/launchers/test_wrong_situations.py``, then
``make docs``.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from docs.generate.errors import MESSAGES, SHOWN, message_of
from docs.generate.pages import DOCS, made
from tests.hub import running_hub
from tests.launchers.batch_endpoint import batch_endpoint
from tests.launchers.batch_server import BatchServer
from tests.launchers.kubernetes.api_server import TOKEN, running_server
from tests.launchers.wrong_adopt import AdoptDesk
from tests.launchers.wrong_anywhere import AnyDesk
from tests.launchers.wrong_aws_batch import BatchDesk
from tests.launchers.wrong_batch_queue import QueueDesk
from tests.launchers.wrong_bench import BenchDesk
from tests.launchers.wrong_cluster import ClusterDesk
from tests.launchers.wrong_compare import CompareDesk
from tests.launchers.wrong_hub import HubDesk
from tests.launchers.wrong_import import ImportDesk
from tests.launchers.wrong_kubernetes import KubernetesDesk
from tests.launchers.wrong_monitoring import MonitoringDesk
from tests.launchers.wrong_paths import PathsDesk
from tests.launchers.wrong_prices import PricesDesk
from tests.launchers.wrong_profile import ProfileDesk
from tests.launchers.wrong_situations import Desk, Situation, all_situations
from tests.launchers.wrong_slurm import SlurmDesk
from tests.launchers.wrong_study import StudyDesk

ROWS = list(all_situations())
DESKS: dict[str, type[Desk]] = {
    "any launcher": AnyDesk,
    "Hugging Face hub": HubDesk,
    "paths, of any launcher": PathsDesk,
    "slurm": SlurmDesk,
    "kubernetes": KubernetesDesk,
    "doctor --install monitoring, cloudwatch": MonitoringDesk,
    "aws-batch": BatchDesk,
    "prices and bills": PricesDesk,
    "bench network": BenchDesk,
    "study": StudyDesk,
    "compare": CompareDesk,
    "profile": ProfileDesk,
    "cluster, kind=batch": QueueDesk,
    "cluster": ClusterDesk,
    "cluster adopt, and the cluster that is meant": AdoptDesk,
    "import": ImportDesk,
}


@pytest.fixture
def ask_moto(request: pytest.FixtureRequest) -> Callable[[], BatchServer]:
    """Started when it is first asked for: that takes seconds."""
    return lambda: request.getfixturevalue("moto")


@pytest.fixture
def desks(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ask_moto: Callable[[], BatchServer],
) -> Iterator[Callable[[str], Desk]]:
    """Makes a desk, with the servers that it needs."""
    monkeypatch.chdir(tmp_path)
    with ExitStack() as stack:

        def make(launcher: str) -> Desk:
            desk = DESKS[launcher](tmp_path, monkeypatch, capsys)
            if isinstance(desk, KubernetesDesk):
                pytest.importorskip("kubernetes", reason="needs shardyard[kubernetes]")
                desk.connect(*stack.enter_context(running_server(tmp_path)))
            if isinstance(desk, HubDesk):
                desk.connect(stack.enter_context(running_hub()))
                stack.callback(desk.close)
            if isinstance(desk, BatchDesk):
                pytest.importorskip("boto3", reason="needs shardyard[aws]")
                desk.connect(stack.enter_context(batch_endpoint()), ask_moto)
            if isinstance(desk, ClusterDesk):
                pytest.importorskip("moto", reason="needs moto")
                from tests.cluster.clients import playing_aws

                stack.enter_context(playing_aws())
            if isinstance(desk, QueueDesk):
                stack.enter_context(pytest.importorskip("moto").mock_aws())
                desk.connect()
            if isinstance(desk, AdoptDesk):
                pytest.importorskip("moto")
                desk.connect(stack)
            return desk

        yield make


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("launcher", "row"), ROWS, ids=[f"{launcher}: {row.what}" for launcher, row in ROWS]
)
def test_it_is_told_what_and_what_to_do_and_nothing_is_left(
    launcher: str, row: Situation, desks: Callable[[str], Desk]
) -> None:
    desk = desks(launcher)
    code = row.happen(desk)
    said = " ".join(desk.said.split())
    assert row.says in said
    assert row.do in said
    assert code == row.exit_code, said
    assert "This is a bug of shardyard" not in said and "Traceback" not in said
    assert TOKEN not in said  # of the kubeconfig
    if any((launcher, row.what) in rows for rows in SHOWN.values()):
        assert message_of(desk.said, desk.folder) == recorded(launcher, row.what, desk)
    assert desk.outside() - desk.in_ledgers() == set()


def recorded(launcher: str, what: str, desk: Desk) -> str:
    """Message that docs/errors.md shows; with SHARDYARD_RECORD_MESSAGES set, that of this run."""
    messages = json.loads(MESSAGES.read_text()) if MESSAGES.exists() else {}
    if "SHARDYARD_RECORD_MESSAGES" in os.environ:
        messages.setdefault(launcher, {})[what] = message_of(desk.said, desk.folder)
        MESSAGES.write_text(json.dumps(messages, indent=1, sort_keys=True) + "\n")
    return str(messages.get(launcher, {}).get(what))


def test_the_page_shows_situations_of_the_table_and_no_others_are_recorded() -> None:
    shown = {row for rows in SHOWN.values() for row in rows}
    messages = json.loads(MESSAGES.read_text())
    recorded = {(launcher, what) for launcher, rows in messages.items() for what in rows}
    assert shown == recorded
    assert shown <= {(launcher, row.what) for launcher, row in ROWS}


def test_every_situation_is_there_once() -> None:
    assert len(ROWS) >= 40
    names = Counter((launcher, row.what) for launcher, row in ROWS)
    assert max(names.values()) == 1


def test_every_exit_code_is_designed_and_met() -> None:
    assert {row.exit_code for _, row in ROWS} == {0, 1, 2, 3, 4, 130, 143}


def test_the_page_is_current() -> None:
    assert (DOCS / "errors.md").read_text() == made("errors.md"), "run: make docs"
