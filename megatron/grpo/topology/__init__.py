"""The loop of a training run over one set of devices: what its two sides run, and what lies on its disk.

`longstraw.rollout.topology` switches between them. Nothing here imports torch or Megatron.
"""
