"""Wrong situations on AWS Batch: moto, and for what it cannot do an endpoint that fails as told."""

import socket
from collections.abc import Callable

from shardyard.launchers.aws_batch.launcher import BatchLauncher
from tests.launchers.batch_endpoint import HANG_UP, Endpoint
from tests.launchers.batch_requests import SETTINGS
from tests.launchers.batch_server import BatchServer
from tests.launchers.wrong_situations import Desk, Situations

SITUATIONS = Situations("aws-batch")
row = SITUATIONS.row

_DENIED = (403, "AccessDeniedException")
_THROTTLED = (429, "TooManyRequestsException")


class BatchDesk(Desk):
    """Credentials of an account, and one region of it."""

    on = "aws-batch"
    recipe = (
        "model.preset=llama-tiny", "data.source=/runs/text", "run.steps=10",
        "optim.global_batch=16", "cluster.instance=p4d.24xlarge", "cluster.nodes=2", *SETTINGS,
    )  # fmt: skip
    endpoint: Endpoint
    ask_moto: Callable[[], BatchServer]

    def connect(self, endpoint: Endpoint, ask_moto: Callable[[], BatchServer]) -> None:
        """Know both servers; moto is started when it is first asked for."""
        self.endpoint, self.ask_moto = endpoint, ask_moto
        self.launchers = {"aws-batch": BatchLauncher(sleep=lambda _: None)}
        for name in ("AWS_PROFILE", "AWS_DEFAULT_REGION", "AWS_REGION", "AWS_SESSION_TOKEN"):
            self.environ.delenv(name, raising=False)
        for name, value in {
            "AWS_ENDPOINT_URL": endpoint.url,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_CONFIG_FILE": str(self.folder / "none"),
            "AWS_SHARED_CREDENTIALS_FILE": str(self.folder / "none"),
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_MAX_ATTEMPTS": "1",
        }.items():
            self.environ.setenv(name, value)

    def moto(self) -> BatchServer:
        """Speak to moto from now on; it is empty."""
        server = self.ask_moto()
        server.reset()
        self.environ.setenv("AWS_ENDPOINT_URL", server.url)
        return server

    def fails(self, call: str, *failures: tuple[int, str]) -> int:
        """Launch where a call fails."""
        self.endpoint.failures[call] = list(failures)
        return self.launch()

    def outside(self) -> set[str]:
        made = self.endpoint.made()
        return {kind for kind, count in made.items() if count > 0}


@row("region not known", 2, says="launch.aws_batch.region is not given", do="such as us-east-1")
def _(desk: BatchDesk) -> int:
    return desk.launch("launch.aws_batch.region=null")


@row(
    "queue not given", 2, says="launch.aws_batch.queue is not given", do="docs/launch-aws-batch.md"
)
def _(desk: BatchDesk) -> int:
    return desk.launch("launch.aws_batch.queue=null")


@row("queue missing", 2, says="'trainers' does not exist in us-east-1. There is others", do="Name")
def _(desk: BatchDesk) -> int:
    desk.moto().make_queue("others")
    return desk.launch()


@row("queue disabled", 2, says="'trainers' is disabled", do="update-job-queue --state ENABLED")
def _(desk: BatchDesk) -> int:
    desk.moto().make_queue("trainers", state="DISABLED")
    return desk.launch()


@row("queue too small", 3, says="has at most 96 vCPUs", do="Raise maxvCpus")
def _(desk: BatchDesk) -> int:
    desk.moto().make_queue("trainers", max_vcpus=96)
    return desk.launch()


@row("queue with other instances", 2, says="has p4d.24xlarge, not p5.48xlarge", do="shows how to")
def _(desk: BatchDesk) -> int:
    desk.moto().make_queue("trainers")
    return desk.launch("cluster.instance=p5.48xlarge")


@row("no credentials", 4, says="Unable to locate credentials", do="aws sso login")
def _(desk: BatchDesk) -> int:
    desk.environ.delenv("AWS_ACCESS_KEY_ID")
    desk.environ.delenv("AWS_SECRET_ACCESS_KEY")
    return desk.launch()


@row("credentials expired", 4, says="ExpiredTokenException", do="aws sso login")
def _(desk: BatchDesk) -> int:
    return desk.fails("describejobqueues", (403, "ExpiredTokenException"))


@row("unknown profile", 2, says="nobody", do="aws configure list-profiles")
def _(desk: BatchDesk) -> int:
    desk.environ.setenv("AWS_PROFILE", "nobody")
    return desk.launch()


@row(
    "no right to register", 4, says="lack the right to RegisterJobDefinition", do="the policy that"
)
def _(desk: BatchDesk) -> int:
    return desk.fails("registerjobdefinition", _DENIED)


@row("no right to submit", 4, says="lack the right to SubmitJob", do="the policy that is needed")
def _(desk: BatchDesk) -> int:
    return desk.fails("submitjob", _DENIED)


@row(
    "no right to submit, nor to take back",
    4,
    says="what was created before this is listed in",
    do="`shardyard teardown",
)
def _(desk: BatchDesk) -> int:
    desk.endpoint.failures["deregisterjobdefinition"] = [_DENIED]
    return desk.fails("submitjob", _DENIED)


@row("definition refused", 2, says="ClientException", do="Correct that and ask again")
def _(desk: BatchDesk) -> int:
    return desk.fails("registerjobdefinition", (400, "ClientException"))


@row("AWS throttles", 3, says="AWS throttled", do="Wait a minute")
def _(desk: BatchDesk) -> int:
    return desk.fails("submitjob", *[_THROTTLED] * 9)


@row("answer lost while it is submitted", 3, says="AWS may have done it all the same", do="Look")
def _(desk: BatchDesk) -> int:
    return desk.fails("submitjob", HANG_UP)


@row("AWS itself fails", 3, says="AWS itself failed", do="Look before you ask again")
def _(desk: BatchDesk) -> int:
    return desk.fails("submitjob", (500, "ServerException"))


@row(
    "endpoint that nobody serves",
    3,
    says=("No request was sent"),
    do="Check the name of the region",
)
def _(desk: BatchDesk) -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    desk.environ.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    return desk.launch()


@row("image not given", 2, says="launch.image: is not set", do="`shardyard image build`")
def _(desk: BatchDesk) -> int:
    return desk.launch("launch.image=null")


@row("secret without a role to read it", 2, says="execution_role", do="secrets")
def _(desk: BatchDesk) -> int:
    secret = "secrets.HF_TOKEN=aws-sm:arn:aws:secretsmanager:us-east-1:123456789012:secret:a"
    return desk.launch("launch.aws_batch.execution_role=null", secret)


@row("range of nodes", 2, says="elastic", do="cluster.nodes")
def _(desk: BatchDesk) -> int:
    return desk.launch("elastic.min_nodes=1", "elastic.max_nodes=4")


@row("Spot instances", 2, says="cluster.capacity=spot: Batch runs no multi-node job", do="Use on-")
def _(desk: BatchDesk) -> int:
    return desk.launch("cluster.capacity=spot")


@row(
    "access point of no file system",
    2,
    says=(
        "launch.volumes[0].access_point=fsap-0123456789abcdef0 is not an access point of the EFS "
        "file"
    ),
    do="`aws efs describe-access-points`",
)
def _(desk: BatchDesk) -> int:
    volume = "{path: /runs, host: /fsx, access_point: fsap-0123456789abcdef0}"
    return desk.launch(f"launch.volumes=[{volume}]")
