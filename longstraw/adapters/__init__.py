"""What each kind of layer leaves, restores and replays, on Megatron's own modules.

`base`: the protocol that another architecture implements. `full_attention`, `gated_delta_net`: one layer kind each.
`latent_attention`: latent attention over selected positions. `expert_routing`: experts. `lockstep`: replicas that share
experts. `decoder`: one block of tokens through a whole model. `registry`: which adapter serves which module.
"""
