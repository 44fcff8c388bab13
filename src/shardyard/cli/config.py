"""`shardyard config`: a recipe resolved with reasons; the documentation of every setting."""

import json
from dataclasses import replace

import click

from shardyard.cli.options import any_recipe_argument, json_option
from shardyard.io.terminal import echo, print_table


@click.command()
@any_recipe_argument
@click.option(
    "--schema", is_flag=True, help="List every setting with type, default and description."
)
@click.option("--presets", is_flag=True, help="List the named models (model.preset).")
@json_option
def command(recipe: tuple[str, ...], *, schema: bool, presets: bool, as_json: bool) -> None:
    """Show RECIPE (files and section.key=value overrides) with every value resolved, and why.

    Values that depend on prepared data or on the devices stay auto.
    """
    if schema or presets:
        if recipe or (schema and presets):
            raise click.UsageError("--schema, --presets and a RECIPE exclude each other.")
        (_show_schema if schema else _show_presets)(as_json=as_json)
        return
    if not recipe:
        raise click.UsageError(
            "RECIPE is missing. Give a YAML file or overrides such as model.preset=llama-tiny, "
            "or --schema."
        )
    _show_recipe(recipe, as_json=as_json)


def _show_recipe(arguments: tuple[str, ...], *, as_json: bool) -> None:
    from shardyard.config.schema.json_schema import write_default
    from shardyard.config.site import site_files
    from shardyard.control.request import Request, settings_of
    from shardyard.units import format_count

    request = Request.read(arguments, to_train=False, needs_weights=False, only_looks=True)
    preview = request.preview()
    settings = settings_of(request, preview)
    files = [str(file) for file in site_files()]
    shape = request.shape
    if as_json:
        length = {"value": preview.steps, "reason": preview.steps_reason}
        content = {
            "settings": settings,
            "steps": length,
            "shape": shape and shape.to_dict(),
            "site_files": files,
        }
        echo(json.dumps(content, indent=1))
        return
    sections: dict[str, list[tuple[str, str, str]]] = {}
    for name, entry in settings.items():
        section, _, key = name.partition(".")
        if name == "run.origins" and entry["value"]:
            continue  # file and line are in the row of each setting
        row = (key, write_default(entry["value"]), entry["reason"])
        sections.setdefault(section, []).append(row)
    for section, rows in sections.items():
        print_table(("", "", ""), rows, title=section)
    length_text = "not known yet" if preview.steps is None else f"{preview.steps:,} steps"
    parameters = ("not known yet", "the module of your own says how many")
    if request.network is not None:
        parameters = ("not known yet", "`shardyard plan` counts them, for the classes of the data")
    if shape is not None:
        parameters = (format_count(shape.parameters), f"a {shape.model_type} of this shape")
    rows = [
        ("parameters", *parameters),
        ("length", length_text, preview.steps_reason),
        ("site files", ", ".join(files) or "none", "read below the recipe, the last one wins"),
    ]
    print_table(("", "", ""), rows, title="derived")


def _show_schema(*, as_json: bool) -> None:
    from shardyard.config.schema.json_schema import setting_json, settings_json, write_default
    from shardyard.config.schema.plugin_sections import described
    from shardyard.config.schema.reference import sections
    from shardyard.io.terminal import echo_err

    added = []
    for plug_in, found in described():
        if isinstance(found, str):
            echo_err(f"warning: {found}")
        else:
            added.append((plug_in, found))
    if as_json:
        theirs = [
            {**setting_json(setting), "package": plug_in.package}
            for plug_in, section in added
            for setting in section.settings
        ]
        echo(json.dumps([*settings_json(), *theirs], indent=1))
        return
    named = [
        replace(section, sentence=f"{section.sentence} ({plug_in.what})")
        for plug_in, section in added
    ]
    for section in [*sections(), *named]:
        rows = [
            (setting.name, write_default(setting.default), setting.accepts, setting.sentence)
            for setting in section.settings
        ]
        title = f"{section.name}: {section.sentence}" if section.sentence else section.name
        if rows:
            print_table(("setting", "default", "accepts", "what it does"), rows, title=title)
        else:
            echo(title)


def _show_presets(*, as_json: bool) -> None:
    from shardyard.families.presets import PRESETS
    from shardyard.units import format_count

    if as_json:
        listing = [
            {"name": name, "source": preset.source, "shape": preset.shape.to_dict()}
            for name, preset in PRESETS.items()
        ]
        echo(json.dumps(listing, indent=1))
        return
    rows = []
    for name, preset in PRESETS.items():
        shape = preset.shape
        # A preset without a vocabulary takes the tokenizer's; its tables are not counted here.
        size = format_count(shape.parameters) + ("" if shape.vocab_size else " + embeddings")
        rows.append((name, size, f"{shape.max_position_embeddings:,}", preset.source))
    print_table(("preset", "parameters", "context", "source"), rows)
