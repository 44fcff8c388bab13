"""Tasks in the format of lm-evaluation-harness: their files, their requests and their scores."""
