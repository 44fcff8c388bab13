"""Scores of a language model: perplexity of text, and tasks of lm-evaluation-harness."""
