"""`shardyard prepare`: text into token shards, in a process of its own."""

import json
import tempfile
from dataclasses import asdict
from pathlib import Path

import click

from shardyard.cli.options import json_option
from shardyard.cli.processes import run_program
from shardyard.cli.request import Request
from shardyard.cli.tables import print_table
from shardyard.cli.terminal import tell
from shardyard.config.model_source import has_tokenizer, table_rows
from shardyard.config.resolve import keep_previous
from shardyard.config.resolved import DataFacts, Resolved


@click.command()
@click.argument("recipe", nargs=-1, required=True)
@click.option("--dry-run", is_flag=True, help="Say what would be read and written.")
@click.option("--verify", is_flag=True, help="Read every prepared file and check its SHA-256.")
@json_option
def command(recipe: tuple[str, ...], *, dry_run: bool, verify: bool, as_json: bool) -> None:
    """Prepare the data of RECIPE (files and section.key=value overrides).

    Does nothing where the data is prepared already, and goes on where a killed call stopped.
    """
    request = Request.read(recipe, needs_weights=False, runs_here=True)
    if dry_run:
        plan = _what_would_happen(request)
        if as_json:
            tell(json.dumps(plan, indent=1))
        else:
            print_table(("", ""), list(plan.items()), title="would prepare")
        return
    facts = prepare_data(request, verify=verify)
    if as_json:
        tell(json.dumps(asdict(facts), indent=1))
        return
    rows = [
        ("folder", facts.dir),
        ("training", f"{facts.train_tokens:,} tokens of {facts.train_documents:,} documents"),
        ("evaluation", f"{facts.eval_tokens:,} tokens of {facts.eval_documents:,} documents"),
        ("vocabulary", f"{facts.vocab_size:,} tokens"),
        ("documents begin with", facts.bos_token or "no token of their own"),
        ("unigram entropy", f"{facts.unigram_entropy:.3f} nats a token"),
    ]
    print_table(("", ""), rows)


def prepare_data(
    request: Request, *, previous: Resolved | None = None, verify: bool = False
) -> DataFacts:
    """Prepare a request's data, or find it prepared; sizes are checked always, content if asked.

    Args:
        previous: The last attempt, on a resume: what it read is prepared again as it was.

    Raises:
        ShardyardError: What the data program answered; its class follows the exit code.
    """
    with tempfile.TemporaryDirectory(prefix="shardyard-") as folder:
        recipe = Path(folder) / "recipe.json"
        recipe.write_text(keep_previous(request.recipe, previous)[0].model_dump_json())
        options = [] if request.model_dir is None else ["--model-dir", str(request.model_dir)]
        rows = table_rows(request.recipe.model, request.known_shape)
        options += [] if rows is None else ["--rows", str(rows)]
        options += ["--verify"] if verify else []
        return DataFacts(**run_program("shardyard.data", [str(recipe), *options]))


def _what_would_happen(request: Request) -> dict[str, str]:
    data = request.recipe.data
    sources = (data.source,) if isinstance(data.source, str) else data.source
    trained = f"train a byte-level BPE of {data.vocab_size:,} tokens"
    own = str(request.model_dir) if has_tokenizer(request.model_dir) else trained
    tokenizer = {"auto": own, "train": trained}.get(data.tokenizer, data.tokenizer)
    return {
        "read": ", ".join(sources),
        "tokenizer": tokenizer,
        "write": f"a folder named by fingerprint in {Path(data.dir).expanduser().resolve()}",
        "held out": f"{data.eval_fraction:.0%} of the documents",
    }
