"""Dry runs in processes of their own, a few at a time: a process can be a rank of one world only, and forks share its imports."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait

import torch

_fork = multiprocessing.get_context("fork")


def run_apart(work: Callable, items: Sequence, *, jobs: int) -> list:
    """`work(item)` for each, in the order of the items, in at most `jobs` processes at a time.

    Raises what the work raises, and RuntimeError where a process ends without an answer (it was killed, or ran out of memory).
    """
    answers: dict[int, object] = {}
    running: dict[object, tuple[int, multiprocessing.Process]] = {}
    waiting = list(enumerate(items))
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                index, item = waiting.pop(0)
                ours, theirs = _fork.Pipe(duplex=False)
                process = _fork.Process(target=_answer, args=(work, item, theirs))
                process.start()
                theirs.close()
                running[ours] = index, process
            for ours in wait(list(running)):
                index, process = running.pop(ours)
                try:
                    answers[index] = ours.recv()
                except EOFError:
                    process.join()
                    raise RuntimeError(f"a dry run ended with exit code {process.exitcode} and no answer") from None
                process.join()
                if isinstance(answers[index], Exception):
                    raise answers[index]
    finally:
        for _, process in running.values():
            process.terminate()
            process.join()
    return [answers[index] for index in range(len(items))]


def _answer(work: Callable, item, pipe) -> None:
    torch.set_num_threads(1)  # the others have cores to run on too
    try:
        answer = work(item)
    except Exception as error:  # the parent raises it
        answer = error
    pipe.send(answer)
    pipe.close()
    os._exit(0)  # what the parent wants done at its end is not a fork's to do
