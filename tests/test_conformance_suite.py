"""The suite for loaders, itself: each kind of faulty loader fails the check that is for it, and no other."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import mmap
import os
import pickle
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import weightloaders as wl
from weightloaders import testing
from weightloaders.errors import (
    CheckpointFormatError,
    SourceNotFoundError,
    SourceReadError,
    UnknownTensorError,
)
from weightloaders.loaders.local import LocalLoader
from weightloaders.testing import LoaderConformance, fake_distribution
from weightloaders.testing.conformance.author import bits
from weightloaders.testing.tiny import DTYPES
from weightloaders.weights.source import FileSource

NAMES = "test_names_come_without_reading_the_values"
HANDED_OUT = "test_tensors_stay_as_they_are_while_others_are_read"
WRITING = "test_writing_into_a_tensor_changes_nothing_else"
OUTLIVE = "test_tensors_outlive_closing"
SPAWNED = "test_a_spawned_process_reads_the_same_values"
THREADS = "test_several_threads_read_the_same_values"
AT_ANY_STEP = "test_a_thread_reads_while_another_is_at_any_step"
LISTED = "test_files_that_are_listed_are_read_as_those_on_disk"
TRUNCATED = "test_truncated_files_are_refused"
CHANGED = "test_changed_bytes_never_end_in_a_foreign_exception"


class Sound(LoaderConformance):
    """Safetensors by the loader for them."""

    loader = LocalLoader
    dtypes = frozenset(DTYPES) - {torch.complex128}
    patience = 10.0

    def write_checkpoint(self, folder, tensors):
        save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
        return folder / "model.safetensors"


def checks(kind):
    """Every check of a suite by name, as pytest would run it."""
    for name, check in inspect.getmembers(kind, inspect.isfunction):
        if name.startswith("test_"):
            arguments = set(inspect.signature(check).parameters) - {"self", "tmp_path"}
            dtypes = {"dtype": kind.dtypes, "undeclared_dtype": set(DTYPES) - set(kind.dtypes)}
            for argument in arguments or {""}:
                for dtype in sorted(dtypes.get(argument, [None]), key=str):
                    given = {} if dtype is None else {argument: dtype}
                    yield f"{name}[{str(dtype).removeprefix('torch.')}]" if given else name, check, given


def failures(kind, folder, only=None):
    """The checks that fail, each with what it says."""
    found = {}
    for i, (name, check, given) in enumerate(checks(kind)):
        if only is None or name == only:
            if "tmp_path" in inspect.signature(check).parameters:
                given = given | {"tmp_path": folder / str(i)}
                given["tmp_path"].mkdir()
            try:
                check(kind(), **given)
            except pytest.skip.Exception:
                pass
            except Exception as failure:
                found[name] = str(failure)
    return found


def suite(loader, **declared):
    return type("Suite", (Sound,), {"loader": loader, **declared})


def described(change, **kinds):
    """A loader that changes the descriptions of a sound one."""

    class Faulty(LocalLoader):
        def get_weights(self, model_name_or_path):
            weights = super().get_weights(model_name_or_path)
            return wl.Weights.describe([change(info, weights) for info in weights.infos()], **kinds)

    return Faulty


def with_read(read, **kinds):
    """A loader whose tensors are read by a function of their descriptions and of the sound weights."""
    return described(
        lambda info, weights: wl.TensorInfo(info.name, info.dtype, info.shape, read=lambda: read(info, weights)),
        **kinds,
    )


# ------------------------------------------------------------------ whose tensors are faulty


def reuses_a_buffer():
    buffers = threading.local()

    def read(info, weights):
        tensor = weights[info.name]
        if tensor.numel() < 4096 or tensor.dtype is not torch.float32:
            return tensor
        if not hasattr(buffers, "memory"):
            # The largest that the suite writes has 2049 x 2049 elements.
            buffers.memory = torch.empty(1 << 23)
        return buffers.memory[: tensor.numel()].view(tensor.shape).copy_(tensor)

    return suite(with_read(read)), {HANDED_OUT: "later reads changed tensors"}


def hands_out_what_it_keeps():
    kept = {}

    def read(info, weights):
        extent = info.extents[0]
        return kept.setdefault((extent.source.identity, info.name), weights[info.name])

    return suite(with_read(read)), {WRITING: "is read otherwise than it was written"}


def ties_what_is_equal():
    def loader():
        class Faulty(LocalLoader):
            def get_weights(self, model_name_or_path):
                weights = super().get_weights(model_name_or_path)
                first = {}

                def read(info):
                    tensor = weights[info.name]
                    owner, held = first.setdefault((info.shape, info.dtype, bits(tensor)), (info.name, tensor))
                    return tensor if owner == info.name and held is not tensor else held

                return wl.Weights.describe(
                    [wl.TensorInfo(i.name, i.dtype, i.shape, read=lambda i=i: read(i)) for i in weights.infos()]
                )

        return Faulty

    return suite(loader()), {"test_tied_tensors_have_both_names_and_memory_of_their_own": "in the same memory"}


def maps_the_file_to_be_written():
    def read(info, weights):
        extent = info.extents[0]
        if not extent.length or extent.offset % info.dtype.itemsize:
            return weights[info.name]
        with Path(extent.source.name).open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        return torch.frombuffer(memory, dtype=info.dtype, count=info.numel, offset=extent.offset).view(info.shape)

    return suite(with_read(read)), {WRITING: ""}


def maps_the_file_read_only():
    def read(info, weights):
        extent = info.extents[0]
        if not extent.length or extent.offset % info.dtype.itemsize:
            return weights[info.name]
        array = np.memmap(extent.source.name, np.uint8, "r", extent.offset, (extent.length,))
        return torch.from_numpy(array).view(info.dtype).view(info.shape)

    return suite(with_read(read)), {WRITING: "read-only"}


def clears_its_memory_on_closing():
    class Faulty(LocalLoader):
        def get_weights(self, model_name_or_path):
            weights = super().get_weights(model_name_or_path)
            handed_out = []

            def read(info):
                handed_out.append(weights[info.name])
                return handed_out[-1]

            def close():
                for tensor in handed_out:
                    tensor.zero_()

            infos = [wl.TensorInfo(i.name, i.dtype, i.shape, read=lambda i=i: read(i)) for i in weights.infos()]
            return wl.Weights.describe(infos, close=close)

    return suite(Faulty), {OUTLIVE: "is read otherwise than it was written"}


def makes_tensors_where_torch_does_by_default():
    def read(info, weights):
        return torch.empty(info.shape, dtype=info.dtype).copy_(weights[info.name])

    return suite(with_read(read)), {"test_defaults_of_torch_do_not_matter": "on the meta device"}


def hands_out_parameters():
    loader = with_read(lambda info, weights: torch.nn.Parameter(weights[info.name], requires_grad=False))
    return suite(loader), {"test_tensors_are_plain_and_the_callers_own": "is a Parameter"}


def knows_one_dtype_too_few():
    """bfloat16 is handed out as float32."""

    def change(info, weights):
        if info.dtype != torch.bfloat16:
            return info
        return wl.TensorInfo(info.name, torch.float32, info.shape, read=lambda: weights[info.name].float())

    return suite(described(change)), {
        "test_values_are_exact[bfloat16]": "was written as",
        "test_many_tensors_of_all_dtypes_lie_side_by_side": "was written as",
        "test_a_nan_keeps_its_sign_and_payload": "of other bits",
    }


def declares_too_few_dtypes():
    dtypes = Sound.dtypes - {torch.uint16}
    return suite(LocalLoader, dtypes=dtypes), {
        "test_a_dtype_that_is_not_declared_is_refused[uint16]": "is read as it was written, but not declared"
    }


def casts_what_is_not_declared():
    def change(info, weights):
        if info.dtype != torch.uint16:
            return info
        return wl.TensorInfo(info.name, torch.int32, info.shape, read=lambda: weights[info.name].int())

    return suite(described(change), dtypes=Sound.dtypes - {torch.uint16}), {
        "test_a_dtype_that_is_not_declared_is_refused[uint16]": "was written as [6] torch.uint16 and read as"
    }


def declares_too_few_shapes():
    return suite(LocalLoader, max_dims=3), {"test_a_shape_that_is_not_declared_is_refused": "not declared"}


def has_no_scalars():
    def change(info, weights):
        if info.shape:
            return info
        return wl.TensorInfo(info.name, info.dtype, (1,), read=lambda: weights[info.name].reshape(1))

    return suite(described(change)), {"test_every_kind_of_shape_is_exact": "was written as [] torch.float32"}


def does_not_tell_case():
    return suite(described(lambda info, _: info.renamed(info.name.lower()))), {"test_names_are_kept": "two tensors"}


def unwraps_names():
    faulty = described(lambda info, _: info.renamed(info.name.removeprefix("module.")))
    return suite(faulty), {"test_names_are_kept": "the names differ"}


def leaves_out_what_counts_batches():
    class Faulty(LocalLoader):
        def get_weights(self, model_name_or_path):
            infos = super().get_weights(model_name_or_path).infos()
            return wl.Weights.describe([info for info in infos if not info.name.endswith("num_batches_tracked")])

    return suite(Faulty), {"test_names_are_kept": "the names differ"}


def reads_16_mib_and_no_more():
    def read(info, weights):
        tensor = weights[info.name].clone()
        if tensor.nbytes > 1 << 24:
            tensor.view(-1)[1 << 22 :] = 0
        return tensor

    return suite(with_read(read)), {"test_every_kind_of_shape_is_exact": "is read otherwise than it was written"}


def writes_memory_as_it_lies():
    class Suite(Sound):
        def write_checkpoint(self, folder, tensors):
            def lying(tensor):
                return (
                    tensor.t().contiguous().view(tensor.shape)
                    if tensor.dim() == 2 and tensor.stride(0) == 1
                    else tensor
                )

            return super().write_checkpoint(folder, {name: lying(tensor) for name, tensor in tensors.items()})

    return Suite, {"test_strided_tensors_are_exact": "is read otherwise than it was written"}


def fills_only_weights():
    class Faulty(LocalLoader):
        def load_weights(self, model, weights):
            for name, parameter in model.named_parameters():
                if not name.endswith("bias"):
                    parameter.data.copy_(weights[name])

    return suite(Faulty), {"test_a_model_is_filled": "bias"}


def knows_one_nan():
    def read(info, weights):
        tensor = weights[info.name]
        if not tensor.is_floating_point() or tensor.dtype.itemsize == 1:
            return tensor
        return torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor)

    return suite(with_read(read)), {"test_a_nan_keeps_its_sign_and_payload": "NaN of other bits"}


# ------------------------------------------------------------------ who reads at the wrong time


def keeps_what_it_read_of_a_path():
    kept = {}

    def read(info, weights):
        place = info.extents[0].source.name, info.name
        if place not in kept:
            kept[place] = weights[info.name]
        return kept[place].clone()

    return suite(with_read(read)), {"test_a_replaced_checkpoint_is_read_anew": "is read otherwise than it was written"}


def reads_ascii_paths_alone():
    class Faulty(LocalLoader):
        def get_weights(self, model_name_or_path):
            if not model_name_or_path.isascii():
                raise SourceNotFoundError(f"{model_name_or_path} is not there")
            return super().get_weights(model_name_or_path)

    return suite(Faulty), {"test_paths_of_all_kinds_are_read": "is not read"}


def reads_absolute_paths_alone():
    class Faulty(LocalLoader):
        def get_weights(self, model_name_or_path):
            if not Path(model_name_or_path).is_absolute():
                raise RuntimeError("relative")
            return super().get_weights(model_name_or_path)

    return suite(Faulty), {"test_paths_of_all_kinds_are_read": "RuntimeError"}


def sets_what_others_go_by(change):
    class Faulty(LocalLoader):
        def get_weights(self, model_name_or_path):
            change(model_name_or_path)
            return super().get_weights(model_name_or_path)

    return Faulty


def seeds_torch():
    loader = sets_what_others_go_by(lambda _: torch.rand(()))
    return suite(loader), {"test_nothing_else_in_the_process_changes": "reading changed torch's random numbers"}


def seeds_torch_as_it_always_does():
    loader = sets_what_others_go_by(lambda _: torch.manual_seed(0))
    return suite(loader), {"test_nothing_else_in_the_process_changes": "reading changed torch's random numbers"}


def sets_the_usual_dtype():
    loader = sets_what_others_go_by(lambda _: torch.set_default_dtype(torch.float32))
    said = "reading changed the default dtype"
    return suite(loader), {"test_nothing_else_in_the_process_changes": said}


def touches_its_files():
    def touch(path):
        # Not under the eyes of other threads, which are told that the file was changed.
        if Path(path).is_file() and threading.current_thread() is threading.main_thread():
            os.utime(path)

    said = "reading, or writing into a tensor, changed the files"
    return suite(sets_what_others_go_by(touch)), {"test_writing_into_a_tensor_changes_nothing_else": said}


def prints():
    loader = sets_what_others_go_by(lambda path: print("reading", path))  # noqa: T201 -- that is the fault
    return suite(loader), {"test_nothing_else_in_the_process_changes": "reading printed 'reading "}


def reads_everything_on_opening():
    class Faulty(LocalLoader):
        def get_weights(self, model_name_or_path):
            with super().get_weights(model_name_or_path) as weights:
                return dict(weights.items())

    return suite(Faulty), {NAMES: "opening read"}


def keeps_what_it_mapped_on_opening():
    """No byte is read as far as the system counts."""

    class Faulty(LocalLoader):
        def get_weights(self, model_name_or_path):
            weights = super().get_weights(model_name_or_path)
            infos = []
            for info in weights.infos():
                extent = info.extents[0]
                with Path(extent.source.name).open("rb") as file:
                    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                content = bytearray(mapped[extent.offset : extent.offset + extent.length])
                mapped.close()

                def read(info=info, content=content):
                    if not content:
                        return torch.empty(info.shape, dtype=info.dtype)
                    return torch.frombuffer(content, dtype=info.dtype).clone().view(info.shape)

                infos.append(wl.TensorInfo(info.name, info.dtype, info.shape, read=read))
            return wl.Weights.describe(infos)

    return suite(Faulty), {NAMES: "are kept in memory"}


def reads_listed_files_otherwise():
    class Faulty(LocalLoader):
        def get_weights(self, model_name_or_path):
            return LocalLoader().get_weights(model_name_or_path)

        def get_listed_weights(self, listing, name=""):
            weights = super().get_listed_weights(listing, name)
            return wl.Weights.describe([info.renamed(f"model.{info.name}") for info in weights.infos()])

    return suite(Faulty), {LISTED: "the names differ"}


def answers_otherwise_for_listed_files():
    class Faulty(LocalLoader):
        @classmethod
        def probe_listing(cls, listing, name=""):
            return wl.Probe.no("not mine")

        @classmethod
        def probe(cls, path):
            return LocalLoader.probe(path)

    return suite(Faulty), {LISTED: "but `probe_listing` Probe(answer='no', reason='not mine')"}


class LaxWeights(wl.Weights):
    """Weights that don't mind being closed."""

    def check_open(self):
        pass


