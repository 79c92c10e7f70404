"""Loader options are checked before a loader is created: by its `Options` model, or by its signature."""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from weightloaders import LLM, WeightLoaderRegistry, open_weights
from weightloaders.errors import (
    BrokenPluginError,
    LoaderContractError,
    OptionsError,
    SourceError,
    SourceNotFoundError,
    WeightLoadersError,
)
from weightloaders.loaders.base import BaseWeightLoader
from weightloaders.loaders.options import create_loader, validate_options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


class Order(enum.Enum):
    LITTLE = "little"
    BIG = "big"


class Level(enum.IntEnum):
    ONE = 1


class Duck(Protocol):
    def quack(self) -> None: ...


class Cache(BaseModel):
    size: int = 1
    folder: Path | None = None


class Loader(BaseWeightLoader):
    """Everything but its constructor."""

    def get_weights(self, model_name_or_path):
        return {}


class Typed(Loader):
    def __init__(
        self,
        count: int = 1,
        ratio: float = 0.5,
        flag: bool = False,
        text: str = "",
        sizes: tuple[int, ...] = (),
        pair: tuple[str, Path] | None = None,
        folder: Path | None = None,
        folders: list[Path] | None = None,
        pure: PurePosixPath | None = None,
        order: Order = Order.LITTLE,
        level: Level = Level.ONE,
        dtype: torch.dtype | None = None,
        dtypes: dict[str, torch.dtype] | None = None,
        auto_dtype: str | torch.dtype = "auto",
        either: int | str = 1,
        mode: Literal["fast", "safe"] = "fast",
        names: Iterable[str] = (),
        shapes: Sequence[tuple[int, int]] = (),
        function: Callable[[int], str] | None = None,
        cache: Cache | None = None,
        positive: Annotated[int, Field(gt=0)] = 1,
        kind: type[Path] | None = None,
        old_style: int = None,  # noqa: RUF013 -- as people still write it
        unresolvable: NotImportedAnywhere = 1,  # noqa: F821 -- the point of it
        duck: Duck | None = None,
        tensor: torch.Tensor | None = None,
        anything: Any = None,
        untyped=3,
    ):
        pass


function = len

