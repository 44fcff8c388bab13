"""Rows with labels: found in tables and JSON, tokenized once, and read as samples."""
