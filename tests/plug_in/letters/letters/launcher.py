"""The launcher `paper-mail`: writes a letter to somebody who starts the nodes by hand."""

import shlex
from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from shardyard.config.paths import NodePaths
from shardyard.config.schema.base import Section
from shardyard.config.schema.recipe import Recipe
from shardyard.launchers.base import (
    Capabilities,
    JobStatus,
    LaunchRequest,
    LogLine,
    Removal,
    Rendered,
    mounted_paths,
)
from shardyard.launchers.ledger import EntryForm, Ledger, Submission


class Settings(Section):
    """`launch --on paper-mail`."""

    to: str | None = None
    """Who starts the nodes."""
    stamps: Annotated[int, Field(ge=1, le=4)] = 1
    """Stamps on the letter."""
    speed: Literal["slow", "express"] = "slow"
    """How fast it goes."""
    labels: dict[str, str] = Field(default={})
    """Written on the envelope."""

    @model_validator(mode="after")
    def _express_costs_more(self) -> "Settings":
        if self.speed == "express" and self.stamps < 2:
            raise ValueError("speed=express needs 2 stamps. Raise launch.paper_mail.stamps.")
        return self


class PaperMail:
    """Renders a letter; nobody sends it."""

    settings: ClassVar[type[Section]] = Settings
    name: ClassVar[str] = "paper-mail"
    capabilities: ClassVar[Capabilities] = Capabilities(
        resizes=(), requeues=False, needs_image=False, shares_folder=True, secrets=()
    )
    forms: ClassVar[Mapping[str, EntryForm]] = {}

    def node_paths(self, recipe: Recipe) -> NodePaths:
        return mounted_paths(recipe.launch, launcher=self.name)

    def render(self, request: LaunchRequest) -> Rendered:
        own = request.recipe.launch.own(self.name, Settings)
        given = " ".join(f"{key}={shlex.quote(text)}" for key, text in request.environment.items())
        nodes = "\n".join(
            f"{given} python -m shardyard.node {request.run_dir}/recipe.yaml --place given "
            f"--run-dir {request.run_dir} --node-rank {rank} --nodes {request.nodes} "
            f"--rendezvous HOST:29400 --session {request.submission}"
            for rank in range(request.nodes)
        )
        text = f"To: {own.to}\nStamps: {own.stamps}\n{own.labels}\n\nPlease type:\n{nodes}\n"
        return Rendered(
            launcher=self.name, run_id=request.run_id, name=f"letter-{request.run_id}", text=text
        )

    def submit(self, rendered: Rendered, ledger: Ledger) -> Submission:
        raise NotImplementedError

    def status(self, job: Submission) -> JobStatus:
        raise NotImplementedError

    def logs(self, job: Submission, *, node: int | None, follow: bool) -> Iterator[LogLine]:
        raise NotImplementedError

    def cancel(self, job: Submission) -> None:
        raise NotImplementedError

    def remove(self, job: Submission, ledger: Ledger) -> Removal:
        raise NotImplementedError
