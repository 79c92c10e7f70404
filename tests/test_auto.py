"""`auto` asks the loaders who can read a source, built-ins first, and nothing about it is left to chance."""

from __future__ import annotations

import logging
import struct
import sys
import zipfile
from contextlib import ExitStack

import pytest
import torch
from safetensors.torch import save_file

from weightloaders import open_weights
from weightloaders.errors import (
    CheckpointFormatError,
    LoaderContractError,
    OptionsError,
    SourceNotFoundError,
)
from weightloaders.loaders.auto import AutoLoader, Candidate
from weightloaders.loaders.base import BaseWeightLoader, Probe
from weightloaders.testing import fake_distribution, isolated_registry


def loader_saying(answer, name="loader", **members):
    def probe(cls, path):
        if isinstance(answer, BaseException):
            raise answer
        return answer

    members = {"probe": classmethod(probe), "get_weights": lambda self, path: {name: torch.ones(1)}, **members}
    return type(name, (BaseWeightLoader,), members)


def auto(built_in, third_party=(), **options):
    def candidates(answers):
        return [Candidate(n, lambda n=n, a=a: loader_saying(a, n)) for n, a in dict(answers).items()]

    return AutoLoader(candidates(built_in), lambda: candidates(third_party), options)


def chosen(*args):
    return type(auto(*args).choose("/nowhere")).__name__


YES, MAYBE, NO = Probe.yes("mine"), Probe.maybe("perhaps"), Probe.no("not mine")


@pytest.mark.parametrize(
    ("built_in", "third_party", "expected"),
    [
        ({"b": YES, "a": YES}, {}, "a"),
        ({"b": YES, "a": MAYBE}, {"0": YES}, "b"),
        ({"b": MAYBE}, {"c": YES, "d": YES}, "c"),
        ({"b": MAYBE, "c": MAYBE}, {"a": MAYBE}, "b"),
        ({"b": NO}, {"z": MAYBE, "y": MAYBE}, "y"),
        ({"b": RuntimeError("boom")}, {"c": YES}, "c"),
        ({"b": SystemExit()}, {"c": MAYBE}, "c"),
    ],
)
def test_yes_beats_maybe_built_ins_beat_others_and_names_break_ties(built_in, third_party, expected):
    assert chosen(built_in, third_party) == expected
    assert chosen(dict(reversed(built_in.items())), dict(reversed(third_party.items()))) == expected


def test_third_parties_are_not_even_looked_for_when_a_built_in_says_yes():
    def never():
        pytest.fail("third-party loaders were asked for")

    loader = AutoLoader([Candidate("a", lambda: loader_saying(YES, "a"))], never, {})
    assert type(loader.choose("x")).__name__ == "a"


def test_nobody_for_a_path_that_does_not_exist_names_who_was_asked_and_what_failed(tmp_path, caplog):
    nowhere = str(tmp_path / "nowhere")
    with (
        caplog.at_level(logging.DEBUG, "weightloaders"),
        pytest.raises(SourceNotFoundError, match="there is no such file or folder") as caught,
    ):
        auto({"a": NO, "b": RuntimeError("boom")}, {"c": Probe.no(), "d": "yes"}).choose(nowhere)
    message = str(caught.value)
    for said in ("b: failed with RuntimeError: boom", "d: failed with", "not a Probe", "asked in vain: a, c", nowhere):
        assert said in message
    assert "not mine" not in message
    assert "a: not mine" in caplog.text
    assert isinstance(caught.value, FileNotFoundError)


def test_nobody_for_an_address_or_a_folder_brings_every_reason(tmp_path):
    for source in (str(tmp_path), "shelf://nowhere"):
        with pytest.raises(SourceNotFoundError) as caught:
            auto({"a": NO, "b": RuntimeError("boom")}, {"c": Probe.no(), "d": "yes"}).choose(source)
        for reason in ("a: not mine", "b: failed with RuntimeError: boom", "c: no", "d: failed with"):
            assert reason in str(caught.value)


