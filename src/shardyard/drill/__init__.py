"""`shardyard drill`: the effect of failures on a run of the user's recipe.

`faults.py` is the table of all faults, `case.py` lets one of them break one run. `verdict.py`
judges whether it was noticed, named and fixed. The rest is around these three.
"""