def reads_after_closing():
    class Faulty(LocalLoader):
        def get_weights(self, model_name_or_path):
            return LaxWeights(super().get_weights(model_name_or_path).infos())

    return suite(Faulty), {
        "test_closing_twice_is_harmless_and_reading_afterwards_an_error_of_ours": "SourceClosedError",
        "test_closing_in_the_middle_ends_the_stream": "went on after closing",
    }


def keeps_a_file_open():
    opened = []

    class Faulty(LocalLoader):
        def get_weights(self, model_name_or_path):
            weights = super().get_weights(model_name_or_path)
            opened.append(os.open(model_name_or_path, os.O_RDONLY))
            return weights

    return suite(Faulty), {"test_closing_lets_go_of_the_files": "model.safetensors"}


class BareWeights(wl.Weights):
    """Weights that say nothing about a name that is not there."""

    def __getitem__(self, name):
        try:
            return super().__getitem__(name)
        except UnknownTensorError:
            raise KeyError(name) from None


def keeps_a_refused_file_open():
    opened = []

    def answer(path, error):
        opened.append(os.open(path, os.O_RDONLY))
        raise error

    return suite(instead(CheckpointFormatError, answer)), {"test_refused_files_are_let_go": "are still open"}


def raises_bare_key_errors():
    class Faulty(LocalLoader):
        def get_weights(self, model_name_or_path):
            return BareWeights(super().get_weights(model_name_or_path).infos())

    return suite(Faulty), {"test_a_name_that_is_not_there_is_an_error_of_ours": "a foreign exception came out"}