CACHE = Cache(size=3)
TENSOR = torch.zeros(2)


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("count", 6, 6),
        ("ratio", 0.25, 0.25),
        ("ratio", 1, 1.0),
        ("flag", True, True),
        ("sizes", [1, 2], (1, 2)),
        ("sizes", (1, 2), (1, 2)),
        ("pair", ["a", "b"], ("a", Path("b"))),
        ("folder", "a/b", Path("a/b")),
        ("folder", Path("a"), Path("a")),
        ("folder", None, None),
        ("folders", ["a", Path("b")], [Path("a"), Path("b")]),
        ("pure", "a", PurePosixPath("a")),
        ("order", "big", Order.BIG),
        ("order", Order.BIG, Order.BIG),
        ("level", 1, Level.ONE),
        ("dtype", "bfloat16", torch.bfloat16),
        ("dtype", "torch.float16", torch.float16),
        ("dtype", torch.int8, torch.int8),
        ("dtypes", {"w": "int8", "v": torch.float32}, {"w": torch.int8, "v": torch.float32}),
        ("auto_dtype", "auto", "auto"),
        ("auto_dtype", "bfloat16", "bfloat16"),
        ("auto_dtype", torch.int8, torch.int8),
        ("either", "6", "6"),
        ("either", 6, 6),
        ("mode", "safe", "safe"),
        ("names", ["a"], ["a"]),
        ("shapes", [[1, 2], (3, 4)], [(1, 2), (3, 4)]),
        ("function", function, function),
        ("cache", CACHE, CACHE),
        ("cache", {"size": 2, "folder": "a"}, Cache(size=2, folder=Path("a"))),
        ("positive", 2, 2),
        ("kind", Path, Path),
        ("old_style", None, None),
        ("old_style", 3, 3),
        ("unresolvable", "whatever", "whatever"),
        ("duck", 3, 3),
        ("tensor", TENSOR, TENSOR),
        ("anything", 1j, 1j),
        ("untyped", "3", "3"),
    ],
)
def test_what_fits_is_taken_and_converted_only_where_that_is_allowed(option, value, expected):
    (result,) = validate_options(Typed, {option: value}).items()
    assert result == (option, expected)
    assert type(result[1]) is type(expected)


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("count", "6", "int"),
        ("count", 6.0, "int"),
        ("count", True, "int"),
        ("count", None, "int"),
        ("ratio", "0.5", "float"),
        ("ratio", True, "float"),
        ("flag", "False", "bool"),
        ("flag", 0, "bool"),
        ("text", 3, "str"),
        ("text", b"x", "str"),
        ("text", Path("x"), "str"),
        ("sizes", ["1"], "tuple[int, ...]"),
        ("sizes", 1, "tuple[int, ...]"),
        ("pair", ["a"], "tuple[str, pathlib.Path]"),
        ("folder", 3, "pathlib.Path or None"),
        ("folders", "a", "list[pathlib.Path] or None"),
        ("order", "middle", "'little', 'big'"),
        ("level", "1", "1"),
        ("level", True, "1"),
        ("dtype", "bfloat61", "did you mean 'bfloat16'"),
        ("dtype", "Tensor", "torch.dtype or None"),
        ("dtype", 3, "torch.dtype or None"),
        ("dtypes", {"w": "nothing"}, "dict[str, torch.dtype] or None"),
        ("either", 6.5, "int | str"),
        ("mode", "slow", "'fast' or 'safe'"),
        ("shapes", [[1, 2, 3]], "tuple[int, int]"),
        ("function", 3, "Callable"),
        ("cache", {"size": "2"}, "size: '2': should be a valid integer"),
        ("cache", {"sise": 2}, "did you mean 'size'"),
        ("positive", 0, "greater than 0"),
        ("old_style", "3", "int or None"),
        ("tensor", [1.0], "torch.Tensor or None"),
    ],
)
def test_what_does_not_fit_is_refused_with_field_value_and_what_is_allowed(option, value, allowed):
    with pytest.raises(OptionsError) as caught:
        validate_options(Typed, {option: value}, name="typed")
    first, second = str(caught.value).splitlines()
    assert first == "the loader 'typed' can't take these options:"
    assert second.startswith(f"  {option}: ")
    assert allowed in second
    if not isinstance(value, dict | list):
        assert repr(value) in second


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5), st.binary(max_size=5)
)


@given(SCALARS, st.sampled_from(["count", "flag", "text", "either", "old_style"]))
def test_a_scalar_is_passed_on_unchanged_or_refused(value, option):
    try:
        result = validate_options(Typed, {option: value})[option]
    except OptionsError:
        return
    assert type(result) is type(value)
    assert result == value


def test_all_problems_are_named_at_once_and_unknown_ones_with_the_nearest():
    class Strict(Loader):
        def __init__(self, *, path: str, file_pattern: str = "*.bin"):
            pass

    with pytest.raises(OptionsError) as caught:
        validate_options(Strict, {"filepattern": "*", "file_pattern": 3, "zzz": 1})
    assert str(caught.value).splitlines() == [
        "the loader 'Strict' can't take these options:",
        "  filepattern: unknown; did you mean 'file_pattern'? (allowed: file_pattern, path)",
        "  file_pattern: 3: should be a valid string (allowed: str)",
        "  zzz: unknown (allowed: file_pattern, path)",
        "  path: is required",
    ]


def test_only_what_was_given_reaches_the_constructor():
    assert validate_options(Typed, {}) == {}
    assert validate_options(Typed, {"count": 1}) == {"count": 1}


# ------------------------------------------------------------------ shapes of constructors


def test_a_classic_constructor_without_annotations_takes_its_names():
    class Classic(Loader):
        def __init__(self, file_pattern="*.bin", dtype=torch.float32):
            self.options = file_pattern, dtype

    options = {"dtype": torch.bfloat16, "file_pattern": "*.pt"}
    assert create_loader(Classic, options, name="classic").options == ("*.pt", torch.bfloat16)
    with pytest.raises(OptionsError, match="did you mean 'dtype'"):
        create_loader(Classic, {"dtyp": torch.bfloat16}, name="classic")


def test_a_constructor_with_kwargs_takes_anything_else():
    class Open(Loader):
        def __init__(self, size: int = 1, **kwargs):
            self.rest = kwargs

    assert create_loader(Open, {"size": 2, "more": "x"}, name="open").rest == {"more": "x"}
    with pytest.raises(OptionsError, match="size: 'x'"):
        create_loader(Open, {"size": "x", "more": "x"}, name="open")


