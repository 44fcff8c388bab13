"""`shardyard drill`: what becomes of a run when things break, tried on a run of the user's recipe.

`faults.py` is the table of all that can break, `case.py` lets one of them break one run, `judge.py`
says of what came of it whether it was noticed, named and mended. The rest is around these three.
"""
