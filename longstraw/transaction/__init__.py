"""One GRPO step as a transaction: capture, score, advantages, replay, commit. It commits whole or changes nothing.

`group`: the responses of one prompt and what is known of them. `reference`: reference weights on the host, swapped in to
score. `step`: the phases on one prompt after another, and the gradient of the whole step. `commit`: what is kept to roll
back to, and the checks that a step passes before the weights move.
"""
