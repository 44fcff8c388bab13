"""ssh: hosts without a scheduler; the launcher, what runs on a host, what is looked at before."""
