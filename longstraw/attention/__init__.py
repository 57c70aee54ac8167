"""Attention over pages that several ranks own, and the gated delta rule with its state in the open.

`naive`: the specification. `kernels`: one attention call that returns and takes the log-sum-exp. `layout`: how a block
lies over the context-parallel ranks. `exchange`: the collectives between them. `paged`: exact attention over pages, with
its backward. `delta_rule`: the gated delta rule from a given state to a returned one.
"""
