"""Pairs of answers, one of them preferred: read from rows, tokenized, and read as samples."""