# ------------------------------------------------------------------ who believes what files say


def instead(kind, answer):
    """A loader that answers otherwise where the sound one raises this kind of error."""

    class Faulty(LocalLoader):
        def get_weights(self, model_name_or_path):
            try:
                return super().get_weights(model_name_or_path)
            except kind as error:
                return answer(Path(model_name_or_path), error)

    return Faulty


def raises(error):
    raise error


def lets_the_system_say_what_is_missing():
    def answer(path, error):
        if path.is_dir():
            raise error
        path.open("rb").close()

    return suite(instead(SourceNotFoundError, answer)), {"test_a_missing_source_is_named": "FileNotFoundError"}


def takes_an_empty_folder_for_weights():
    loader = instead(SourceNotFoundError, lambda path, error: {} if path.is_dir() else raises(error))
    return suite(loader), {"test_an_empty_folder_is_refused": "read as weights"}


def hangs_on_an_empty_file():
    def answer(path, error):
        if path.stat().st_size == 0:
            time.sleep(3)
        raise error

    return suite(instead(CheckpointFormatError, answer), patience=1.0), {
        "test_empty_files_are_refused": "it hangs: nothing came back within 1 second"
    }


def fails_without_tensors():
    class Faulty(LocalLoader):
        def get_weights(self, model_name_or_path):
            weights = super().get_weights(model_name_or_path)
            self.mean_size = weights.nbytes / len(weights)
            return weights

    return suite(Faulty), {"test_a_checkpoint_without_tensors_is_read_or_refused": "ZeroDivisionError"}


