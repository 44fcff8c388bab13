"""Networks that classify images: what they are, without torch."""
