"""Processes that come and go: the agent of a node, its workers, restarts and drains."""
