"""Carries out the steps of a turn: each by itself, or as replays of one recorded CUDA graph.

A step of a small network is hundreds of kernels, each started from Python: the GPU waits for the processor.
A graph starts all of them in one call. It runs the same kernels in the same order, on the memory in which it
was recorded, so the inputs of each step are copied there first.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from perennial.foundation.errors import ConfigError
from perennial.foundation.site_log import log

Work = Callable[..., None]
"""One step, on its inputs; it must do the same in every step."""
Recorder = Callable[[Callable[[], None]], Callable[[], None]]
"""Records what a call would do, without doing it, and returns what does it."""
DRAWS_ANEW = "the strategy's own term draws its samples anew in each step"
GPU_OPTIONS = ("graphs", "benchmark")


class Steps:
    """Carries out training steps one operation at a time."""

    records = False
    """Whether steps are recorded, so that everything that changes between them must lie on the device."""

    @contextmanager
    def turn(self, obstacle: str = "") -> Iterator["Steps"]:
        """A context that gives what carries out the steps of one turn.

        obstacle: why no two steps of the turn are alike, in words; '' if they are.
        """
        yield self

    def __call__(self, work: Work, *inputs: Tensor, layout: Hashable = None) -> None:
        """Do work(*inputs). layout: what else two steps must have in common to be alike."""
        work(*inputs)


class GraphedSteps(Steps):
    """Records the second step of each shape, and replays it from then on; the first one warms up.

    Only steps of one turn share a recording, because each turn has memory of its own, and gives it back. What
    cannot be recorded is carried out one operation at a time, and the log says why, once for each reason.
    """

    records = True

    def __init__(self, recorder: Callable[[], Recorder]) -> None:
        """recorder: called at the beginning of each turn, returns a new Recorder for its steps."""
        self._recorder = recorder
        self._logged: set[str] = set()

    @contextmanager
    def turn(self, obstacle: str = "") -> Iterator[Steps]:
        if obstacle:
            self._tell(obstacle)
            yield Steps()
            return
        record = self._recorder()
        turn = _Turn(record, self._tell)
        with getattr(record, "stream", nullcontext)():
            try:
                yield turn
            finally:
                turn.forget()

    def _tell(self, reason: str) -> None:
        if reason not in self._logged:
            self._logged.add(reason)
            log.warning("no CUDA graph for the steps: %s; they run one operation at a time", reason)


class _Turn(Steps):
    records = True

    def __init__(self, record: Recorder, tell: Callable[[str], None]) -> None:
        self._record, self._tell = record, tell
        self._seen: set[Hashable] = set()
        self._recorded: dict[Hashable, tuple[list[Tensor], Callable[[], None]]] = {}
        self._able = True

    def forget(self) -> None:
        """Let the recordings go, with the memory that they hold."""
        self._recorded.clear()

    def __call__(self, work: Work, *inputs: Tensor, layout: Hashable = None) -> None:
        key = (layout, *((each.shape, each.stride(), each.dtype) for each in inputs))
        if key not in self._recorded:
            if key not in self._seen or not self._able:
                self._seen.add(key)
                work(*inputs)
                return
            own = [torch.empty_like(each) for each in inputs]
            try:
                self._recorded[key] = own, self._record(lambda: work(*own))
            except (RuntimeError, NotImplementedError) as error:
                self._able = False
                self._tell(str(error).splitlines()[0])
                work(*inputs)
                return
        own, replay = self._recorded[key]
        for mine, given in zip(own, inputs, strict=True):
            mine.copy_(given)
        replay()


class CudaGraphs:
    """Records steps as CUDA graphs on a stream of their own, in memory that the graphs of a turn share.

    stream: on which all turns of a process record. PyTorch keeps freed memory for the stream that used it, so
    that a stream for each turn would hold a share of the GPU each.
    """

    def __init__(self, device: torch.device, stream: Any) -> None:
        self._device = device
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def stream(self) -> Iterator[None]:
        """A context in which the GPU's work goes to the recording stream, after what is queued already."""
        outer = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outer)
        with torch.cuda.stream(self._stream):
            yield
        outer.wait_stream(self._stream)
        # PyTorch keeps the memory of graphs that are gone until the GPU is full, for all who share it
        torch.cuda.empty_cache()

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # not `with torch.cuda.graph`: it collects garbage and gives all memory back before each recording
        torch.cuda.synchronize(self._device)
        graph.capture_begin(pool=self._pool)
        try:
            work()
        except BaseException:
            # the error that broke the recording is the one that says why
            with suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
        return graph.replay


AS_THEY_COME = Steps()
_graphed: dict[str, GraphedSteps] = {}


def parse_gpu_options(words: str) -> frozenset[str]:
    """The set of options in a setting, separated by commas. Raises ConfigError naming an unknown one."""
    found = frozenset(word.strip() for word in words.split(",") if word.strip())
    if unknown := sorted(found.difference(GPU_OPTIONS)):
        raise ConfigError(f"gpu: found {', '.join(unknown)!r}, allowed {', '.join(GPU_OPTIONS)}")
    return found


def prepare_gpu(words: str, device: torch.device) -> Steps:
    """Set what this process may do on its GPU, and return what carries out steps there.

    words: graphs, benchmark, or both with a comma between. graphs: steps are replayed as CUDA graphs.
    benchmark: cuDNN tries its algorithms for each shape and takes the fastest, which may be another one in
    the next run, with other last bits. Without it algorithms are deterministic; of an operation that has
    none PyTorch warns by name. Raises ConfigError when there is an option and no GPU.
    """
    options = parse_gpu_options(words)
    if options and device.type != "cuda":
        raise ConfigError(f"gpu: found {words!r} on device {device}, allowed on a GPU alone")
    if device.type == "cuda":
        tries = "benchmark" in options
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = tries, not tries
        torch.use_deterministic_algorithms(not tries, warn_only=True)
        # new memory is written before it is read here, and need not be filled
        deterministic: Any = torch.utils.deterministic
        deterministic.fill_uninitialized_memory = False
    if "graphs" not in options:
        return AS_THEY_COME
    if str(device) not in _graphed:
        own: Any = torch.cuda.Stream(device)
        _graphed[str(device)] = GraphedSteps(lambda: CudaGraphs(device, own))
    return _graphed[str(device)]
