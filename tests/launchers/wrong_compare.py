"""Wrong situations of `shardyard compare`, all told before a page is written."""

from tests.launchers.wrong_situations import Desk, Situations
from tests.report.compare.some_runs import write_run

SITUATIONS = Situations("compare")
row = SITUATIONS.row


class CompareDesk(Desk):
    """Two runs that trained here."""

    def compare(self, *words: str) -> int:
        """Compare them, or others."""
        for name in ("first", "second"):
            if not (self.runs / name).exists():
                write_run(self.runs, name, steps=20)
        code = self.shardyard("compare", *words, "--runs-dir", str(self.runs))
        assert not (self.runs / "compare.html").exists()
        return code


@row(
    "a single run",
    2,
    says="a comparison needs two sides",
    do="Name another run after a space; `shardyard report RUN` shows a single one",
)
def _(desk: CompareDesk) -> int:
    return desk.compare("first")


@row(
    "runs joined by a comma alone",
    2,
    says="a comparison needs two sides",
    do="Name another run after a space",
)
def _(desk: CompareDesk) -> int:
    return desk.compare("first,second")


@row("a run beside itself", 2, says="RUN first is named twice", do="Name each run once")
def _(desk: CompareDesk) -> int:
    return desk.compare("first", "second,first")


@row(
    "a run that is not there",
    2,
    says="RUN 'third' is neither a run folder nor the beginning of a run id",
    do="--runs-dir",
)
def _(desk: CompareDesk) -> int:
    return desk.compare("first", "third")


@row(
    "a run that has not begun",
    2,
    says="third holds no attempt: attempts/ and events.jsonl are empty",
    do="Start it with `shardyard resume",
)
def _(desk: CompareDesk) -> int:
    (desk.runs / "third").mkdir(parents=True)
    (desk.runs / "third" / "recipe.yaml").write_text("model: {preset: llama-tiny}\n")
    return desk.compare("first", "third")


@row(
    "a target that is none",
    2,
    says="--target 'loss' is not a metric and a number",
    do="Give it as --target loss=2.0",
)
def _(desk: CompareDesk) -> int:
    return desk.compare("first", "second", "--target", "loss")


@row(
    "a target that no run is evaluated by",
    2,
    says="--target top1=0.9: no run of these is evaluated by 'top1'",
    do="They are by loss, perplexity",
)
def _(desk: CompareDesk) -> int:
    return desk.compare("first", "second", "--target", "top1=0.9")
