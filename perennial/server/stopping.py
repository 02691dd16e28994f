"""Early stopping of a task by the sites' validation counts, with the best model kept across crashes.

What a checkpoint remembers is one JSON object (Progress.stopping); the best model lies in a file of its own,
which is named by its content and written before the checkpoint that names it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from perennial.config.rounds import StoppingConfig
from perennial.foundation.files import replace_file
from perennial.foundation.tensor_file import pieces
from perennial.protocol.tensors import content_sha256
from perennial.server.checkpoint import load_model
from perennial.server.metrics import balanced_accuracy


class Stopping:
    """The early stopping of one run. config: None: every task has all its rounds, and the last one's model.

    state: of the task that is being trained, JSON-able; empty before its first round.
    """

    def __init__(self, config: StoppingConfig | None, folder: Path, state: dict[str, Any]) -> None:
        self.config, self._folder, self.state = config, folder, state

    def judged(
        self, number: int, counts: tuple[Sequence[int], Sequence[int | None]], arrays: Mapping[str, Tensor]
    ) -> float | None:
        """Judge a round's model by the sites' counts; returns the measure, None if no site reported.

        number: of the round. counts: right answers and samples of each class. arrays: the model.
        """
        assert self.config is not None
        value = balanced_accuracy(*counts)
        if value is None:
            return None
        best = self.state.get("value")
        if best is None or value > best + self.config.gain:
            before = self.state.get("model", "")
            self.state.update(value=value, round=number, since=0, model=self._keep(arrays, before))
        else:
            self.state["since"] += 1
        return value

    @property
    def over(self) -> bool:
        """Whether the task has ended before its last round."""
        patience = None if self.config is None else self.config.patience
        return patience is not None and self.state.get("since", 0) >= patience

    def best(self) -> dict[str, Tensor] | None:
        """The model to go on with in place of the last round's; None if the last round's is the best.

        Raises StateError when its file is missing or damaged.
        """
        if self.config is None or not self.state.get("since"):
            return None
        return load_model(self._path(self.state["model"]), self.state["model"])

    def in_words(self, task: int, last: int, planned: int) -> str:
        """The journal's words at a task's end, or ''. last: the last round run, of `planned` rounds."""
        if self.config is None or "value" not in self.state:
            return ""
        best = (
            f"validation was best in round {self.state['round']} "
            f"(balanced accuracy {100 * self.state['value']:.1f} %)"
        )
        kept = ", whose model is kept" if self.state["since"] else ""
        if last < planned:
            return f"task {task}: stopped after round {last} of {planned}; {best}{kept}"
        return f"task {task}: {best}{kept}"

    def next_task(self) -> None:
        """Forget the task's state; the best model's file stays, because a run may have to go back to it."""
        earlier = self.state.get("model", "")
        self.state.clear()
        if earlier:
            self.state["earlier"] = earlier

    def _keep(self, arrays: Mapping[str, Tensor], before: str) -> str:
        """Write a model; the one before it stays, because the checkpoint still names it."""
        sha256 = content_sha256(arrays)
        path = self._path(sha256)
        if not path.exists():
            replace_file(path, pieces(arrays))
        named = {path, self._path(before), self._path(self.state.get("earlier", ""))}
        for old in set(self._folder.glob("best-*.safetensors")) - named:
            old.unlink(missing_ok=True)
        return sha256

    def _path(self, sha256: str) -> Path:
        return self._folder / f"best-{sha256}.safetensors"
