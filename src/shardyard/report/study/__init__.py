"""A scaling study: one recipe on several numbers of nodes, as one table and one page."""
