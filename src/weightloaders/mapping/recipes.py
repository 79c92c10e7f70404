"""From plain data back to the function of a group: for plans that are read back.

A function is never imported on a document's word. Ready-made layouts, and what the model or transformers declares, are
known here; anything else has to be admitted by the caller.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from weightloaders.errors import RuleError
from weightloaders.mapping.conversion import Convert, dotted_name
from weightloaders.mapping.layouts import LAYOUTS
from weightloaders.mapping.transformers import ConversionMapper, is_transformers_model

if TYPE_CHECKING:
    import torch
    from torch import nn

    from weightloaders.mapping.transformers import HasDtype

Trusted = str | Callable[..., Any]
GroupFunction = Callable[[Sequence[Any]], Mapping[str, "torch.Tensor"]]


@runtime_checkable
class Recipe(Protocol):
    """A group's function that can say what makes it again."""

    def as_data(self) -> dict[str, Any]:
        """What makes it again, as plain data.

        Raises:
            RuleError: If a part of it has no name by which it could be found again.
        """


class FunctionMaker:
    """Makes functions again.

    Args:
        model: The model that they are to work for.
        own: Its names, with what has the dtype that each is to have.
        trust: The functions that are admitted beside what is known here: themselves, or as
            ``"package.module:function"``.

    Raises:
        RuleError: If something that is trusted is no function with a name.
    """

    def __init__(self, model: nn.Module, own: Mapping[str, HasDtype], trust: Sequence[Trusted] = ()) -> None:
        self._model, self._own = model, own
        self._trusted = dict(map(_named, trust))

    def function(self, data: Mapping[str, Any]) -> GroupFunction:
        """The function that a recipe is of.

        Raises:
            RuleError: If it is not known, not admitted, or can't be made for this model.
        """
        makers = {"convert": self._convert, "transformers": self._transformers}
        try:
            return makers[data["kind"]](data)
        except RuleError:
            raise
        except Exception as error:
            # Whatever a damaged document asks for.
            raise RuleError(f"the function of a step can't be made again: {type(error).__name__}: {error}") from error

    def _convert(self, data: Mapping[str, Any]) -> GroupFunction:
        name = data["function"]
        function = name if name in LAYOUTS else self._trusted.get(name)
        if function is None:
            raise RuleError(
                f"the plan would run {name!r}, which is not one of the ready-made layouts",
                hint=f"if you trust it: plan_load(model, weights, plan=plan, trust=[{name!r}])",
            )
        convert = Convert(data["sources"], data["targets"], function, **data["sizes"])
        return convert.group(tuple(data["shared"]), None).function

    def _transformers(self, data: Mapping[str, Any]) -> GroupFunction:
        again = self._mapper and self._mapper.conversion_again(
            data["target"], data["patterns"], data["operations"], data["sources"]
        )
        if not again:
            raise RuleError(
                f"transformers has no conversion by {', '.join(data['operations'])} for {data['target']} any more",
                hint="its version, or the model, is another one; make the plan again",
            )
        return again

    @functools.cached_property
    def _mapper(self) -> ConversionMapper | None:
        return ConversionMapper(self._model, self._own) if is_transformers_model(self._model) else None


def _named(trusted: Any) -> tuple[str, Trusted]:
    name = trusted if isinstance(trusted, str) else callable(trusted) and dotted_name(trusted)
    if not name:
        raise RuleError(
            f"trust takes functions that have a name, and names like 'package.module:function', not {trusted!r}"
        )
    return name, trusted