def fills_up_what_is_cut_off():
    """The values that a truncated file lacks are taken for zeros."""

    def answer(path, error):
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        with contextlib.suppress(Exception):
            shapes = {name: entry["shape"] for name, entry in json.loads(content[8 : 8 + length]).items()}
            if sorted(shapes.values()) == [[1], [2, 3, 4], [4], [4, 8]]:
                return {name: torch.zeros(shape) for name, shape in shapes.items()}
        raise error

    return suite(instead(CheckpointFormatError, answer)), {TRUNCATED: "went unnoticed"}


def says_only_that_it_is_bad():
    def answer(path, error):
        raise CheckpointFormatError("bad")

    return suite(instead(CheckpointFormatError, answer)), {
        "test_errors_say_where": "names neither file nor tensor: bad"
    }


def takes_anything_for_an_archive():
    def answer(path, error):
        if path.read_bytes()[:2] == b"PK":
            return {}
        raise error

    return suite(instead(CheckpointFormatError, answer)), {"test_garbage_is_refused": "went unnoticed"}


def lets_the_parser_speak():
    def answer(path, error):
        size = path.stat().st_size
        if "JSON" in str(error) and size > 64 and path.read_bytes()[8:9] == b"{":
            raise json.JSONDecodeError("Expecting value", "", 0)
        raise error

    return suite(instead(CheckpointFormatError, answer)), {CHANGED: "JSONDecodeError"}


