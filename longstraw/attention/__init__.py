"""Attention over pages that several ranks own, and the gated delta rule with its state in the open.

`naive`, `naive_sparse`: the specifications. `kernels`: one attention call that returns and takes the log-sum-exp;
`wide_heads`: the same in blocks of matrix products. `layout`: how a block lies over the context-parallel ranks.
`exchange`: the collectives between them. `paged`: exact attention over pages, with its backward, that passes queries;
`passed_keys`: the same that passes keys. `selection`: exact top-k of keys by index scores. `sparse`: attention over selected
latents. `latent`: multi-latent attention, sparse or dense. `delta_rule`: the gated delta rule from a given state to a
returned one.
"""
