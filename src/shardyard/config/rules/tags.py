"""Rules for ``run.tags``: short names and values that every scheduler, cloud and tracker accepts.

A tag becomes a label of Kubernetes, a resource tag of AWS, a part of Slurm's comment, and a tag of
W&B and MLflow. So that a recipe can move between them, the strictest rules hold everywhere:
Kubernetes' for values (63 characters, no blanks) and W&B's for the length of both together (64).
"""

import re
from collections.abc import Iterable, Mapping

from shardyard.config.schema.recipe import Recipe
from shardyard.config.secrets import show
from shardyard.errors import Problem

MOST_TAGS = 10
"""AWS Batch accepts 50 tags of a resource; ours and a site's own need room, too."""
NAME = re.compile(r"[a-z]([a-z0-9_-]{0,18}[a-z0-9])?", re.ASCII)
VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,38}[A-Za-z0-9])?", re.ASCII)
_RESERVED = re.compile(r"shardyard.*|aws.*|job-name|controller-uid|month|owner")
"""Names that we, AWS or the Job controller of Kubernetes set, and those of `runs --cost --by`."""


def check_tags(recipe: Recipe) -> Iterable[Problem]:
    """Every tag that some place could not hold, with one that it could."""
    tags = recipe.run.tags
    if len(tags) > MOST_TAGS:
        text = f"has {len(tags)} tags. Use at most {MOST_TAGS}."
        yield Problem("run.tags", text)
    for name, value in tags.items():
        if not NAME.fullmatch(name):
            near = re.sub(r"[^a-z0-9]+", "-", name.lower())[:20].strip("-0123456789")
            hint = f" Did you mean {near}?" if near else ""
            text = (
                f"has the name {show(name)}. A tag's name has at most 20 lower-case letters, "
                f"digits, hyphens and underscores, and begins with a letter.{hint}"
            )
            yield Problem("run.tags", text)
        elif _RESERVED.fullmatch(name):
            text = f"has the name {name}, which is reserved. Choose another, such as my-{name}."
            yield Problem("run.tags", text)
        elif not VALUE.fullmatch(value):
            near = re.sub(r"[^A-Za-z0-9._]+", "-", value)[:40].strip("-._")
            hint = f" Did you mean {near}?" if near else ""
            text = (
                f"={show(value)} cannot be a label. A tag's value has 1 to 40 letters, digits, "
                f"dots, hyphens and underscores, and begins and ends with a letter or digit.{hint}"
            )
            yield Problem(f"run.tags.{name}", text)


def tag_words(tags: Mapping[str, str], separator: str = ",") -> str:
    """Return tags as one text: ``team=nlp,project=search``, in the order of their names."""
    return separator.join(f"{name}={tags[name]}" for name in sorted(tags))


def read_tag_words(text: str, separator: str = ",") -> dict[str, str]:
    """Return the tags that ``tag_words`` wrote; a word that is no tag is left out."""
    pairs = (word.partition("=") for word in text.split(separator))
    return {
        name: value for name, _, value in pairs if NAME.fullmatch(name) and VALUE.fullmatch(value)
    }
