"""Options of loaders: checked against what a loader declares, before it is created.

A loader declares them as a pydantic model (``Options``) or, without one, by its constructor's signature. Scalars are
never converted: ``"6"`` is no int and ``"False"`` no bool. What a config file can't write as such is: a list becomes
a tuple, a string a path, an enum's member or a dtype, a mapping a nested model.
"""

from __future__ import annotations

import collections.abc
import enum
import functools
import inspect
import pathlib
import sys
import types
import typing
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from weightloaders.discovery import did_you_mean
from weightloaders.errors import BrokenPluginError, LoaderContractError, OptionsError, WeightLoadersError, summary
from weightloaders.loaders.base import BaseWeightLoader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pydantic import BaseModel, ValidationError

LoaderFactory = collections.abc.Callable[..., BaseWeightLoader]
"""A `BaseWeightLoader` subclass, or a function that returns an instance of one."""

# Names that authors often import for type checkers only, so that an annotation is known all the same.
_USUAL_NAMES: dict[str, Any] = {
    **{name: value for name, value in vars(typing).items() if name in typing.__all__},
    **{name: value for name, value in vars(collections.abc).items() if name in collections.abc.__all__},
    "Path": pathlib.Path,
    "pathlib": pathlib,
}


def create_loader(
    loader: LoaderFactory, options: Mapping[str, Any], *, name: str, plugin: str | None = None
) -> BaseWeightLoader:
    """Create a loader from options that are checked first.

    Args:
        loader: The class, or a factory.
        options: Keyword arguments for it.
        name: How messages call the loader.
        plugin: Who offers it, for messages.

    Raises:
        OptionsError: If an option is unknown, missing or ill-typed, or the constructor refuses it.
        BrokenPluginError: If the constructor fails for another reason.
        LoaderContractError: If a factory returns anything but a loader.
    """
    try:
        created = loader(**validate_options(loader, options, name=name, plugin=plugin))
    except (WeightLoadersError, KeyboardInterrupt):
        raise
    except (TypeError, ValueError) as error:
        raise OptionsError(f"the loader {name!r} refused its options: {summary(error)}", plugin=plugin) from error
    except BaseException as error:
        raise BrokenPluginError(f"creating the loader {name!r} failed: {summary(error)}", plugin=plugin) from error
    if not isinstance(created, BaseWeightLoader):
        raise LoaderContractError(
            f"the factory of {name!r} returned a {type(created).__name__}, not a BaseWeightLoader", plugin=plugin
        )
    # A loader may be a frozen dataclass, which refuses this in the usual way.
    object.__setattr__(created, "_created_as", (name, plugin))
    return created


def validate_options(
    loader: LoaderFactory, options: Mapping[str, Any], *, name: str | None = None, plugin: str | None = None
) -> dict[str, Any]:
    """The options as keyword arguments for the loader: those that were given, converted where that is allowed.

    Args:
        loader: The class, or a factory.
        options: What the user gave.
        name: How messages call the loader. Default: the class's own name.
        plugin: Who offers it, for messages.

    Raises:
        OptionsError: Names every option that is unknown, missing or ill-typed, and what would be allowed.
        LoaderContractError: If ``Options`` is no pydantic model.
    """
    name = name or getattr(loader, "__name__", repr(loader))
    given: Any = options  # often straight from a config file, so its type is a hope
    if not isinstance(given, collections.abc.Mapping) or not all(isinstance(key, str) for key in given):
        raise OptionsError(f"the options of {name!r} must be a mapping of names to values, not {options!r}")
    declared = getattr(loader, "Options", None)
    if declared is None:
        arguments, problems = _by_signature(loader, options)
    else:
        arguments, problems = _by_model(declared, options)
    if problems:
        raise OptionsError("\n".join([f"the loader {name!r} can't take these options:", *problems]), plugin=plugin)
    return arguments


# ------------------------------------------------------------------ by signature