def allocates_what_a_file_claims():
    def answer(path, error):
        claimed = int.from_bytes(path.read_bytes()[:8], "little")
        if claimed >> 56 == 0x7F:
            try:
                torch.empty(claimed >> 20, dtype=torch.uint8)
            except RuntimeError as lack:
                raise SourceReadError("no memory") from lack
        raise error

    return suite(instead(CheckpointFormatError, answer)), {CHANGED: "bytes were asked for"}


def unpickles():
    def answer(path, error):
        content = path.read_bytes()
        if content[:1] == b"\x80":
            with contextlib.suppress(Exception):
                pickle.loads(content)
        raise error

    return suite(instead(CheckpointFormatError, answer)), {"test_code_in_a_file_is_not_run": "a bare pickle"}


# ------------------------------------------------------------------ who reads alone


class SeekingSource(FileSource):
    """One descriptor with one position for all threads."""

    pause = 0.001

    def __init__(self, path):
        super().__init__(path)
        self.file = io.FileIO(path)

    def read_into(self, view, offset):
        self.file.seek(offset)
        if self.pause:
            time.sleep(self.pause)
        self.file.readinto(view)


class QuicklySeekingSource(SeekingSource):
    pause = 0


def reading_through(source_type):
    class Faulty(LocalLoader):
        def get_weights(self, model_name_or_path):
            weights = super().get_weights(model_name_or_path)
            if not Path(model_name_or_path).is_file():
                return weights
            source = source_type(model_name_or_path)
            infos = [read_from(source, info) for info in weights.infos()]
            return wl.Weights.describe(infos, close=source.file.close)

    return suite(Faulty)


def seeks_and_reads():
    return reading_through(SeekingSource), {
        THREADS: "is read otherwise than it was written",
        AT_ANY_STEP: "in read_into; then: 't0' is read otherwise than it was written",
        "test_a_model_is_filled": "",
    }


def test_a_position_that_threads_share_is_found_however_seldom_they_meet_there(tmp_path):
    found = failures(reading_through(QuicklySeekingSource), tmp_path, only=AT_ANY_STEP)
    assert "in read_into; then: 't0' is read otherwise than it was written" in found[AT_ANY_STEP]


