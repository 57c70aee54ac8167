"""What a run leaves behind: metrics a step, a receipt of how it was done, plots, and what the terminal shows.

Megatron is never imported here, and only global rank 0 writes or prints.
"""
