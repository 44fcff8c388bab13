"""`shardyard fetch --via s3://...`: the nodes send, this machine takes, both by digests."""

from functools import partial
from pathlib import Path

import pytest

from shardyard.io.digests import COMPLETE
from shardyard.node.side_job import SideWork
from shardyard.node.side_jobs import serve
from shardyard.rundir.layout import RunDir
from shardyard.transfer.download import RemoteListing, read_listing
from tests.cli.test_fetch import Site, list_in_process
from tests.launchers.batch_server import BatchServer

pytestmark = pytest.mark.heavy

pytest.importorskip("boto3", reason="boto3 is an extra")
pytest.importorskip("moto", reason="moto is for development")

pytestmark = pytest.mark.heavy

Captured = pytest.CaptureFixture[str]
VIA = ("--via", "s3://models/runs/first")


def listed(run: RunDir, step: str) -> RemoteListing:
    return read_listing(list_in_process([str(run.path), "--step", step]).decode().splitlines())


@pytest.fixture
def site(
    moto: BatchServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> Site:
    moto.reset()
    for name, value in moto.environ.items():
        monkeypatch.setenv(name, value)
    moto.client("s3").create_bucket(Bucket="models")
    made = Site(tmp_path)

    def work(asked: SideWork) -> dict[str, object]:
        return partial(serve, listed=listed)(asked)

    made.far.works["fetch"] = work
    capsys.readouterr()
    return made


def test_files_come_through_a_bucket_and_are_brought_up_to_date(
    site: Site, moto: BatchServer, capsys: Captured
) -> None:
    assert site.fetch(*VIA) == 0
    assert "checkpoint of step 4; " in capsys.readouterr().out
    for name in ("weights.bin", "manifest.json"):
        wanted = (site.there.checkpoint(4) / name).read_bytes()
        assert (site.here.checkpoint(4) / name).read_bytes() == wanted
    assert site.here.latest.read_text() == "step-00000004\n"
    assert not (site.here.path / COMPLETE).exists()
    (site.there.path / "logs" / "attempt-0" / "rank-0.log").write_text("said\nmore\n")
    assert site.fetch(*VIA, "--all") == 0
    assert site.here.checkpoint_steps() == [2, 4]
    log = site.here.path / "logs" / "attempt-0" / "rank-0.log"
    assert log.read_text() == "said\nmore\n"
    keys = moto.client("s3").list_objects_v2(Bucket="models")["Contents"]
    assert all(each["Key"].startswith("runs/first/") for each in keys)


def test_a_bucket_that_is_not_there_is_told_and_nothing_is_written(
    site: Site, capsys: Captured
) -> None:
    assert site.fetch("--via", "s3://nobodys/x") == 2
    assert "bucket 'nobodys' does not exist" in capsys.readouterr().err
    assert not site.here.report_html.exists()


def test_files_of_another_run_are_not_taken_for_this_ones(
    site: Site, moto: BatchServer, capsys: Captured
) -> None:
    text = '{"format": 1, "made_of": {"run": "other"}, "files": {}}'
    moto.client("s3").put_object(
        Bucket="models", Key="runs/first/complete.json", Body=text.encode()
    )
    assert site.fetch(*VIA) == 2
    assert "holds something else already" in capsys.readouterr().err