def test_a_folder_or_file_that_nobody_recognises_is_told_apart(tmp_path):
    with pytest.raises(SourceNotFoundError, match="no loader recognises what is in it"):
        auto({"a": NO}).choose(str(tmp_path))
    (tmp_path / "x.bin").write_bytes(b"x")
    with pytest.raises(CheckpointFormatError, match="no loader recognises"):
        auto({"a": NO}).choose(str(tmp_path / "x.bin"))


def test_who_could_not_look_is_told_first_who_was_not_asked_last_and_one_reason_once(tmp_path):
    def asked(path):
        with pytest.raises(SourceNotFoundError) as caught:
            auto(
                {"a": Probe.no("does not take part in automatic detection"), "b": NO, "c": NO}, {"z": OSError("lost")}
            ).choose(path)
        return [line.strip() for line in str(caught.value).splitlines()[1:]]

    assert asked(str(tmp_path))[:3] == [
        "z: failed with OSError: lost",
        "b, c: not mine",
        "a: does not take part in automatic detection",
    ]


def test_of_a_path_that_is_not_there_the_nearest_is_named(registry, tmp_path):
    (tmp_path / "SmolLM2").mkdir()
    with pytest.raises(SourceNotFoundError) as caught:
        registry.resolve("auto", source=str(tmp_path / "SmolML2"))
    first, *others = str(caught.value).splitlines()
    assert first.endswith("there is no such file or folder; did you mean 'SmolLM2'?")
    assert len(others) <= 2, others


def test_a_source_without_a_name_is_refused_rather_than_taken_for_the_working_directory(sources, monkeypatch):
    monkeypatch.chdir(sources / "hf")
    for loader in ("auto", "local", "hf"):
        with pytest.raises(SourceNotFoundError, match="the name of the source is empty"):
            open_weights("", loader)


@pytest.mark.parametrize("name", ["nothing.gguf", "org/nothing.npz"])
def test_a_name_that_ends_like_a_file_is_not_looked_for_on_the_hub(name):
    with pytest.raises(SourceNotFoundError, match="is not there") as caught:
        open_weights(name, "hf")
    assert caught.value.hint == f"hf://{name} means a repository on the hub"


@pytest.mark.parametrize(
    ("source", "package"),
    [
        ("model.gguf", "weightloaders-gguf"),
        ("model.NPZ", "weightloaders-npz"),
        ("s3://bucket/model", "weightloaders-remote"),
        ("gs://bucket/model", "weightloaders-remote"),
        ("az://container/model", "weightloaders-remote"),
    ],
)
def test_a_known_format_names_the_package_to_install(source, package):
    with pytest.raises(SourceNotFoundError) as caught:
        auto({"a": NO}).choose(source)
    assert caught.value.hint == f"pip install {package}"


def test_a_format_that_is_a_zip_file_too_is_not_taken_for_torchs(registry, tmp_path):
    with zipfile.ZipFile(tmp_path / "model.npz", "w") as archive:
        archive.writestr("weight.npy", b"")
    with pytest.raises(CheckpointFormatError, match=r"torch: its format is NumPy's") as caught:
        registry.resolve("auto", source=str(tmp_path / "model.npz"))
    assert caught.value.hint == "pip install weightloaders-npz"


def test_a_package_that_was_asked_already_is_not_advised():
    with pytest.raises(SourceNotFoundError) as caught:
        auto({}, {"gguf": NO}).choose("model.gguf")
    assert "pip install" not in caught.value.hint


@pytest.mark.parametrize("source", ["a\0b", "x" * 5000, "", "\ud800"])
def test_a_path_that_can_not_exist_is_not_found(source):
    with pytest.raises(SourceNotFoundError), isolated_registry() as registry:
        registry.resolve("auto", source=source)


def test_an_interrupt_while_asking_passes():
    with pytest.raises(KeyboardInterrupt):
        auto({"a": KeyboardInterrupt()}).choose("x")