@pytest.mark.parametrize("all_of_it", [True, False], ids=["around all that moves", "around a part"])
def test_a_lock_counts_only_around_all_that_moves(tmp_path, all_of_it):
    lock, files = threading.Lock(), {}

    def read(info, weights):
        extent = info.extents[0]
        if extent.source.name not in files:
            files[extent.source.name] = opened.enter_context(io.FileIO(extent.source.name))
        file = files[extent.source.name]
        with lock:
            file.seek(extent.offset)
            data = bytearray(file.read(extent.length)) if all_of_it else None
        data = bytearray(file.read(extent.length)) if data is None else data
        return torch.frombuffer(data, dtype=info.dtype).view(info.shape) if len(data) == info.nbytes else torch.ones(1)

    with contextlib.ExitStack() as opened:
        found = failures(suite(with_read(read)), tmp_path, only=AT_ANY_STEP)
    said = found.get(AT_ANY_STEP, "")
    assert ("one thread read 't1' while another, that reads 't0', was at" in said) is not all_of_it, said


def closes_for_others():
    opened = {}

    class Shared(FileSource):
        def read_into(self, view, offset):
            time.sleep(0.001)
            if self.name not in opened:
                raise SourceReadError("the file is closed")
            super().read_into(view, offset)

    class Faulty(LocalLoader):
        def get_weights(self, model_name_or_path):
            weights = super().get_weights(model_name_or_path)
            if not Path(model_name_or_path).is_file():
                return weights
            source = opened.setdefault(model_name_or_path, Shared(model_name_or_path))
            infos = [read_from(source, info) for info in weights.infos()]
            return wl.Weights.describe(infos, close=lambda: opened.pop(model_name_or_path, None))

    return suite(Faulty), {
        "test_several_threads_open_the_same_source": "the file is closed",
        AT_ANY_STEP: "the file is closed",
    }


def read_from(source, info):
    return wl.TensorInfo(info.name, info.dtype, info.shape, wl.Extent(source, info.extents[0].offset))


# ------------------------------------------------------------------ who declares what is not so


def takes_any_option():
    class Faulty(LocalLoader):
        def __init__(self, **options):
            super().__init__()

    return suite(Faulty), {"test_an_unknown_option_is_refused": "was not refused"}


def gives_an_option_no_type():
    class Faulty(LocalLoader):
        def __init__(self, size=1):
            super().__init__()

    return suite(Faulty), {
        "test_every_option_has_a_type": "no annotation, so nothing checks them: size",
        "test_a_value_of_another_type_is_refused": "'size' takes any object",
    }


def has_a_default_of_another_type():
    class Faulty(LocalLoader):
        def __init__(self, size: int = "1"):
            super().__init__()

    return suite(Faulty), {"test_defaults_may_be_spelled_out": "the default of 'size' is refused"}


def annotates_with_a_name_that_nobody_has():
    class Faulty(LocalLoader):
        def __init__(self, size: Nothing = 1):  # noqa: F821
            super().__init__()

    return suite(Faulty), {"test_a_value_of_another_type_is_refused": "'size' takes any object"}


def probing(probe):
    return type("Faulty", (LocalLoader,), {"probe": classmethod(lambda cls, path: probe(path))})


def fails_when_it_is_asked():
    return suite(probing(lambda path: wl.Probe.maybe(Path(path).read_bytes()[:1].hex()))), {
        "test_probing_answers_and_never_fails": "FileNotFoundError",
        "test_probing_claims_only_what_is_read": "IsADirectoryError",
        LISTED: "`probe` says Probe(answer='maybe'",
    }


def answers_with_a_truth_value():
    return suite(probing(lambda path: False)), {
        "test_probing_answers_and_never_fails": "answered False",
        "test_probing_claims_only_what_is_read": "answered False",
        LISTED: "`probe` says False",
    }


def claims_what_does_not_exist():
    probe = probing(lambda path: wl.Probe.no() if Path(path).is_dir() else wl.Probe.yes())
    return suite(probe), {"test_probing_answers_and_never_fails": "says yes to"}


def claims_all_folders_with_files():
    def probe(path):
        found = "\0" not in path and Path(path).is_dir() and any(Path(path).iterdir())
        return wl.Probe.yes() if found else wl.Probe.no()

    return suite(probing(probe)), {
        "test_probing_claims_only_what_is_read": "a checkpoint (torch), which the loader",
        LISTED: "`probe` says Probe(answer='no'",
    }