def _by_signature(loader: LoaderFactory, options: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    try:
        parameters = inspect.signature(loader).parameters.values()
    except (TypeError, ValueError):  # a callable written in C says nothing, so it must check for itself
        return dict(options), []
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    anything = next((p for p in parameters if p.kind is p.VAR_KEYWORD), None)
    nameless = {p.name for p in parameters if p.kind is p.POSITIONAL_ONLY}

    arguments, problems = {}, []
    for key, value in options.items():
        parameter = named.get(key, anything)
        if parameter is None:
            problems.append(_nameless(key) if key in nameless else _unknown(key, named))
            continue
        arguments[key], found = _check(key, value, _annotation(loader, parameter))
        problems += found
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    for parameter in required:
        if parameter.kind is parameter.POSITIONAL_ONLY:
            problems.append(_nameless(parameter.name))
        elif parameter.name not in options:
            problems.append(f"  {parameter.name}: is required")
    return arguments, list(dict.fromkeys(problems))


def _unknown(key: str, known: Iterable[str]) -> str:
    allowed = ", ".join(sorted(known))
    return f"  {key}: unknown{did_you_mean(key, known)} (allowed: {allowed or 'none'})"


def _nameless(key: str) -> str:
    return f"  {key}: is a positional-only parameter, which can't be given by name"


def _annotation(loader: LoaderFactory, parameter: inspect.Parameter) -> Any:
    """What a parameter is declared as, or `Any` where that is nothing or can't be found out."""
    annotation = parameter.annotation
    if annotation is parameter.empty:
        return Any
    try:
        # `get_type_hints` evaluates strings, also inside other annotations, for whatever has `__annotations__`.
        holder = types.SimpleNamespace(__annotations__={"value": annotation})
        annotation = typing.get_type_hints(holder, _names_seen_by(loader, annotation), include_extras=True)["value"]
    except Exception:  # noqa: BLE001 -- an annotation is an expression of the author's, and may fail in any way
        return Any
    # `size: int = None` is how optional parameters used to be written.
    return annotation | None if parameter.default is None else annotation


def _names_seen_by(loader: Any, annotation: object) -> dict[str, Any]:
    while isinstance(loader, functools.partial):
        loader = loader.func
    if isinstance(loader, type):
        constructors = (getattr(loader, "__init__", None), getattr(loader, "__new__", None))
        loader = next((c for c in constructors if isinstance(c, types.FunctionType)), loader)
    elif not hasattr(loader, "__globals__"):
        loader = getattr(loader, "__call__", loader)  # noqa: B004 -- an object that is called: its method has the names
    names = {**_USUAL_NAMES, **getattr(inspect.unwrap(loader), "__globals__", {})}
    if "torch" in str(annotation):
        import torch

        names.setdefault("torch", torch)
    return names


def _check(key: str, value: Any, annotation: Any) -> tuple[Any, list[str]]:
    """The value, converted where that is allowed, and what is wrong with it."""
    if annotation is Any:
        return value, []
    from pydantic import ConfigDict, ValidationError, create_model

    from weightloaders.validation import complaint

    config = ConfigDict(strict=True, arbitrary_types_allowed=True, protected_namespaces=())
    try:
        option = create_model("Option", __config__=config, value=(_converting(annotation), ...))(value=value)
    except ValidationError as error:
        return value, [f"  {key}: {complaint(error.errors(include_url=False), key)} (allowed: {_shown(annotation)})"]
    except Exception:  # noqa: BLE001 -- that pydantic can't check this annotation is not the user's mistake
        return value, []
    return option.value, []  # type: ignore[attr-defined]


# ------------------------------------------------------------------ by a pydantic model


def _by_model(declared: Any, options: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    from pydantic import BaseModel, ValidationError

    if not (isinstance(declared, type) and issubclass(declared, BaseModel)):
        raise LoaderContractError(f"a loader's Options must be a pydantic model, not {declared!r}")
    try:
        checked = _strict(declared).model_validate(dict(options))
    except ValidationError as error:
        return {}, _model_problems(declared, error)
    return {field: getattr(checked, field) for field in checked.model_fields_set}, []


def _strict(declared: type[BaseModel]) -> type[BaseModel]:
    """The same model without coercion and unknown fields, but with the conversions that are allowed."""
    import copy

    from pydantic import ConfigDict, create_model

    fields: dict[str, Any] = {}
    for name, field in declared.model_fields.items():
        annotation = _converting(field.annotation)
        if annotation is not field.annotation:
            fields[name] = (annotation, copy.copy(field))
    extra = "allow" if declared.model_config.get("extra") == "allow" else "forbid"
    strict = ConfigDict(strict=True, extra=extra, arbitrary_types_allowed=True)  # type: ignore[typeddict-item]
    base = type(declared.__name__, (declared,), {"model_config": strict, "__module__": declared.__module__})
    return create_model(declared.__name__, __base__=base, **fields)


def _model_problems(declared: type[BaseModel], error: ValidationError) -> list[str]:
    from weightloaders.validation import complaint

    by_field: dict[str, list[Any]] = {}
    for item in error.errors(include_url=False):
        by_field.setdefault(str(item["loc"][0]) if item["loc"] else "", []).append(item)
    problems = []
    for name, found in by_field.items():
        field = declared.model_fields.get(name)
        if field is not None:
            problems.append(f"  {name}: {complaint(found, name)} (allowed: {_shown(field.annotation)})")
        elif found[0]["type"] == "extra_forbidden":
            problems.append(_unknown(name, declared.model_fields))
        else:
            problems.append(f"  {name or 'together'}: {complaint(found)}")
    return problems


# ------------------------------------------------------------------ what both share


def _converting(annotation: Any) -> Any:
    """The annotation with the allowed conversions built in, at every depth; itself where there are none."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return Annotated[(_converting(arguments[0]), *annotation.__metadata__)]
    if origin in (collections.abc.Iterable, collections.abc.Iterator, collections.abc.Generator):
        return Any  # pydantic would hand out a one-shot iterator of its own in place of the value
    if origin in (Literal, collections.abc.Callable, type):
        return annotation
    inner = tuple(_converting(argument) for argument in arguments)
    if all(a is b for a, b in zip(inner, arguments, strict=True)):
        converted = annotation
    elif origin in (Union, types.UnionType):
        converted = Union[inner]  # noqa: UP007 -- the members are known only now
    else:
        converted = origin[inner]
    conversion = _conversion(annotation if origin is None else origin)
    if conversion is None:
        return converted
    from pydantic import BeforeValidator

    return Annotated[converted, BeforeValidator(conversion)]


def _conversion(kind: Any) -> Callable[[Any], Any] | None:
    from pydantic import BaseModel

    if not isinstance(kind, type):
        return None
    if kind is tuple:
        return lambda value: tuple(value) if isinstance(value, list) else value
    if kind is getattr(sys.modules.get("torch"), "dtype", None):
        return lambda value: _dtype(value) if isinstance(value, str) else value
    if issubclass(kind, pathlib.PurePath):
        return lambda value: kind(value) if isinstance(value, str) else value
    if issubclass(kind, enum.Enum):
        return lambda value: _member(kind, value)
    if issubclass(kind, BaseModel):
        return lambda value: _nested(kind, value) if isinstance(value, dict) else value
    return None


def _dtype(text: str) -> Any:
    import torch

    dtype = getattr(torch, text.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        known = [name for name in dir(torch) if isinstance(getattr(torch, name, None), torch.dtype)]
        raise ValueError(f"torch has no dtype of that name{did_you_mean(text, known)}")  # noqa: TRY004 -- for pydantic
    return dtype


def _member(kind: type[enum.Enum], value: Any) -> Any:
    """The member with that value (of that very type: 1 is not True), or the value itself if it is a member already."""
    if isinstance(value, kind):
        return value
    for member in kind:
        if type(member.value) is type(value) and member.value == value:
            return member
    raise ValueError(f"one of {', '.join(repr(member.value) for member in kind)} is expected")


def _nested(kind: type[BaseModel], value: dict[str, Any]) -> Any:
    arguments, problems = _by_model(kind, value)
    if problems:
        raise ValueError("; ".join(problem.strip() for problem in problems))
    return kind.model_construct(**arguments)


def _shown(annotation: Any) -> str:
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return inspect.formatannotation(annotation).replace("typing.", "").replace(" | None", " or None")
