"""Which parallel sizes a world of ranks can be cut into. Pure: no torch, no Megatron, so that flags can be checked first."""


def find_misfits(world: int, *, tensor_parallel: int, context_parallel: int, expert_parallel: int) -> list[str]:
    """One sentence, naming the flags, for each way in which the sizes do not fit `world` ranks or each other.

    What is left of the world over tensor x context parallelism is data parallel. Expert-parallel ranks are neighbours:
    they are a part of one replica's context-parallel ranks, or whole replicas.
    """
    found = []
    if world % (tensor_parallel * context_parallel):
        found.append(
            f"--tensor-model-parallel-size {tensor_parallel} x --context-parallel-size {context_parallel} does not "
            f"divide the {world} ranks"
        )
    if world % (tensor_parallel * expert_parallel):
        found.append(
            f"--tensor-model-parallel-size {tensor_parallel} x --expert-model-parallel-size {expert_parallel} does not "
            f"divide the {world} ranks"
        )
    elif context_parallel % expert_parallel and expert_parallel % context_parallel:
        found.append(
            f"--expert-model-parallel-size {expert_parallel} neither divides --context-parallel-size "
            f"{context_parallel} nor is a multiple of it: experts would be spread over a part of a replica"
        )
    return found
