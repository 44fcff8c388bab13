"""`shardyard plan`: what a recipe will take, before anything is prepared, rented or started."""

import json

import click

from shardyard.cli.options import json_option
from shardyard.cli.request import Request
from shardyard.cli.tables import print_table
from shardyard.hardware.probe import probe
from shardyard.plan.memory import RULE_BYTES_PER_PARAMETER
from shardyard.plan.plan import Plan, layout_name, plan_recipe
from shardyard.units import format_bytes, format_count, format_flops, format_seconds, format_usd


@click.command()
@click.argument("recipe", nargs=-1, required=True)
@json_option
def command(recipe: tuple[str, ...], *, as_json: bool) -> None:
    """Predict memory, speed and price of RECIPE (files and section.key=value overrides).

    For the machines of cluster.instance or cluster.file, else for this machine. Needs no data.
    """
    plan, why_steps = _plan(recipe)
    if as_json:
        click.echo(json.dumps({**plan.to_json(), "steps_reason": why_steps}, indent=1))
        return
    click.echo(plan.line())
    _show_memory(plan)
    _show_rest(plan, why_steps)


def _plan(arguments: tuple[str, ...]) -> tuple[Plan, str]:
    """The plan, and why it is as long as it is."""
    request = Request.read(arguments, to_train=False, needs_weights=False)
    cluster = request.recipe.cluster
    machine = probe() if cluster.instance is None and cluster.file is None else None
    preview = request.preview(machine)
    devices = preview.recipe.cluster.devices
    assert isinstance(devices, int)  # an instance and a machine both say how many
    plan = plan_recipe(
        preview.recipe,
        shape=request.shape,
        steps=preview.steps,
        world_size=preview.recipe.cluster.nodes * devices,
        devices_per_node=devices,
        machine=machine,
    )
    return plan, preview.why_steps


def _show_memory(plan: Plan) -> None:
    rows = [(term.name, format_bytes(term.bytes), term.reason) for term in plan.memory]
    rows.append(("sum", format_bytes(plan.memory_bytes), f"{plan.fits}: {plan.fits_reason}"))
    rule, ranks = RULE_BYTES_PER_PARAMETER * plan.parameters, plan.layout.dp_shard
    click.echo(
        f"\nRule of the field: {RULE_BYTES_PER_PARAMETER} bytes a parameter "
        f"(Adam, mixed precision) = {format_bytes(rule)}, split over {ranks}: "
        f"{format_bytes(rule / ranks)} a rank, before activations. Term by term:\n"
    )
    print_table(("memory per rank", "", ""), rows)


def _show_rest(plan: Plan, why_steps: str) -> None:
    flops = {name: format_flops(value) for name, value in plan.flops_per_token.items()}
    tokens = f"{plan.tokens_per_step:,} tokens"
    samples = f"{plan.samples_per_step:,} samples x {plan.seq_len:,}"
    length, why = "not known yet", why_steps
    if plan.steps is not None and plan.tokens is not None:
        length, why = f"{plan.steps:,} steps", f"{format_count(plan.tokens)} tokens; {why_steps}"
    rate, peak = plan.speed.tokens_per_s, plan.peak.flops_per_s
    rows = [
        ("layout", layout_name(plan.layout), plan.devices_words()),
        ("work", f"{flops['full']} a token", f"{flops['causal']} with causal attention"),
        ("step", tokens, samples),
        ("length", length, why),
        ("peak", "-" if peak is None else f"{format_flops(peak)}/s", plan.peak.source),
        ("speed", "-" if rate is None else f"{format_count(rate)} tokens/s", plan.speed.reason),
    ]
    if plan.seconds is not None:
        rows.append(("time", format_seconds(plan.seconds), "steps alone, without start and saves"))
    rows += _price_rows(plan)
    rows.append(("checkpoint", format_bytes(plan.checkpoint_bytes), "on disk, all ranks"))
    rows += [
        (term.name, f"{format_bytes(term.bytes)} a step", f"each rank sends {term.reason}")
        for term in plan.communication
    ]
    click.echo()
    print_table(("the rest", "", ""), rows)


def _price_rows(plan: Plan) -> list[tuple[str, str, str]]:
    per_hour, per_million = plan.price.usd_per_hour, plan.usd_per_million_tokens
    if per_hour is None:
        return [("price", "-", plan.price.source)]
    rows = [("price", f"{format_usd(per_hour)} an hour", plan.price.source)]
    if per_million is not None:
        rows.append(("", f"{format_usd(per_million)} per million tokens", "at the speed above"))
    if plan.usd is not None:
        rows.append(("", f"{format_usd(plan.usd)} in all", "for the time above"))
    return rows
