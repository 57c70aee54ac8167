"""The training program's step on fake tensors: what it would hold, exchange and take.

`flags`: the command line. `parts`: the step's own objects and what stands in for data and terminal. `run`: one rank's step
under a tracker. `program`: what tools/dry_run.py and --dry-run start.
"""
