"""Model families, one file each: what of a model both halves know, without torch."""
