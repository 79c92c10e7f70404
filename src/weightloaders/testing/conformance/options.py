"""Checks of options and of recognising sources: what is declared is true, and all else is refused."""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

import weightloaders as wl
from weightloaders.errors import OptionsError
from weightloaders.loaders.options import LoaderFactory, create_loader
from weightloaders.registry import WeightLoaderRegistry
from weightloaders.testing.conformance.author import Author, expect, refusal, skip, within
from weightloaders.testing.tiny import tiny_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

_NO_OPTION = "no_such_option_of_this_loader"
_ANSWERS = ("no", "maybe", "yes")


class Options(Author):
    """Options are declared with their types, and their defaults are of these types."""

    def test_an_unknown_option_is_refused(self) -> None:
        """An option that the loader does not have is an `OptionsError` that names it."""
        error = refusal(_creating(self._factory(), {**self.options, _NO_OPTION: 1}))
        expect(
            isinstance(error, OptionsError) and _NO_OPTION in str(error),
            f"an unknown option was not refused: declare the options, rather than take **kwargs. {error or ''}",
        )

    def test_every_option_has_a_type(self) -> None:
        """Each option is annotated, in the constructor or in `Options`: only then it can be checked."""
        loader = self._factory()
        if getattr(loader, "Options", None) is None:
            bare = [p.name for p in _parameters(loader) if p.annotation is p.empty]
            expect(not bare, f"these options have no annotation, so nothing checks them: {', '.join(bare)}")

    def test_defaults_may_be_spelled_out(self) -> None:
        """Giving each option its default value is the same as leaving it out."""
        loader = self._factory()
        for name, value in _defaults(loader).items():
            error = refusal(_creating(loader, {**self.options, name: value}))
            expect(error is None, f"the default of {name!r} is refused when it is given: {error}")

    def test_a_value_of_another_type_is_refused(self) -> None:
        """No option takes just any object."""

        class Stranger:
            pass

        loader = self._factory()
        for name in _option_names(loader):
            error = refusal(_creating(loader, {**self.options, name: Stranger()}))
            expect(isinstance(error, OptionsError), f"{name!r} takes any object: declare its type. {error or ''}")

    def test_probing_answers_and_never_fails(self, tmp_path: Path) -> None:
        """`probe` answers for whatever a user may name: what is not there, another's files, a repository's name."""
        loader = self._class()
        empty, broken = tmp_path / "empty", tmp_path / "broken.bin"
        empty.mkdir()
        broken.write_bytes(b"\xff" * 100)
        for path in (
            str(tmp_path / "nowhere"),
            "org/name",
            "",
            "https://localhost:1/x",
            "a\0b",
            str(empty),
            str(broken),
        ):
            answer = _answer(loader, path, self.patience)
            if path in (str(tmp_path / "nowhere"), str(empty), str(broken)):
                expect(answer != "yes", f"`probe` says yes to {path!r}, which holds no checkpoint")

    def test_probing_claims_only_what_is_read(self, tmp_path: Path) -> None:
        """Where `probe` says yes, to its own format or another's, the loader reads it; it never says no to its own."""
        loader = self._class()
        (tmp_path / "own").mkdir()
        sources = {"own": self.write_checkpoint(tmp_path / "own", self.some_tensors())}
        for kind in ("safetensors", "torch", "binary"):
            sources[kind] = tiny_checkpoint(tmp_path / kind, kind)
        for kind, source in sources.items():
            if _answer(loader, str(source), self.patience) == "yes":
                error = refusal(partial(self.open, source))
                expect(error is None, f"`probe` says yes to a checkpoint ({kind}), which the loader refuses: {error}")
        unasked, probe = (inspect.getattr_static(kind, "probe") for kind in (wl.BaseWeightLoader, loader))
        expect(
            probe is unasked or not self.recognised or _answer(loader, str(sources["own"]), self.patience) != "no",
            "`probe` says no to a checkpoint that the loader reads, so that it must be named; if that is meant, say "
            "`recognised = False`",
        )

    def _factory(self) -> LoaderFactory:
        loader = self.given_loader
        if isinstance(loader, wl.BaseWeightLoader):
            skip("an instance takes no options")
        found: Any = WeightLoaderRegistry.get(loader) if isinstance(loader, str) else loader
        factory: LoaderFactory = found
        return factory

    def _class(self) -> type[wl.BaseWeightLoader]:
        return type(self.created_loader())


def _creating(loader: LoaderFactory, options: Mapping[str, Any]) -> Callable[[], object]:
    return lambda: create_loader(loader, options, name="loader")


def _parameters(loader: LoaderFactory) -> list[inspect.Parameter]:
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p for p in inspect.signature(loader).parameters.values() if p.kind in named]


def _defaults(loader: LoaderFactory) -> Mapping[str, Any]:
    declared = getattr(loader, "Options", None)
    if declared is None:
        return {p.name: p.default for p in _parameters(loader) if p.default is not p.empty}
    return {
        name: field.get_default(call_default_factory=True)
        for name, field in declared.model_fields.items()
        if not field.is_required()
    }


def _option_names(loader: LoaderFactory) -> list[str]:
    declared = getattr(loader, "Options", None)
    if declared is not None:
        return [name for name, field in declared.model_fields.items() if not _takes_anything(field.annotation)]
    return [p.name for p in _parameters(loader) if not _takes_anything(p.annotation)]


def _takes_anything(annotation: Any) -> bool:
    return annotation in (Any, object, "Any", "object") or Any in get_args(annotation)


def _answer(loader: type[wl.BaseWeightLoader], path: str, patience: float) -> str:
    __tracebackhide__ = True
    probed: list[Any] = []
    error = within(patience, lambda: refusal(lambda: probed.append(loader.probe(path))))
    expect(error is None, f"`probe` fails for {path!r}: {error}")
    (answer,) = probed
    expect(
        isinstance(answer, wl.Probe) and answer.answer in _ANSWERS,
        f"`probe` answered {answer!r} for {path!r}, not a Probe",
    )
    said: str = answer.answer
    return said