def test_annotated_kwargs_are_checked():
    class Open(Loader):
        def __init__(self, **kwargs: int):
            pass

    with pytest.raises(OptionsError, match="more: 'x'"):
        validate_options(Open, {"more": "x"})


def test_no_constructor_takes_no_options():
    assert isinstance(create_loader(Loader, {}, name="bare"), Loader)
    with pytest.raises(OptionsError, match=r"size: unknown \(allowed: none\)"):
        validate_options(Loader, {"size": 1})


def test_a_positional_only_parameter_is_explained():
    class Positional(Loader):
        def __init__(self, path, /, size=1):
            pass

    for options in ({}, {"path": "x"}):
        with pytest.raises(OptionsError, match="path: is a positional-only parameter") as caught:
            validate_options(Positional, options)
        assert len(str(caught.value).splitlines()) == 2


def test_an_inherited_constructor_is_read_in_its_own_module():
    class Heir(Typed):
        pass

    assert validate_options(Heir, {"folder": "x"}) == {"folder": Path("x")}


def test_a_dataclass_is_a_loader_like_any_other():
    @dataclass
    class Data(Loader):
        folder: Path
        sizes: tuple[int, ...] = ()

    assert create_loader(Data, {"folder": "x", "sizes": [1]}, name="data") == Data(Path("x"), (1,))
    with pytest.raises(OptionsError, match="folder: is required"):
        create_loader(Data, {}, name="data")


def make(folder: Path, count: int = 1) -> Loader:
    return Loader()


class Maker:
    def __call__(self, folder: Path) -> Loader:
        return Loader()


@pytest.mark.parametrize("factory", [make, functools.partial(make, count=2), Maker()])
def test_factories_are_checked_by_their_signature(factory):
    assert validate_options(factory, {"folder": "x"}) == {"folder": Path("x")}
    with pytest.raises(OptionsError, match="folder: 3"):
        validate_options(factory, {"folder": 3})
    with pytest.raises(OptionsError, match="folder: is required"):
        validate_options(factory, {})


def test_names_imported_for_type_checkers_only_are_understood(tmp_path):
    source = (
        "from __future__ import annotations\n"
        "from typing import TYPE_CHECKING\n"
        "from weightloaders.loaders.base import BaseWeightLoader\n"
        "if TYPE_CHECKING:\n    import torch\n    from pathlib import Path\n"
        "class Lazy(BaseWeightLoader):\n"
        "    def __init__(self, folder: Path | None = None, dtype: torch.dtype | None = None): pass\n"
        "    def get_weights(self, path): return {}\n"
    )
    names: dict[str, Any] = {"__name__": "lazy"}
    exec(source, names)
    assert validate_options(names["Lazy"], {"folder": "x", "dtype": "int8"}) == {
        "folder": Path("x"),
        "dtype": torch.int8,
    }


# ------------------------------------------------------------------ Options


class Modelled(Loader):
    class Options(BaseModel):
        model_config = ConfigDict(arbitrary_types_allowed=True)

        path: str
        count: Annotated[int, Field(gt=0)] = 1
        dtype: torch.dtype | None = None
        folders: list[Path] = Field(default_factory=list, max_length=2)
        cache: Cache = Cache()

        @field_validator("folders")
        @classmethod
        def check(cls, folders):
            if Path("bad") in folders:
                raise ValueError("bad is not allowed")
            return folders

        @model_validator(mode="after")
        def together(self):
            if self.count > 5 and self.dtype is None:
                raise ValueError("a large count needs a dtype")
            return self

    def __init__(self, path, count=7, **rest):
        self.given = {"path": path, "count": count, **rest}


Modelled.Options.model_rebuild()


