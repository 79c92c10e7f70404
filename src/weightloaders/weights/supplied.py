"""The tensors of a source that has a way of its own to read many of them, as that way hands them out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightloaders.errors import LoaderContractError, SourceReadError, WeightLoadersError, summary
from weightloaders.weights.weights import Stream

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    import torch

    from weightloaders.weights.info import TensorInfo


class Supplied:
    """Tensors with what is known of them, in the order in which their source hands them out. To be iterated over once.

    Args:
        infos: The tensors that are wanted.
        stream: See `weightloaders.Weights.describe`.

    Attributes:
        most_held: Bytes of the largest: the one that was handed out last is not the source's alone.
        reads: How many positioned reads were begun; of those that a source does by itself nobody knows.
    """

    def __init__(
        self, infos: Sequence[TensorInfo], stream: Callable[[Sequence[str]], Iterable[tuple[str, torch.Tensor]]]
    ) -> None:
        self._wanted = {info.name: info for info in infos}
        self._stream = stream
        self.most_held = max((info.nbytes for info in infos), default=0)
        self.reads = 0

    def __iter__(self) -> Generator[tuple[TensorInfo, torch.Tensor]]:
        if not self._wanted:
            return
        lacking, last = dict(self._wanted), None
        pairs = None
        try:
            pairs = self._stream(list(lacking))
            for name, tensor in Stream(pairs):
                info = lacking.pop(name, None)
                if info is None:
                    why = "twice" if name in self._wanted else "unasked"
                    raise LoaderContractError(f"the source's own stream handed out tensor {name!r} {why}", tensor=name)
                yield info, tensor
                last = name
                # What is no longer needed gives its memory to the next.
                del tensor
        except (WeightLoadersError, KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:
            after = f" after tensor {last!r}" if last is not None else ""
            raise SourceReadError(f"the source's own way to read failed{after}: {summary(error)}") from error
        finally:
            # It may hold what it opened until somebody says that no more is wanted.
            close = getattr(pairs, "close", None)
            if callable(close):
                close()
        if lacking:
            first = next(iter(lacking))
            raise SourceReadError(
                f"the source's own stream ended without tensor {first!r}"
                + (f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""),
                tensor=first,
            )
