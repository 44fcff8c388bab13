"""Images as samples: what `prepare` writes of them, and what training reads."""
