"""AWS Batch: multi-node parallel jobs; the launcher, what its API says, what is checked before."""
