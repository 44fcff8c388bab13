"""Wrong situations of `shardyard profile`, and of a recipe that asks for a profile."""

from shardyard.rundir.jsonl import EventWriter
from shardyard.rundir.layout import RunDir
from shardyard.rundir.lease import Lease
from tests.launchers.wrong_situations import Desk, Situations

SITUATIONS = Situations("profile")
row = SITUATIONS.row


class ProfileDesk(Desk):
    """A run that `train` has begun here."""

    recipe = ("model.preset=llama-tiny", "run.steps=10", "optim.global_batch=8")

    def trained(self) -> RunDir:
        """Its folder; whoever holds its lease trains it."""
        run = RunDir(self.runs / "first")
        run.attempt(0).mkdir(parents=True)
        run.recipe.write_text("model: {preset: llama-tiny}\n")
        events = EventWriter(run.events, attempt=0, generation=0)
        events.write("attempt_started", world_size=2)
        events.close()
        return run

    def profile(self, *words: str) -> int:
        """Of the run while it trains, twice where nothing is refused before."""
        lease = Lease(self.trained().lease)
        try:
            code = self.steer("profile", "--detach", *words)
            return code or self.steer("profile", "--detach", *words)
        finally:
            lease.close()


@row(
    "a run that does not train",
    2,
    says="run first does not train now (lost), so no step of it can be profiled",
    do="observe.profile.at_step=N",
)
def _(desk: ProfileDesk) -> int:
    desk.trained()
    return desk.steer("profile")


@row(
    "a run that has not begun",
    2,
    says="run first has not begun, so it has no step to profile",
    do="Start it with `shardyard resume",
)
def _(desk: ProfileDesk) -> int:
    desk.trained().events.unlink()
    return desk.steer("profile")


@row(
    "two profiles at once",
    2,
    says="a profile of run first is being taken already",
    do="Wait for its end",
)
def _(desk: ProfileDesk) -> int:
    return desk.profile()


@row(
    "ranks that the run has not",
    2,
    says="--ranks 2: the run has 2 ranks, counted from 0",
    do="Use numbers up to 1",
)
def _(desk: ProfileDesk) -> int:
    return desk.profile("--ranks", "2")


@row("ranks in other words", 2, says="--ranks some does not say which ranks", do="Use auto, all")
def _(desk: ProfileDesk) -> int:
    return desk.profile("--ranks", "some")


@row(
    "a profile behind the end of the run",
    2,
    says="observe.profile.at_step=11 but the run ends after run.steps=10",
    do="Use a step from 1 to 10",
)
def _(desk: ProfileDesk) -> int:
    return desk.launch("observe.profile.at_step=11")
