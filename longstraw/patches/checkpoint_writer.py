"""Save checkpoints without a helper process.

megatron-core hands a writer's results through a queue that belongs to a manager process, which it starts at the first
save of each rank and never ends: a rank that is killed leaves it behind, and a hung pipe to it blocks the save. A
synchronous save writes in the process that reads the results, so a plain queue does.
"""

import contextlib
import queue

from longstraw.patches.verify import require_attribute, require_source


@contextlib.contextmanager
def results_in_process():
    """A block in which `dist_checkpointing.save` (synchronous) starts no process.

    Raises PatchMismatch when the target in megatron-core is not what this was written for.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    require_attribute(filesystem_async, "_results_queue")
    require_source(filesystem_async.get_write_results_queue, "global _results_queue", "if _results_queue is None")
    before = filesystem_async._results_queue
    filesystem_async._results_queue = queue.Queue()
    try:
        yield
    finally:
        filesystem_async._results_queue = before
