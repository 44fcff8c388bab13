"""Wrong situations of `shardyard study`, all told before anything is submitted."""

from tests.launchers.wrong_situations import Desk, Situations

SITUATIONS = Situations("study")
row = SITUATIONS.row

_P5 = ("cluster.instance=p5.48xlarge", "cluster.device=auto", "cluster.devices=auto")


class StudyDesk(Desk):
    """A study of CPU processes."""

    recipe = (
        "model.preset=llama-tiny", "cluster.device=cpu", "cluster.devices=1", "run.steps=10",
        "optim.global_batch=8", "data.seq_len=32",
    )  # fmt: skip

    def study(self, *words: str, on: str = "slurm") -> int:
        """Study sizes, with what is to be different."""
        settings = [word for word in words if "=" in word]
        options = [word for word in words if "=" not in word]
        sizes = () if "--nodes" in options else ("--nodes", "1,2")
        where = () if "--predict" in options or "--on" in options else ("--on", on)
        given = [*self._recipe(settings), *sizes, *where]
        asked = () if "--predict" in options else ("--yes",)
        return self.shardyard("study", *given, *options, *asked)

    def table(self, text: str) -> int:
        """A table of somebody's numbers."""
        path = self.folder / "published.csv"
        path.write_text(text)
        return self.shardyard("study", "--table", str(path))


@row("sizes that are no numbers", 2, says="'a few' is not a list of numbers of nodes", do="1,2,4")
def _(desk: StudyDesk) -> int:
    return desk.study("--nodes", "a few")


@row(
    "a study neither run nor planned",
    2,
    says="give --on LAUNCHER to run each size",
    do="or --predict to plan it",
)
def _(desk: StudyDesk) -> int:
    return desk.shardyard("study", *desk.recipe, "--nodes", "1,2")


@row(
    "a size both measured and extrapolated",
    2,
    says="--nodes and --extrapolate both name 2",
    do="leave it out of one of them",
)
def _(desk: StudyDesk) -> int:
    return desk.study("--predict", "--extrapolate", "2")


@row(
    "a batch that the devices of the smallest size cannot share",
    2,
    says="8 samples on 3 devices, which is not a whole number for each",
    do="Give optim.batch_per_device",
)
def _(desk: StudyDesk) -> int:
    return desk.study("--predict", "--nodes", "3,6", "--hold", "batch-per-device")


@row(
    "a sum above its limit",
    2,
    says="the sizes that are left are predicted to cost",
    do="Ask for fewer sizes or steps, or raise the limit",
)
def _(desk: StudyDesk) -> int:
    rented = (*_P5, "optim.global_batch=64")
    return desk.study(*rented, "--max-usd", "0.01")


@row(
    "a limit that nothing can be held to",
    2,
    says="--max-usd 5, but the price of 1, 2 nodes is not known",
    do="Name the machines with cluster.instance",
)
def _(desk: StudyDesk) -> int:
    return desk.study("--max-usd", "5")


@row(
    "a limit of what costs nothing",
    2,
    says="--predict starts no job",
    do="leave --max-usd and --dry-run out",
)
def _(desk: StudyDesk) -> int:
    return desk.study("--predict", "--max-usd", "5")


@row(
    "a plan of sizes that a published table lacks",
    2,
    says="has no row of 2 accelerators",
    do="Ask for those",
)
def _(desk: StudyDesk) -> int:
    path = desk.folder / "published.csv"
    path.write_text("accelerators,samples_per_s\n1,8\n4,30\n")
    return desk.study("--predict", "--table", str(path))


@row(
    "a published table with a column that nobody knows",
    2,
    says="'sample_per_s' is not a column of a scaling table",
    do="is 'samples_per_s' meant?",
)
def _(desk: StudyDesk) -> int:
    return desk.table("accelerators,sample_per_s\n8,1\n")


@row(
    "a published table with a word for a number",
    2,
    says="row 2: samples_per_s='fast' is not a number above 0",
    do="Correct these rows",
)
def _(desk: StudyDesk) -> int:
    return desk.table("accelerators,samples_per_s\n8,fast\n")


@row(
    "a folder for runs that are elsewhere",
    2,
    says="--runs-dir is only for tables",
    do="run.dir",
)
def _(desk: StudyDesk) -> int:
    return desk.study("--predict", "--runs-dir", "elsewhere")