def test_options_go_to_the_chosen_loader_and_are_checked_there():
    class Sized(loader_saying(YES)):
        def __init__(self, size: int = 1):
            self.size = size

    def with_options(**options):
        return AutoLoader([Candidate("sized", lambda: Sized)], list, options).choose("x")

    assert with_options(size=3).size == 3
    with pytest.raises(OptionsError, match="'sized' can't take these options"):
        with_options(sise=3)


def test_used_as_a_loader_it_hands_out_what_the_chosen_one_does():
    assert list(auto({"a": NO, "b": YES}).get_weights("x")) == ["b"]


def test_a_buffer_that_the_chosen_loader_reuses_is_known_to_be_reused():
    def pairs(self, path):
        yield "w", torch.ones(1)

    borrowing = loader_saying(YES, borrowed=True, get_weights=pairs)
    assert AutoLoader([Candidate("a", lambda: borrowing)], list, {}).get_weights("x").borrowed


# ------------------------------------------------------------------ through the registry


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setenv("WEIGHTLOADERS_DISABLE", "weightloaders-npz")
    with isolated_registry() as isolated:
        yield isolated


@pytest.fixture
def sources(tmp_path):
    """One of each kind that the built-in loaders read."""
    weights = {"w": torch.arange(4.0)}
    for folder in ("hf", "torch", "binary", "empty"):
        (tmp_path / folder).mkdir()
    save_file(weights, tmp_path / "hf" / "model.safetensors")
    save_file(weights, tmp_path / "single.safetensors")
    torch.save(weights, tmp_path / "torch" / "pytorch_model.bin")
    torch.save(weights, tmp_path / "single.pt")
    (tmp_path / "binary" / "meta.txt").write_text("w:4\n", encoding="utf-8")
    (tmp_path / "binary" / "model.bin").write_bytes(struct.pack("<4f", 0, 1, 2, 3))
    return tmp_path


@pytest.mark.parametrize(
    ("source", "loader"),
    [
        ("hf", "HuggingFaceLoader"),
        ("torch", "HuggingFaceLoader"),
        ("single.safetensors", "LocalLoader"),
        ("single.pt", "TorchLoader"),
        ("binary", "BinaryLoader"),
    ],
)
def test_each_built_in_format_finds_its_loader(registry, sources, source, loader):
    found = registry.resolve("auto", source=str(sources / source))
    assert type(found).__name__ == loader
    with found.get_weights(str(sources / source)) as weights:
        assert torch.equal(weights["w"], torch.arange(4.0))


