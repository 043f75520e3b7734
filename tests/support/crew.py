"""Processes that stay for a whole test session and run what they are told, as ranks of groups of 2, 3 and 4."""

import datetime
import importlib
import os
import traceback

import torch.multiprocessing as mp

SIZE = 4
PATIENCE = 90


class Crew:
    """`SIZE` spawned processes, joined by gloo.

    `crew.run(function, ..., ranks=2)` calls a function of a module on the first two of them, with the process
    group as its first argument, and returns what each gave back; an exception there is raised here.
    """

    def __init__(self, store, size=SIZE, timeout=60):
        context = mp.get_context("spawn")
        self.orders = [context.SimpleQueue() for _ in range(size)]
        self.pipes = [context.Pipe(duplex=False) for _ in range(size)]
        self.processes = [
            context.Process(
                target=_serve, args=(rank, size, str(store), timeout, self.orders[rank], self.pipes[rank][1])
            )
            for rank in range(size)
        ]
        for process in self.processes:
            process.start()
        for _, writer in self.pipes:
            writer.close()  # or the end of a process would not be the end of its answers

    def run(self, function, *args, ranks=2):
        """Results of ranks `0 .. ranks - 1`; raises the first error."""
        found = self.outcomes(function, *args, ranks=ranks)
        for kind, result in found:
            if kind != "done":
                raise AssertionError(f"{kind}: {result}")
        return [result for _, result in found]

    def outcomes(self, function, *args, ranks=2):
        """`("done", result)`, `("raised", (type name, message))` or `("error", traceback)` of each rank."""
        for rank in range(ranks):
            self.orders[rank].put((function.__module__, function.__name__, args, ranks))
        found = []
        for rank in range(ranks):
            reader = self.pipes[rank][0]
            if not reader.poll(PATIENCE):
                raise AssertionError(f"rank {rank} must answer within {PATIENCE} seconds, got nothing")
            try:
                found.append(reader.recv())
            except EOFError:
                found.append(("dead", None))
        return found

    def stop(self):
        """Let all go home."""
        for order in self.orders:
            order.put(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.terminate()


def _serve(rank, size, store, timeout, orders, answers):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=timeout),
    )
    patience = datetime.timedelta(seconds=timeout)
    groups = {n: dist.new_group(list(range(n)), timeout=patience) for n in range(1, size + 1)}
    while (order := orders.get()) is not None:
        module, name, args, ranks = order
        try:
            function = getattr(importlib.import_module(module), name)
            answers.send(("done", function(groups[ranks], *args)))
        except (ValueError, TypeError, RuntimeError) as error:
            if type(error).__module__.startswith("prescore") or isinstance(error, ValueError | TypeError):
                answers.send(("raised", (type(error).__name__, str(error))))
            else:
                answers.send(("error", traceback.format_exc()))
        except Exception:
            answers.send(("error", traceback.format_exc()))
    os._exit(0)  # leaving a group waits for ranks that may be gone
