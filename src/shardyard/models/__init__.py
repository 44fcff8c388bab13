"""Models: made, filled, and changed for training."""

from shardyard.log import quiet_libraries

quiet_libraries()  # before libraries are imported
