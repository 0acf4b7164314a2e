"""Serves requests that arrive at random in batches: dynamic batching, as in a server.

`ort_runner.py`, in the same folder, runs this file if a job has a queue. It needs only numpy.
"""

import time
from typing import Any

import numpy as np
import numpy.typing as npt

Inputs = dict[str, npt.NDArray[Any]]


def serve_queue(
    session: Any, inputs: Inputs, queue: dict[str, Any], count: int
) -> tuple[list[Any], list[float], float]:
    """Returns the outputs of one request, the milliseconds from each request to its answer, and those of all together.

    A batch starts when it is full, or when its oldest request has waited for `wait_ms`, with the requests present then.
    """
    most: int = queue["most"]
    wait_s: float | None = None if queue["wait_ms"] is None else queue["wait_ms"] / 1e3
    batches = [stack_rows(inputs, queue["rows"], size) for size in range(1, most + 1)]
    # One run for each batch size first, because memory is planned anew for each size: that must not be timed.
    warm = [session.run(None, batch) for batch in batches]
    # A Poisson process with a fixed seed, so that only the machine varies from run to run.
    pauses: list[float] = np.random.default_rng(0).exponential(1 / queue["rate_per_s"], count).tolist()
    due: list[float] = np.cumsum(np.asarray(pauses)).tolist()
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < count:
        done = len(times)
        full = due[min(done + most, count) - 1]
        ready = full if wait_s is None else min(full, due[done] + wait_s)
        time.sleep(max(0.0, begin + ready - time.perf_counter()))
        now, size = max(ready, time.perf_counter() - begin), 1
        while size < min(most, count - done) and due[done + size] <= now:
            size += 1
        session.run(None, batches[size - 1])
        end = time.perf_counter() - begin
        times += [(end - at) * 1e3 for at in due[done : done + size]]
    return list(warm[0]), times, (time.perf_counter() - begin) * 1e3


def stack_rows(inputs: Inputs, rows: list[str], size: int) -> Inputs:
    """Returns a batch of `size` equal requests; inputs without a batch axis stay as they are."""
    return {name: np.concatenate([value] * size) if name in rows else value for name, value in inputs.items()}
