"""One thread stopped at a step of its way while another goes all of its own: every order of two that matters, surely.

Threads left to themselves come in each other's way now and then. Here it is arranged: what a loader's code does is
followed line by line and call by call, and at one of these steps after the other it is kept waiting.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

_NO_LOADERS = {*sys.stdlib_module_names, "torch", "numpy"}
_T = TypeVar("_T")
# More than a reader has steps; one that interprets a format has many, which are alike.
_MOST = 300
# A thread that waits for a lock will not come back before the first one goes on.
_SECONDS_FOR_THE_OTHER = 0.25


class Step(NamedTuple):
    """A place in a loader's code at which it can be kept waiting.

    Attributes:
        code: The function.
        instruction: Where in it.
        is_call: Whether it is behind a call of what is not written in Python, such as a file's ``seek``.
        line: The line, for people.
    """

    code: CodeType
    instruction: int
    is_call: bool
    line: int

    def __str__(self) -> str:
        return f"{self.code.co_filename}:{self.line}, in {self.code.co_name}"


def steps_of(function: Callable[[], object]) -> list[Step]:
    """The steps that a function takes in the code of a loader, each once; those behind calls come first."""
    found: dict[Step, None] = {}
    _followed(function, found.setdefault)
    return sorted(found, key=lambda step: not step.is_call)[:_MOST]


class Turns(NamedTuple):
    """What came of two threads that took turns.

    Attributes:
        one: What the one returned that was kept waiting.
        other: What the other returned; None if it came to nothing.
        in_vain: Whether the first had to go on before the other was done, which needed a lock of it.
    """

    one: Any
    other: Any
    in_vain: bool


def take_turns(one: Callable[[], object], other: Callable[[], object], at: Step) -> Turns:
    """Call a function, keep it waiting where it first comes to a step, and have another thread call another one there.

    Raises:
        BaseException: Whatever one of the two raises.
    """
    returned: list[object] = []
    raised: list[BaseException] = []
    in_vain = False

    def work() -> None:
        try:
            returned.append(other())
        except BaseException as error:  # noqa: BLE001 -- raised again where it was asked for
            raised.append(error)

    # A daemon: one that hangs must not keep the tests from ending.
    thread = threading.Thread(target=work, daemon=True)

    def arrive(step: Step) -> None:
        nonlocal in_vain
        if step == at and thread.ident is None:
            thread.start()
            thread.join(_SECONDS_FOR_THE_OTHER)
            in_vain = thread.is_alive()

    try:
        first = _followed(one, arrive)
    finally:
        if thread.ident is not None:
            thread.join()
    if raised:
        raise raised[0]
    return Turns(first, returned[0] if returned else None, in_vain)


def _followed(function: Callable[[], _T], arrive: Callable[[Step], object]) -> _T:
    """Call a function, and tell of each step that it takes in the code of a loader."""

    def follow(frame: FrameType, event: str, _: Any) -> Any:
        if not _is_the_loaders(frame):
            return None
        if event in ("line", "c_return"):
            arrive(Step(frame.f_code, frame.f_lasti, event == "c_return", frame.f_lineno))
        return follow

    before = sys.gettrace(), sys.getprofile()
    sys.settrace(follow)
    sys.setprofile(follow)
    try:
        return function()
    finally:
        sys.setprofile(before[1])
        sys.settrace(before[0])


def _is_the_loaders(frame: FrameType) -> bool:
    """Whether it is a loader's code that runs, or what that called."""
    first: FrameType = frame
    caller: FrameType | None = frame
    while caller is not None and _package_of(caller) != "weightloaders":
        first, caller = caller, caller.f_back
    # What this library has called is its own affair, unless it is the loader.
    return first is not caller and _package_of(first) not in _NO_LOADERS


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]
