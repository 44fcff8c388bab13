"""Tasks to train: a file for each task, found by its row in ``config/tasks.py``."""
