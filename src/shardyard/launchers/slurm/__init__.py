"""Slurm: one batch script; the launcher, what its clients say, what is looked at before."""
