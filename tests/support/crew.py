"""Processes that stay for a test session and run functions as ranks of groups of 1 to 4."""

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
    group as its first argument, and returns the result of each; an exception there is raised here.
    """

    def __init__(self, store, size=SIZE, timeout=60):
        context = mp.get_context("spawn")
        self.orders = [context.SimpleQueue() for _ in range(size)]
        self.pipes = [context.Pipe(duplex=False) for _ in range(size)]
        self.processes = []
        for rank, (_, writer) in enumerate(self.pipes):
            args = (rank, size, str(store), timeout, self.orders[rank], writer)
            self.processes.append(context.Process(target=_serve, args=args))
            self.processes[-1].start()
        for _, writer in self.pipes:
            writer.close()  # or the end of a process would not end its pipe

    def run(self, function, *args, ranks=2):
        """Results of ranks `0 .. ranks - 1`; raises the first error."""
        outcomes = self.outcomes(function, *args, ranks=ranks)
        for kind, result in outcomes:
            assert kind == "done", f"{kind}: {result}"
        return [result for _, result in outcomes]

    def outcomes(self, function, *args, ranks=2):
        """Of each rank `done` and its result, `raised` and (type, message), `error` and a trace, or `dead`."""
        for order in self.orders[:ranks]:
            order.put((function.__module__, function.__name__, args, ranks))
        outcomes = []
        for rank, (reader, _) in enumerate(self.pipes[:ranks]):
            assert reader.poll(PATIENCE), f"rank {rank} must answer within {PATIENCE} seconds, got nothing"
            try:
                outcomes.append(reader.recv())
            except EOFError:
                outcomes.append(("dead", None))
        return outcomes

    def stop(self):
        """End all processes."""
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
    patience = datetime.timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=patience)
    groups = {n: dist.new_group(list(range(n)), timeout=patience) for n in range(1, size + 1)}
    while (order := orders.get()) is not None:
        module, name, args, ranks = order
        try:
            function = getattr(importlib.import_module(module), name)
            answers.send(("done", function(groups[ranks], *args)))
        except Exception as error:
            if type(error).__module__.startswith("prescore") or isinstance(error, ValueError | TypeError):
                answers.send(("raised", (type(error).__name__, str(error))))
            else:
                answers.send(("error", traceback.format_exc()))
    os._exit(0)  # leaving a group waits for ranks that may be gone
