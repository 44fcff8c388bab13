"""Runs shown in W&B and MLflow, sent by a process next to the run without delaying it."""
