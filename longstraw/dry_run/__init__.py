"""A step's memory, exchanges and time from its own code, on a machine that could never hold it.

`tracker`: live bytes by category, place and phase, of real tensors or fake ones. `shapes_only`: which tensors have
numbers. `fake_world`: a rank of a world that is not there. `counter`: operations, bytes and collectives. `kernels`: fused
operations as one custom operation each. `sampling`: an engine that runs some chunks and accounts for the rest. `report`: the
result. `hardware` and `time_model`: seconds of it. `search`: the flags whose result is best.
"""
