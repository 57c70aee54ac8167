"""Time-multiplexing of two sides over the same devices: processes with an end to them, a state machine, a journal,
hosts.

Knows of a trainer, a generator, a server and Ray only their names; `megatron.grpo.topology` gives their commands and
says what is on disk. Nothing here imports torch: a switcher holds no device and little memory.
"""
