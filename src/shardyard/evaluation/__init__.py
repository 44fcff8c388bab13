"""Scores of a language model: perplexity of text, and tasks in the format of lm-evaluation-harness."""
