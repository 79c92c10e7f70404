"""The processes that fill one model together, each with its part of the parameters.

What one of them leaves unused of a tensor another may use, so only together do they know whether a tensor was cut to
fit, or used by nobody. And where one fails, all have to end.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import get_world_group

from weightloaders.errors import LoadError, summary

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from weightloaders.transfer.coverage import Covered


class Ranks:
    """Rounds in which each process says something and hears what all the others have said.

    Nobody waits for one that has left: by an error, which all hear of, or because it was done.

    Attributes:
        number: How many processes there are.
    """

    def __init__(self) -> None:
        group = get_world_group()
        self.number: int = group.world_size
        self._group: Any = group.cpu_group
        self._all_there = self.number > 1

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Fail here if the block fails in any of the processes.

        Raises:
            LoadError: If it failed in another one.
        """
        try:
            yield
        except Exception as error:
            with contextlib.suppress(LoadError):
                self._round(summary(error))
            raise
        self._round(None)

    def unite(self, covered: Covered) -> Covered:
        """What all of them used of the source; what each filled stays its own.

        Raises:
            LoadError: If another one has failed.
        """
        said = self._round(replace(covered, filled=[], missing=[], touched=[], changed={}, unseen=[]))
        if not all(said):
            # Somebody was not watched.
            return replace(covered, cut={}, unused=[], untaken=[])
        cut = {
            name: part
            for name, part in covered.cut.items()
            # Who neither cut it nor left it has used all of it.
            if all(name in other.cut or name in (*other.unused, *other.untaken) for other in said)
            and not part.is_made_whole_by(other.cut[name] for other in said if name in other.cut)
        }
        return replace(
            covered, cut=cut, used=any(other.used for other in said),
            unused=[name for name in covered.unused if all(name in other.unused for other in said)],
            untaken=[name for name in covered.untaken if all(name in other.untaken for other in said)],
        )  # fmt: skip

    def _round(self, said: Covered | str | None) -> Sequence[Any]:
        """What all have said: what they did, an error's words, or None from who is done."""
        if not self._all_there:
            return [None]
        answers: list[Any] = [None] * self.number
        try:
            torch.distributed.all_gather_object(answers, said, group=self._group)
        except RuntimeError as error:
            self._all_there = False
            raise LoadError(f"another of the {self.number} ranks that load this model has ended: {error}") from error
        self._all_there = all(answer is not None and not isinstance(answer, str) for answer in answers)
        failed = [(rank, answer) for rank, answer in enumerate(answers) if isinstance(answer, str)]
        if failed and not isinstance(said, str):
            raise LoadError(f"rank {failed[0][0]} of {self.number} could not load the model: {failed[0][1]}")
        return answers
