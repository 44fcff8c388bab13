"""Runs shown elsewhere: W&B and MLflow, sent by a process beside the run that nothing waits for."""