def test_options_only_validate_and_the_constructor_gets_what_was_given():
    assert create_loader(Modelled, {"path": "x"}, name="m").given == {"path": "x", "count": 7}
    options = {"path": "x", "dtype": "int8", "folders": ["a"], "cache": {"size": 2}}
    assert create_loader(Modelled, options, name="m").given == {
        "path": "x",
        "count": 7,
        "dtype": torch.int8,
        "folders": [Path("a")],
        "cache": Cache(size=2),
    }


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({}, "path: is required (allowed: str)"),
        ({"path": 3}, "path: 3: should be a valid string (allowed: str)"),
        ({"path": "x", "count": "2"}, "count: '2': should be a valid integer (allowed: int)"),
        ({"path": "x", "count": 0}, "count: 0: should be greater than 0"),
        ({"path": "x", "pth": 1}, "pth: unknown; did you mean 'path'? (allowed: cache, count, dtype, folders, path)"),
        ({"path": "x", "folders": ["bad"]}, "bad is not allowed"),
        ({"path": "x", "folders": ["a", "b", "c"]}, "at most 2 items"),
        ({"path": "x", "cache": {"size": True}}, "size: True: should be a valid integer"),
        ({"path": "x", "count": 6}, "together: a large count needs a dtype"),
    ],
)
def test_options_refuse_with_field_value_and_what_is_allowed(options, complaint):
    with pytest.raises(OptionsError) as caught:
        validate_options(Modelled, options)
    assert complaint in str(caught.value)


def test_a_model_that_allows_extras_takes_them():
    class Open(Loader):
        class Options(BaseModel):
            model_config = ConfigDict(extra="allow")
            size: int = 1

    assert validate_options(Open, {"size": 2, "more": "x"}) == {"size": 2, "more": "x"}


def test_options_that_are_no_pydantic_model_break_the_contract():
    class Wrong(Loader):
        Options: ClassVar[Any] = dict

    with pytest.raises(LoaderContractError, match="Options must be a pydantic model"):
        validate_options(Wrong, {})


# ------------------------------------------------------------------ constructors that raise


class Refusing(Loader):
    error: ClassVar[BaseException]

    def __init__(self, size=1):
        raise self.error


@pytest.mark.parametrize("error", [TypeError("no"), ValueError("no")])
def test_a_constructor_that_refuses_its_options_is_an_options_error(error):
    Refusing.error = error
    with pytest.raises(OptionsError, match=f"'refusing' refused its options: {type(error).__name__}: no") as caught:
        create_loader(Refusing, {"size": 1}, name="refusing", plugin="weightloaders-x 1.0")
    assert caught.value.__cause__ is error
    assert caught.value.plugin == "weightloaders-x 1.0"


@pytest.mark.parametrize("error", [OSError("no"), RuntimeError("no"), SystemExit("no")])
def test_a_constructor_that_fails_otherwise_is_a_broken_plugin(error):
    Refusing.error = error
    with pytest.raises(BrokenPluginError, match="creating the loader 'refusing' failed") as caught:
        create_loader(Refusing, {}, name="refusing", plugin="weightloaders-x 1.0")
    assert caught.value.__cause__ is error
    assert "weightloaders-x 1.0" in str(caught.value)


@pytest.mark.parametrize("error", [SourceNotFoundError("gone"), KeyboardInterrupt()])
def test_our_own_errors_and_interrupts_pass_unchanged(error):
    Refusing.error = error
    with pytest.raises(type(error)) as caught:
        create_loader(Refusing, {}, name="refusing")
    assert caught.value is error


@pytest.mark.parametrize("value", [["hf_SeCrEtToKeN"], {"a": "hf_SeCrEtToKeN"}, b"hf_SeCrEtToKeN"])
def test_a_token_of_the_wrong_type_is_refused_without_telling_it(value):
    with pytest.raises(OptionsError, match=f"token: what was given \\({type(value).__name__}\\)") as caught:
        WeightLoaderRegistry.create("hf", token=value)
    assert "SeCrEt" not in str(caught.value)


def test_a_token_in_the_wrong_place_is_not_told(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("model: org/name\nweight_loader_kwargs: hf_SeCrEtToKeN\n")
    for mistake in (
        lambda: WeightLoaderRegistry.create("hf", local_files_only="hf_SeCrEtToKeN"),
        lambda: LLM.from_config(file),
    ):
        with pytest.raises(WeightLoadersError, match="hf_…") as caught:
            mistake()
        assert "SeCrEt" not in str(caught.value)


@pytest.mark.parametrize(
    "address", ["ftp://user:pAsSwOrD@h/model.safetensors", "x://user:pAsSwOrD@h/folder?q=pAsSwOrD"]
)
def test_the_password_of_an_address_that_nobody_reads_is_not_told(address):
    with pytest.raises(SourceError) as caught:
        open_weights(address)
    assert "pAsSwOrD" not in str(caught.value)