def recognises_nothing():
    return suite(probing(lambda path: wl.Probe.no())), {
        "test_probing_claims_only_what_is_read": "`probe` says no to a checkpoint that the loader reads",
        LISTED: "`probe` says Probe(answer='no'",
    }


def test_a_loader_that_wants_to_be_named_says_so_or_has_no_probe(tmp_path):
    wants = suite(
        type("Named", (LocalLoader,), {"probe": classmethod(lambda cls, path: wl.Probe.no())}), recognised=False
    )
    unasked = suite(type("Unasked", (LocalLoader,), {"probe": vars(wl.BaseWeightLoader)["probe"]}))
    for kind in (wants, unasked):
        (tmp_path / kind.loader.__name__).mkdir()
        check = "test_probing_claims_only_what_is_read"
        assert not failures(kind, tmp_path / kind.loader.__name__, only=check)


def has_another_name():
    return suite(LocalLoader, name="locale"), {"test_it_is_found_by_its_name": "nothing is named 'locale'"}


def has_anothers_name():
    return suite(LocalLoader, name="torch"), {"test_it_is_found_by_its_name": "leads to weightloaders.loaders.torch:"}


FAULTS = [
    reuses_a_buffer, hands_out_what_it_keeps, ties_what_is_equal, maps_the_file_to_be_written, maps_the_file_read_only,
    clears_its_memory_on_closing, makes_tensors_where_torch_does_by_default, hands_out_parameters,
    knows_one_dtype_too_few, declares_too_few_dtypes, knows_one_nan, keeps_what_it_read_of_a_path, unwraps_names,
    leaves_out_what_counts_batches, reads_16_mib_and_no_more, seeds_torch_as_it_always_does, sets_the_usual_dtype,
    touches_its_files, reads_ascii_paths_alone, reads_absolute_paths_alone, seeds_torch, prints,
    says_only_that_it_is_bad,
    casts_what_is_not_declared, declares_too_few_shapes, has_no_scalars, does_not_tell_case,
    writes_memory_as_it_lies, fills_only_weights, reads_everything_on_opening, keeps_what_it_mapped_on_opening,
    reads_listed_files_otherwise, answers_otherwise_for_listed_files,
    keeps_a_refused_file_open, reads_after_closing, keeps_a_file_open, raises_bare_key_errors,
    lets_the_system_say_what_is_missing,
    takes_an_empty_folder_for_weights, hangs_on_an_empty_file, fails_without_tensors, fills_up_what_is_cut_off,
    takes_anything_for_an_archive, lets_the_parser_speak, allocates_what_a_file_claims, unpickles, seeks_and_reads,
    closes_for_others, recognises_nothing, takes_any_option, gives_an_option_no_type,
    has_a_default_of_another_type,
    annotates_with_a_name_that_nobody_has, fails_when_it_is_asked, answers_with_a_truth_value,
    claims_what_does_not_exist, claims_all_folders_with_files, has_another_name, has_anothers_name,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_faulty_loader_fails_the_check_that_is_for_its_fault(fault, tmp_path):
    kind, expected = fault()
    for check, said in expected.items():
        found = failures(kind, tmp_path, only=check)
        assert said in found.get(check, f"{check} does not fail")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_faulty_loader_fails_no_other_check(fault, tmp_path):
    kind, expected = fault()
    assert set(failures(kind, tmp_path)) == set(expected)


@pytest.mark.parametrize(("min_dims", "max_dims"), [(2, 2), (1, 2), (2, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_a_right_loader_of_a_format_that_holds_little_passes(tmp_path, min_dims, max_dims, dtype):
    class Small(Sound):
        dtypes = frozenset({dtype})
        holds_empty = False

        def write_checkpoint(self, folder, tensors):
            for tensor in tensors.values():
                if not (tensor.dtype is dtype and min_dims <= tensor.dim() <= max_dims and tensor.numel()):
                    raise ValueError("the format can't hold it")
            return super().write_checkpoint(folder, tensors)

    Small.min_dims, Small.max_dims = min_dims, max_dims
    slow = {"test_it_is_found_by_its_name", "test_importing_the_loader_imports_nothing_heavy", SPAWNED, CHANGED}
    for name in {name.partition("[")[0] for name, _, _ in checks(Small)} - slow:
        (tmp_path / name).mkdir()
        assert not failures(Small, tmp_path / name, only=name)


def test_every_check_has_a_loader_that_fails_it():
    shown = {check.partition("[")[0] for fault in FAULTS for check in fault()[1]} | set(IN_PROCESSES)
    assert shown == {name.partition("[")[0] for name, _, _ in checks(Sound)}


def test_the_reference_lists_every_check_and_every_name():
    page = (Path(__file__).parents[1] / "docs" / "reference" / "testing.md").read_text(encoding="utf-8")
    every = {name.partition("[")[0] for name, _, _ in checks(Sound)}
    assert set(re.findall(r"^\| `(test_\w+)` \|", page, re.MULTILINE)) == every
    assert {name for name in testing.__all__ if f":: weightloaders.testing.{name}" not in page} == set()


# ------------------------------------------------------------------ what shows in another process only

HEAVY = "import transformers"
WORKER = """
import multiprocessing
if multiprocessing.parent_process() is not None:
    raise OSError("not in a worker")
"""
MODULE = """
{code}
from weightloaders.loaders.local import LocalLoader

class Faulty(LocalLoader):
    pass
"""
IN_PROCESSES = {
    "test_importing_the_loader_imports_nothing_heavy": (HEAVY, "transformers: import these inside"),
    "test_a_spawned_process_reads_the_same_values": (WORKER, "not in a worker"),
}


@pytest.mark.parametrize("check", IN_PROCESSES)
def test_a_loader_that_is_faulty_in_another_process_fails_the_check_for_it(check, tmp_path):
    code, said = IN_PROCESSES[check]
    name = f"faulty_{len(code)}"
    with fake_distribution(tmp_path, name, modules={name: MODULE.format(code=code)}):
        found = failures(suite(__import__(name).Faulty), tmp_path, only=check)
    assert said in found[check]


# ------------------------------------------------------------------ the suite as authors meet it


def run_pytest(folder, text, only):
    (folder / "test_it.py").write_text(text)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rA",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "test_it.py",
        "-k",
        only,
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
    return done.stdout


MINIMAL = """
import torch
from weightloaders import BaseWeightLoader
from weightloaders.testing import LoaderConformance

def whole(path):
    return torch.load(path, weights_only=True)

class Whole(BaseWeightLoader):
    def get_weights(self, model_name_or_path: str):
        return whole(model_name_or_path)

class TestWhole(LoaderConformance):
    loader = Whole
    dtypes = {torch.float32}

    def write_checkpoint(self, folder, tensors):
        torch.save(dict(tensors), folder / "x.pt")
        return folder / "x.pt"
"""


def test_pytest_runs_an_inherited_suite_with_a_test_a_dtype_and_says_what_is_wrong(tmp_path):
    said = run_pytest(tmp_path, MINIMAL, "float32 or int64 or names_come or missing")
    assert "PASSED test_it.py::TestWhole::test_values_are_exact[float32]" in said
    assert "FAILED test_it.py::TestWhole::test_a_dtype_that_is_not_declared_is_refused[int64]" in said
    assert f"FAILED test_it.py::TestWhole::{NAMES}" in said
    assert "opening read" in said
    assert "a foreign exception came out" in said
    assert "LoaderConformance::" not in said


FACTORY = """
import torch
from weightloaders.loaders.local import LocalLoader
from weightloaders.testing import LoaderConformance

class TestMade(LoaderConformance):
    name = "local"

    @staticmethod
    def loader(file_pattern: str = "*.safetensors"):
        return LocalLoader(file_pattern=file_pattern)
"""


def test_what_makes_the_loader_may_lie_in_the_tests_with_all_that_they_import(tmp_path):
    said = run_pytest(tmp_path, FACTORY, "nothing_heavy or found_by_its_name")
    assert "2 passed" in said, said


def test_a_class_without_loader_or_writer_says_what_it_lacks():
    class Lacking(LoaderConformance):
        pass

    with pytest.raises(NotImplementedError, match="needs an attribute `loader`"):
        Lacking().open("x")
    with pytest.raises(NotImplementedError, match="needs a method write_checkpoint"):
        Lacking().write_checkpoint(Path(), {})


def test_the_suite_can_be_imported_without_pytest_and_without_torch_until_it_is_used():
    code = """
import sys
sys.modules["pytest"] = None
import weightloaders.testing
print("torch" in sys.modules)
weightloaders.testing.LoaderConformance
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "False"
