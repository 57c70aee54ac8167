"""Everything that LongStraw does to Megatron, in one place.

`device`: run Megatron's modules where there is no CUDA device. `layer_specs`: the decoder block built from Megatron's
own modules with the stateful ones swapped in. `linears`, `norms`: the classes it is built of. `process_groups`,
`world_sizes`: how ranks are cut into groups. `float64`: lift Megatron's float32 islands for float64 audits.
`finalize_model_grads`: the reductions that Megatron's own finalization leaves out. `projections`: the matrices that
are sketched or adapted. `lora`: low-rank pairs on them. `stable_selection`: ties of Megatron's
sparse attention go to the earlier position. `verify`: what each patch checks.
"""