@pytest.mark.parametrize("beside", ["config.json", "pytorch_model.bin.index.json"])
def test_a_bin_of_another_format_beside_a_config_goes_to_whoever_knows_it(registry, tmp_path, beside):
    (tmp_path / beside).write_text("{}", encoding="utf-8")
    (tmp_path / "pytorch_model.bin").write_bytes(b"INHOUSE\0" + bytes(100))
    with pytest.raises(CheckpointFormatError):
        registry.resolve("auto", source=str(tmp_path)).get_weights(str(tmp_path))
    registry.register("inhouse", loader_saying(YES, "InHouse"))
    assert type(registry.resolve("auto", source=str(tmp_path))).__name__ == "InHouse"
    torch.save({"w": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    assert type(registry.resolve("auto", source=str(tmp_path))).__name__ == "HuggingFaceLoader"


def test_a_bin_that_nobody_else_knows_is_explained(registry, tmp_path):
    (tmp_path / "model-00001.bin").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n")
    with pytest.raises(CheckpointFormatError, match="Git LFS pointer"):
        registry.resolve("auto", source=str(tmp_path)).get_weights(str(tmp_path))


def test_created_by_name_it_works_as_well(registry, sources):
    with registry.create("auto").get_weights(str(sources / "binary")) as weights:
        assert list(weights) == ["w"]


def test_a_folder_without_weights_says_so(registry, sources):
    (sources / "empty" / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(SourceNotFoundError, match="no loader recognises what is in it"):
        registry.resolve("auto", source=str(sources / "empty"))


PLUGIN = """
from weightloaders import BaseWeightLoader, Probe
class Loader(BaseWeightLoader):
    @classmethod
    def probe(cls, path): {probe}
    def get_weights(self, path): return {{}}
"""


@pytest.fixture
def install(tmp_path):
    with ExitStack() as stack:

        def add(name, probe, source=PLUGIN):
            entry_points = {"weightloaders.loaders": {name: f"{name}_module:Loader"}}
            modules = {f"{name}_module": source.format(probe=probe)}
            stack.enter_context(fake_distribution(tmp_path, f"dist-{name}", entry_points=entry_points, modules=modules))

        yield add


def test_a_greedy_plugin_claims_nothing_that_a_built_in_reads_and_is_not_imported(registry, sources, install):
    install("greedy", "return Probe.yes()")
    assert type(registry.resolve("auto", source=str(sources / "hf"))).__name__ == "HuggingFaceLoader"
    assert "greedy_module" not in sys.modules


def test_a_plugin_is_asked_when_no_built_in_says_yes(registry, sources, install):
    install("zz", "return Probe.yes()")
    install("aa", "return Probe.yes()")
    found = registry.resolve("auto", source=str(sources / "empty"))
    assert type(found).__module__ == "aa_module"


def test_broken_plugins_are_passed_over_and_named_if_nobody_is_found(registry, sources, install, caplog):
    install("broken", "pass", source="raise SystemExit")
    install("raising", "raise OSError('oh')")
    install("wrong", "return True")
    with caplog.at_level(logging.WARNING), pytest.raises(SourceNotFoundError) as caught:
        registry.resolve("auto", source=str(sources / "empty"))
    message = str(caught.value)
    for reason in ("broken: failed with", "dist-broken 1.0", "raising: failed with OSError: oh", "wrong: failed with"):
        assert reason in message
    install("good", "return Probe.maybe()")
    assert type(registry.resolve("auto", source=str(sources / "empty"))).__module__ == "good_module"


def test_a_loader_that_is_disabled_replaced_or_in_conflict_is_not_asked(
    registry, sources, install, monkeypatch, tmp_path
):
    install("greedy", "return Probe.yes()")
    install("x", "return Probe.yes()")
    with fake_distribution(tmp_path, "other", entry_points={"weightloaders.loaders": {"x": "x_module:Loader"}}):
        monkeypatch.setenv("WEIGHTLOADERS_DISABLE", "greedy")
        registry.register("hf", loader_saying(Probe.no("replaced")), replace=True)
        with pytest.raises(SourceNotFoundError) as caught:
            registry.resolve("auto", source=str(sources / "empty"))
    assert "hf: replaced" in str(caught.value)
    assert {"greedy_module", "x_module"}.isdisjoint(sys.modules)


def test_a_factory_can_not_be_asked(registry, sources):
    registry.register("made", lambda: loader_saying(YES)())
    with pytest.raises(SourceNotFoundError, match="made: is a factory"):
        registry.resolve("auto", source=str(sources / "empty"))


def test_what_is_registered_at_run_time_is_asked_after_the_built_ins(registry, sources):
    registry.register("a-first", loader_saying(YES, "First"))
    assert type(registry.resolve("auto", source=str(sources / "hf"))).__name__ == "HuggingFaceLoader"
    assert type(registry.resolve("auto", source=str(sources / "empty"))).__name__ == "First"


def test_the_name_auto_may_be_replaced(registry, sources):
    registry.register("auto", loader_saying(YES, "Own"), replace=True)
    assert type(registry.resolve("auto", source=str(sources / "hf"))).__name__ == "Own"


def test_by_itself_it_knows_nobody_and_says_where_it_comes_from():
    with pytest.raises((TypeError, LoaderContractError), match="built_in"):
        AutoLoader()


@pytest.mark.parametrize("name", ["auto", "torch", "local", "hf", "binary"])
def test_the_home_of_nobody_is_a_path_that_is_not_there(name: str) -> None:
    with pytest.raises(SourceNotFoundError, match="no_such_user") as refused:
        open_weights("~no_such_user/model", name)
    assert "RuntimeError" not in str(refused.value)
