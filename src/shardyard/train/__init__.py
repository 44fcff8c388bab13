"""Training: set-up, steps and the loop."""

from shardyard.log import quiet_libraries

quiet_libraries()  # before libraries are imported
