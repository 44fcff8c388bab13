"""Machines that could be rented for a plan, and a dry run of its model, as blocks."""

from collections.abc import Callable, Sequence

from shardyard.config.schema.recipe import Parallel
from shardyard.planner.dry_run import DryRun
from shardyard.planner.format import (
    candidate_name,
    range_words,
    settings_of,
    spare_words,
    unmeasured_words,
)
from shardyard.planner.instance_search import ClusterQuote, ClusterQuotes
from shardyard.planner.plan import Plan
from shardyard.planner.throughput import Range
from shardyard.report.document import (
    Block,
    Callout,
    Chart,
    Details,
    PageSection,
    Paragraph,
    Table,
    Text,
    only_in,
)
from shardyard.units import ABSENT, format_bytes, format_seconds, format_usd


def quotes_section(
    quotes: ClusterQuotes | None,
    requested: Parallel,
    *,
    has_chart: bool,
    deadline_s: float | None = None,
    budget_usd: float | None = None,
) -> PageSection | None:
    """The Pareto front, and the offer that meets what was asked, with its settings.

    Args:
        requested: Axes as the recipe gives them.
    """
    if quotes is None:
        return None
    heads = [
        "cluster",
        "devices",
        "#time",
        "+#80 % band",
        "#price",
        "+#80 % band",
        "+#an hour",
        "+#failures",
        "layout",
    ]
    words = (
        f"{quotes.considered} clusters can train it. Of those, no other is both cheaper and "
        f"faster than one of these {len(quotes.quotes)}:"
    )
    rates = dict.fromkeys(offer.unmeasured for offer in quotes.quotes if offer.unmeasured)
    chart: list[Block] = []
    if has_chart:
        from shardyard.report.plan.charts import draw_quotes  # only here: matplotlib is an extra

        chart.append(Chart("offers-picture", draw_quotes(quotes), is_wide=True))
    passed = quotes.passed_over
    title = f"Instance types in no offer: {len(passed)}"
    more = only_in("page", Details(title, [Table(["instance", ""], passed)])) if passed else []
    return PageSection(
        "offers",
        "What can be rented",
        [
            *only_in("page", *chart),
            Paragraph(words),
            Table(heads, [_row(offer, quotes.selected) for offer in quotes.quotes]),
            *(Paragraph(unmeasured_words(why), kind="note") for why in rates),
            *_choice(quotes, requested, deadline_s, budget_usd),
            *more,
        ],
    )


def _choice(
    quotes: ClusterQuotes, requested: Parallel, deadline_s: float | None, budget_usd: float | None
) -> list[Block]:
    """The offer that meets what was asked; of a page that is not told what, only the offer."""
    asked = []
    if deadline_s is not None:
        asked.append(f"within {format_seconds(deadline_s)}")
    if budget_usd is not None:
        asked.append(f"for at most {format_usd(budget_usd)}")
    if not asked:
        return []
    if quotes.selected is None:
        cheapest, fastest = (_quote_text(quotes.quotes[place]) for place in (0, -1))
        return [
            Callout(
                f"None is {' and '.join(asked)}. The cheapest is {cheapest}; the fastest is "
                f"{fastest}."
            )
        ]
    word = "fastest" if deadline_s is None else "cheapest"
    picked = quotes.selected
    settings = (
        f"cluster.instance={picked.instance} cluster.nodes={picked.nodes} "
        f"{' '.join(settings_of(picked.candidate, requested))} "
        f"checkpoint.every={picked.failures.interval_steps}"
    )
    return [Callout(f"The {word} {' and '.join(asked)}: {_quote_text(picked)}:", settings)]


def _row(quote: ClusterQuote, selected: ClusterQuote | None) -> tuple[str, ...]:
    return (
        Text(f"{quote.nodes} x {quote.instance}", colour="orange" if quote == selected else "blue"),
        f"{quote.devices} x {quote.device}",
        f"{format_seconds(quote.wall_s)}{quote.mark}",
        _range(quote.wall_s_band, format_seconds),
        f"{format_usd(quote.usd)}{quote.mark}",
        _range(quote.usd_band, format_usd),
        format_usd(quote.usd_per_hour),
        f"{quote.failures.expected_failures:.2g}",
        candidate_name(quote.candidate),
    )


def _range(band: Range | None, form: Callable[[float], str]) -> str:
    return ABSENT if band is None else range_words(band, form)


def _quote_text(quote: ClusterQuote) -> str:
    spares = spare_words(quote.failures.spare_nodes)
    name = f"{quote.nodes} x {quote.instance}{f' {spares}' if spares else ''}"
    return (
        f"{name}, {format_seconds(quote.wall_s)}{quote.mark}, {format_usd(quote.usd)}{quote.mark}"
    )


def day_prices_section(prices: Sequence[tuple[str, float | None, str]]) -> PageSection:
    """Today's price of a node for each way to rent it: the way, dollars an hour, the source."""
    rows = [(kind, "-" if usd is None else format_usd(usd), why) for kind, usd, why in prices]
    return PageSection("prices", "", [Table(("a node, rented", "#an hour", ""), rows)])


def dry_run_section(plan: Plan, dry: DryRun) -> PageSection:
    """The bytes of the real model next to the plan's."""
    peak = dry.peak
    names = [name for name in peak.terms if peak.terms[name] or plan.memory_term(name)]
    rows = [(n, format_bytes(plan.memory_term(n)), format_bytes(peak.terms[n])) for n in names]
    tensors = sum(plan.memory_term(name) for name in peak.terms)  # a CPU's process is in no tensor
    error = tensors / peak.bytes - 1
    rows.append(("sum", format_bytes(tensors), f"{format_bytes(peak.bytes)}"))
    words = (
        f"The real model, built and stepped without a device (torch {dry.torch}, "
        f"{dry.attention} attention): most in the {peak.phase}, at {peak.operator}. The plan is "
        f"{error:+.1%} off."
    )
    table = Table(("memory per rank", "#plan", "#dry run"), rows, totals=1)
    return PageSection("dry-run", "", [Paragraph(words), table])
