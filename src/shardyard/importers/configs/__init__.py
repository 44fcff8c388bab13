"""Others' configurations become a recipe: `shardyard import FILE...`.

A file a source, each a table: key of the source -> what becomes of it. ``rules.py`` says what that
may be, ``source.py`` reads files, ``sources.py`` lists the sources, ``job.py`` puts several files
together, ``convert.py`` writes the recipe with where each line came from.
"""
