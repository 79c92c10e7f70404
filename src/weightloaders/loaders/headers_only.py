"""Whether only headers are wanted: then a loader that would download a checkpoint first leaves it where it is."""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

T = TypeVar("T")

# What was asked so far, where only headers are wanted.
_answers: ContextVar[dict[Hashable, Any] | None] = ContextVar("weightloaders_headers_only", default=None)


@contextlib.contextmanager
def headers_only() -> Iterator[None]:
    """Within this, what is opened is only to be described, or to be read in parts: nothing is downloaded for it."""
    answers = _answers.get()
    token = _answers.set({} if answers is None else answers)
    try:
        yield
    finally:
        _answers.reset(token)


def only_headers_are_wanted() -> bool:
    """Whether what is opened now is only to be described, or to be read in parts: nothing is downloaded for it then."""
    return _answers.get() is not None


def asked_once(question: Hashable, ask: Callable[[], T]) -> T:
    """The answer to a question, got once within one `headers_only`: a branch then stands for one commit throughout."""
    answers = _answers.get()
    if answers is None:
        return ask()
    if question not in answers:
        answers[question] = ask()
    answer: T = answers[question]
    return answer
