"""`shardyard bench network --transports`: a job for each network, and a common table.

A job each, and not one that measures all: which network is used is settled when NCCL begins, by
variables of its process, and in pods by what the container is given. So each has the folder, the
log and the event of a benchmark of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardyard.bench import transports
from shardyard.bench.transports import Variant
from shardyard.control.bench import Answers, Asked, bench_proposal, follow_bench
from shardyard.control.job import Job
from shardyard.control.launch import submitted
from shardyard.control.submission import Proposal
from shardyard.errors import RequestError, ShardyardError
from shardyard.launchers.base import Launcher
from shardyard.log import say

Words = dict[Variant, tuple[str, ...]]
"""Of each variant the recipe's words, and what it changes."""


def words_of(
    variants: Sequence[Variant], words: Sequence[str], launcher: Launcher, asked: Asked
) -> Words:
    """What each variant is submitted with; its run is named after it. Creates nothing.

    Raises:
        RequestError: One of them cannot be measured there.
    """
    base = bench_proposal(words, launcher, asked, is_dry_run=True)
    recipe, cluster = base.request.recipe, base.request.cluster
    device = recipe.cluster.device
    if device == "auto" and cluster is not None:
        device = cluster.accelerator.device
    found = {}
    for variant in variants:
        changes = transports.overrides_of(variant, recipe, device=device, launcher=launcher.name)
        name = f"run.id={base.run_dir.run_id}-{variant.label}"
        found[variant] = (*words, name, *changes)
    return found


def proposals_of(
    found: Words, launcher: Launcher, asked: Asked, *, is_dry_run: bool = False
) -> list[Proposal]:
    """All that would be submitted, looked at before the first is."""
    return [
        bench_proposal(words, launcher, asked, is_dry_run=is_dry_run) for words in found.values()
    ]


@dataclass(kw_only=True)
class SideBySide:
    """What came of all of them."""

    measured: dict[Variant, tuple[Job, Answers]] = field(default_factory=dict)
    failures: list[ShardyardError] = field(default_factory=list)
    """Of those that did not measure all."""

    @property
    def rates(self) -> transports.Rates:
        """Of those that were measured."""
        rows = {variant.name: answers.rows for variant, (_, answers) in self.measured.items()}
        ranks = {answers.ranks for _, answers in self.measured.values()}
        if len(ranks) > 1:
            raise RequestError(
                f"the jobs came up with different numbers of ranks ({sorted(ranks)}), so that they "
                "are not to be held against each other. Give the launcher all nodes of each."
            )
        return transports.rates(rows, max(ranks, default=1))

    @property
    def lines(self) -> list[str]:
        """The common table, and the networks that were not used although they were asked for."""
        said = transports.lines(self.rates, [variant.name for variant in self.measured])
        for variant, (_, answers) in self.measured.items():
            used = "nobody named" if answers.network is None else answers.network.words
            is_used = variant.is_used(answers.network)
            wrong = "" if is_used else ": NOT what was asked, so its column says nothing of it"
            said.append(f"# {variant.name}: network used: {used}{wrong}")
        return said

    @property
    def is_sound(self) -> bool:
        """Whether every network was used that was asked for, and no value came out wrong."""
        return all(
            variant.is_used(answers.network) and not answers.wrong_values
            for variant, (_, answers) in self.measured.items()
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        names = [variant.name for variant in self.measured]
        runs = [
            {
                "transport": variant.name,
                "is_used": variant.is_used(answers.network),
                "run_id": job.run_id,
                "run_dir": str(job.run_dir.path),
                **answers.to_json(),
            }
            for variant, (job, answers) in self.measured.items()
        ]
        rows = [
            {
                "collective": collective,
                "size_bytes": size,
                "busbw_gbs": by,
                "ratios": transports.ratios(by, names),
            }
            for (collective, size), by in self.rates.items()
        ]
        return {"transports": runs, "side_by_side": rows}


def measure_each(
    found: Words, launcher: Launcher, asked: Asked, *, shown: Callable[[str], None]
) -> SideBySide:
    """Submit and follow one job after the other; one that fails does not cost the others' answers.

    Args:
        shown: Given each line of the tables as it comes.

    Raises:
        KeyboardInterrupt: This command was interrupted; the job that is followed goes on.
    """
    side_by_side = SideBySide()
    for variant, words in found.items():
        try:
            # proposed anew: what is left of a capacity block is less by now
            job = submitted(bench_proposal(words, launcher, asked))
            say(f"{variant.name}: job {job.id} ({job.name}) on {job.on}")
            side_by_side.measured[variant] = (job, follow_bench(job, shown=shown))
        except ShardyardError as error:
            say(f"error: {variant.name}: {error}")
            side_by_side.failures.append(error)
    return side_by_side
