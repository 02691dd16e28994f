"""Work dealt to the machines of a Ray cluster; answers come back to the one that asked.

Moritz et al. 2018 (arXiv 1712.05889).
"""

from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

from perennial.foundation.errors import ConfigError

Given = TypeVar("Given")
Answer = TypeVar("Answer")
MOST_TRIES = 3
"""Of one piece of work, when machines that do it are lost."""


def connect() -> None:
    """Join the cluster of RAY_ADDRESS, or the one that runs on this machine, unless this process is in one.

    Raises ConfigError where Ray is not installed or no cluster answers.
    """
    try:
        version("ray")
    except PackageNotFoundError:
        raise ConfigError("--on ray: Ray is not installed; pip install perennial[simulation]") from None
    import ray

    if ray.is_initialized():
        return
    try:
        ray.init(address="auto", log_to_driver=False)
    except ConnectionError as error:
        raise ConfigError(
            "--on ray: no cluster answers; start one with `ray start --head`, join other machines with "
            f"`ray start --address=HOST:6379`, or name one in RAY_ADDRESS ({error})"
        ) from error


def on_cluster(
    given: Sequence[Given], work: Callable[[Given, str], Answer], device: str
) -> Iterator[tuple[Given, Answer]]:
    """(what was given, work(given, device)) as each is done, in any order.

    The cluster decides how many run at the same time: each takes one core of a machine, and one GPU where
    device is cuda. Raises what work raised; the rest is given up then.
    """
    import ray

    connect()
    gpus = 1 if device.startswith("cuda") else 0
    remote: Any = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=MOST_TRIES - 1)(work)
    waiting: dict[Any, Given] = {remote.remote(each, device): each for each in given}
    try:
        while waiting:
            [done], _ = ray.wait(list(waiting), num_returns=1)
            yield waiting.pop(done), ray.get(done)
    finally:
        for run in waiting:
            ray.cancel(run, force=True)
