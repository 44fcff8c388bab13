"""`shardyard bench`: what the network of a job does, in nccl-tests' own table."""
