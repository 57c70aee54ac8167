"""The state that segments leave behind, and its adjoints.

`pages`: append-only pages of one attention layer. `latents`: what latent attention reads of them, and kept selections.
`kept`: a layer's attention outputs from the forward sweep. `recurrent`: recurrent and conv states of one gated delta
net layer. `routing`: the experts that tokens went to. `residency`: where a tensor lives and how host pages are staged. `ledger`: which bytes are resident, where,
whose and why.
"""
