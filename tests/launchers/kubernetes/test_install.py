"""What a cluster lacks is shown, asked for, put there and removed again, through the command line.

kubectl and helm are small programs that write down how they were called: no release can be fetched
here.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardyard.config.endpoints import service_name
from shardyard.config.load import load_recipe
from shardyard.launchers.kubernetes.etcd import IMAGE, render_etcd
from tests.launchers.kubernetes.api_server import write_kubeconfig
from tests.launchers.kubernetes.conftest import Site, rented
from tests.launchers.kubernetes.schemas import check_builtin

pytest.importorskip("kubernetes", reason="the Kubernetes client is an extra")

JOBSET = "https://github.com/kubernetes-sigs/jobset/releases/download/v0.12.0/manifests.yaml"
ETCD = ("launch.kubernetes.target=pytorchjob", "launch.kubernetes.etcd=etcd:2379")


def test_a_dry_run_prints_the_commands_and_changes_nothing(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.server.served.discard("jobsets")
    assert site.doctor("--install", "--dry-run") == 0
    said = capsys.readouterr()
    assert said.out == f"kubectl apply --server-side -f {JOBSET} --context test\n"
    assert "missing: JobSet 0.12.0: runs launch.kubernetes.target=jobset" in said.err
    assert site.calls() == [] and not site.runs.exists()


@pytest.mark.parametrize(
    ("context", "why"),
    [("test", "does not answer"), ("nowhere", "has no such context"), ("null", "is not given")],
)
def test_install_dry_run_needs_no_live_cluster(
    context: str, why: str, site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.kubeconfig = write_kubeconfig(site.runs.parent, port=1)
    words = (f"launch.kubernetes.context={context}", "launch.kubernetes.queue=team")
    assert site.doctor("--install", "--dry-run", *words) == 0
    said = capsys.readouterr()
    name = "CONTEXT" if context == "null" else context
    kueue = "https://github.com/kubernetes-sigs/kueue/releases/download/v0.19.2/manifests.yaml"
    assert said.out.splitlines() == [
        f"kubectl apply --server-side -f {url} --context {name}" for url in (JOBSET, kueue)
    ]
    assert "warning: what the target has already is unknown" in said.err and why in said.err
    assert site.doctor("--install", "--yes", *words) in (2, 3)
    assert site.calls() == [] and list(site.runs.glob("installed*")) == []


def test_without_a_terminal_and_without_yes_nothing_is_installed(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.server.served.discard("jobsets")
    assert site.doctor("--install") == 2
    assert "this is not a terminal" in capsys.readouterr().err
    assert site.calls() == []


@pytest.mark.heavy
def test_a_release_is_applied_at_its_pinned_version_and_removed_again(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    before = site.kubeconfig.read_bytes()
    site.server.served.discard("jobsets")
    assert site.doctor("--install", "--yes") == 0
    assert "installed: JobSet 0.12.0" in capsys.readouterr().out
    place = f"--context test --kubeconfig {site.kubeconfig}"
    assert site.calls() == [f"kubectl apply --server-side -f {JOBSET} {place}"]
    assert site.ledger() == ["intended release JobSet 0.12.0", "created release JobSet 0.12.0"]
    site.server.served.add("jobsets")
    assert site.doctor("--install", "--yes") == 0
    assert "all that can be installed is there" in capsys.readouterr().err
    assert site.doctor("--uninstall", "--dry-run") == 0
    assert site.doctor("--uninstall", "--yes") == 0
    assert site.calls()[1:] == [f"kubectl delete --ignore-not-found -f {JOBSET} {place}"]
    assert site.ledger()[-1] == "removed release JobSet 0.12.0"
    assert site.doctor("--uninstall", "--yes") == 0
    assert site.kubeconfig.read_bytes() == before and len(site.calls()) == 2


@pytest.mark.heavy
def test_what_jobs_need_is_not_removed(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.server.served.discard("jobsets")
    site.doctor("--install", "--yes")
    site.server.served.add("jobsets")
    site.server.add(
        "/apis/jobset.x-k8s.io/v1alpha2/namespaces/team/jobsets/theirs",
        metadata={"namespace": "team"},
    )
    assert site.doctor("--uninstall", "--yes") == 2
    assert "has 1 JobSet (team/theirs), which would be deleted with it" in capsys.readouterr().err
    assert len(site.calls()) == 1


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("refusal", "code", "words"),
    [
        ("Error from server (Forbidden): cannot patch", 4, "administrator"),
        ("Unable to connect to the server: dial tcp", 3, "reaches the cluster"),
        ("error: no matches for kind X", 1, "install again"),
    ],
)
def test_a_command_that_fails_stands_in_the_ledger(
    site: Site,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    refusal: str,
    code: int,
    words: str,
) -> None:
    site.server.served.discard("jobsets")
    monkeypatch.setenv("REFUSAL", refusal)
    assert site.doctor("--install", "--yes") == code
    said = capsys.readouterr().err
    assert refusal in said and words in said
    assert site.ledger() == ["intended release JobSet 0.12.0"]


def test_a_missing_program_is_named_before_anything_is_done(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site.server.served.discard("jobsets")
    monkeypatch.setenv("PATH", str(site.programs / "none"))
    assert site.doctor("--install", "--yes") == 2
    assert "kubectl is not installed here" in capsys.readouterr().err
    assert not (site.runs / "installed-kubernetes-test.jsonl").exists()


@pytest.mark.heavy
def test_our_own_etcd_goes_through_the_api_and_comes_back_out(site: Site) -> None:
    assert site.doctor("--install", "--yes", *ETCD) == 0
    assert site.calls() == []
    container = site.server.only("deployments")["spec"]["template"]["spec"]["containers"][0]
    assert container["image"] == IMAGE and container["command"][0] == "etcd"
    assert site.server.names("services") == ["etcd"]
    assert site.ledger()[1::2] == [
        "created Secret etcd-tls", "created NetworkPolicy etcd", "created Service etcd",
        "created Deployment etcd",
    ]  # fmt: skip
    key = site.server.only("secrets")["data"]["tls.key"]
    rest = [item for item in site.server.objects.values() if item["kind"] != "Secret"]
    assert key not in json.dumps(rest) and key not in "".join(site.ledger())
    assert site.doctor("--uninstall", "--yes", *ETCD) == 0
    assert site.server.objects == {}


def test_a_dry_run_names_the_secret_of_etcd_and_makes_no_key(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    assert site.doctor("--install", "--dry-run", *ETCD) == 0
    said = capsys.readouterr().out
    assert "# Secret etcd-tls: made at the installation" in said
    assert "PRIVATE KEY" not in said and "tls.key:" not in said
    assert all(item["kind"] != "Secret" for item in yaml.safe_load_all(said))


@pytest.mark.heavy
def test_an_etcd_of_somebody_else_is_left_alone(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.server.add("/apis/apps/v1/namespaces/default/deployments/etcd")
    assert site.doctor("--install", "--yes", *ETCD) == 2
    assert "It was not made by us" in capsys.readouterr().err
    assert site.doctor("--uninstall", "--yes", *ETCD) == 0
    assert site.server.names("services") == [] and site.server.names("deployments") == ["etcd"]


@pytest.mark.heavy
def test_device_plugins_are_installed_where_no_node_offers_devices(site: Site) -> None:
    assert site.doctor("--install", "--yes", *rented()) == 0
    nvidia, efa = site.calls()
    assert "v0.20.0/deployments/static/nvidia-device-plugin.yml --context test" in nvidia
    chart = "helm upgrade --install aws-efa-k8s-device-plugin aws-efa-k8s-device-plugin --repo"
    assert efa.startswith(chart) and "--version 0.5.30" in efa and "--kube-context test" in efa


def test_a_plugin_that_is_there_gets_none_beside_it(site: Site) -> None:
    container = {"image": "nvcr.io/nvidia/k8s-device-plugin:v0.17.1"}
    spec = {"template": {"spec": {"containers": [container]}}}
    site.server.add("/apis/apps/v1/namespaces/kube-system/daemonsets/nvidia", spec=spec)
    site.server.add(
        "/api/v1/nodes/n0",
        metadata={"labels": {"node.kubernetes.io/instance-type": "p5.48xlarge"}},
        status={"allocatable": {"vpc.amazonaws.com/efa": "4"}},
    )
    assert site.doctor("--install", "--yes", *rented()) == 0
    assert site.calls() == []


@pytest.mark.heavy
def test_trainer_brings_jobset_unless_there_is_one(site: Site) -> None:
    site.server.served = {"jobsets"}
    target = "launch.kubernetes.target=trainjob"
    assert site.doctor("--install", "--yes", target) == 0
    assert "--set jobset.install=false" in site.calls()[0]


def test_the_driver_of_a_claim_is_installed(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.server.add(
        "/api/v1/namespaces/default/persistentvolumeclaims/runs",
        spec={"storageClassName": "fsx", "accessModes": ["ReadWriteMany"]},
    )
    where = "/apis/storage.k8s.io/v1/storageclasses/fsx"
    site.server.add(where, provisioner="fsx.csi.aws.com")
    assert site.doctor("--install", "--dry-run", "--json") == 0
    (missing,) = json.loads(capsys.readouterr().out)["missing"]
    assert missing["name"] == "FSx for Lustre driver 1.9.0"
    assert "stable?ref=v1.9.0" in missing["text"]


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("etcd:2379", "etcd"),
        ("etcd.default:2379", "etcd"),
        ("etcd.default.svc.cluster.local:2379", "etcd"),
        ("etcd.infra:2379", None),
        ("10.0.0.7:2379", None),
    ],
)
def test_only_an_address_of_our_namespace_is_ours_to_make(address: str, name: str | None) -> None:
    words = ["launch.kubernetes.target=pytorchjob", f"launch.kubernetes.etcd={address}"]
    assert service_name(load_recipe([], words).launch.kubernetes) == name


def test_the_etcd_is_accepted_by_the_schema() -> None:
    objects: tuple[dict[str, Any], ...] = render_etcd(load_recipe([], ETCD).launch.kubernetes)
    for item in objects:
        check_builtin(item)
    assert yaml.safe_load(yaml.safe_dump(objects[1]))["spec"]["ports"][0]["port"] == 2379


def forge(site: Site, changes: dict[str, str]) -> Path:
    """Change the details of the one release that the ledger lists."""
    ledger = site.runs / "installed-kubernetes-test.jsonl"
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    for line in lines:
        line["details"] |= changes
    ledger.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return ledger


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"url": "https://evil.example/everything.yaml"}, 4),
        ({"how": "chart", "chart": "kube-prometheus", "chart_namespace": "monitoring"}, 4),
        ({"version": "0.11.0"}, 4),
        ({"context": "production"}, 4),
        ({"provides": ""}, 4),
        ({"url": "--all"}, 1),
        ({"context": "--kubeconfig=/x"}, 1),
    ],
)
def test_a_release_that_a_forged_line_names_is_not_removed(
    site: Site, capsys: pytest.CaptureFixture[str], changes: dict[str, str], code: int
) -> None:
    site.server.served.discard("jobsets")
    assert site.doctor("--install", "--yes") == 0
    forge(site, changes)
    assert site.doctor("--uninstall", "--yes") == code
    said = capsys.readouterr().err
    assert "not one that Shardyard installs" in said or "is not a line of a ledger" in said
    assert len(site.calls()) == 1


@pytest.mark.heavy
def test_what_was_installed_is_not_removed_where_others_may_write_the_ledger(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.server.served.discard("jobsets")
    assert site.doctor("--install", "--yes") == 0
    (site.runs / "installed-kubernetes-test.jsonl").chmod(0o664)
    assert site.doctor("--uninstall", "--yes") == 4
    assert "chmod go-w" in capsys.readouterr().err and len(site.calls()) == 1
    assert site.doctor("--uninstall", "--yes", "--trust-folder") == 0


@pytest.mark.heavy
def test_an_etcd_that_was_made_again_by_others_stays(site: Site) -> None:
    assert site.doctor("--install", "--yes", *ETCD) == 0
    for item in site.server.objects.values():
        item["metadata"]["uid"] = "11111111-2222-3333-4444-555555555555"
    before = dict(site.server.objects)
    assert site.doctor("--uninstall", "--yes", *ETCD) == 0
    assert site.server.objects == before
