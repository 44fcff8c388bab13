"""What a drill and the workers it breaks agree on: read by both halves."""

FAULTS_VARIABLE = "SHARDYARD_FAULTS"
"""Environment variable with the faults that workers make by themselves (elastic/faults.py)."""

FAULT_MARK = "@shardyard-fault "
"""Begins a log line of a rank: which fault strikes it now, at which step, when."""
