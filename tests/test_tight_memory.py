"""Loads for which memory, address space or descriptors are short: they fit, or end in an error that leaves no doubt.

Each runs in a process of its own, because limits and high-water marks are a process's.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import subprocess
import sys
import textwrap
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from weightloaders.weights.threads import in_parallel

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="has other limits, and tells its memory otherwise")

MIB = 1 << 20
EXPERTS = 64
_COMMON = """
    import gc, json, resource, sys, torch
    from torch import nn
    from weightloaders import Convert, load_into, load_status
    from weightloaders.errors import WeightLoadersError

    def status(key):
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith(key + ":"))

    class Dense(nn.Module):
        def __init__(self, count, shape, dtype, device):
            super().__init__()
            for i in range(count):
                self.register_parameter(f"w{i}", nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), False))
"""


def run(program: str, *arguments: object, limit: str = "") -> Any:
    code = textwrap.dedent(_COMMON) + textwrap.dedent(program)
    command = [sys.executable, "-c", code, *map(str, arguments)]
    if limit:
        command = ["sh", "-c", f'{limit}; exec "$@"', "sh", *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# ------------------------------------------------------------------ extra memory

_EXTRA = """
    folder, *kinds = sys.argv[1:]
    rules = {
        "transposed": [Convert("w{i}", "w{i}", "transpose")],
        "stacked": [Convert("layers.{l}.experts.{e}.w", "w{l}", "stack_experts")],
    }

    def model(kind, count, rows, columns):
        shape = (64, rows // 64, columns) if kind == "stacked" else (rows, columns)
        return Dense(count, shape, torch.bfloat16, "meta")

    def measured(kind):
        # What the first load of all costs (modules, threads, the allocator's first steps) is not this one's.
        load_into(model(kind, 1, 64, 64), f"{folder}/{kind}-warm.safetensors", rules=rules.get(kind), progress=False)
        filled = model(kind, 6, 4096, 4096)
        gc.collect()
        before = status("VmRSS")
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the high-water mark starts here
        report = load_into(filled, f"{folder}/{kind}.safetensors", rules=rules.get(kind), progress=False)
        peak, after = status("VmHWM") - before, status("VmRSS") - before
        return {
            "model": sum(p.nbytes for p in filled.parameters()), "peak": peak, "after": after,
            "reported": report.extra_memory, "sums": [p.view(torch.int16).sum().item() for p in filled.parameters()],
        }

    print(json.dumps({kind: measured(kind) for kind in kinds}))
"""


def write(kind: str, path: Path, count: int, rows: int, columns: int) -> list[int]:
    dtype = torch.float32 if kind == "cast" else torch.bfloat16
    tensors = {}
    sums = []
    for i in range(count):
        values = torch.arange(rows * columns, dtype=torch.int32).view(rows, columns).add_(i).remainder_(251).to(dtype)
        sums.append(int(values.bfloat16().view(torch.int16).sum()))
        if kind == "stacked":
            tensors |= {f"layers.{i}.experts.{e}.w": part.clone() for e, part in enumerate(values.chunk(EXPERTS))}
        else:
            tensors[f"w{i}"] = values.t().contiguous() if kind == "transposed" else values
    save_file(tensors, path)
    return sums


@pytest.mark.slow
def test_a_load_takes_no_more_than_its_constant_beside_the_model(tmp_path: Path) -> None:
    kinds = ("dense", "cast", "transposed", "stacked")
    sums = {}
    for kind in kinds:
        write(kind, tmp_path / f"{kind}-warm.safetensors", 1, 64, 64)
        sums[kind] = write(kind, tmp_path / f"{kind}.safetensors", 6, 4096, 4096)
    for kind, found in run(_EXTRA, tmp_path, *kinds).items():
        assert found["model"] == 192 * MIB
        assert found["sums"] == sums[kind], kind
        # The parameters are really in memory, not promised: lazily mapped ones would seem to cost nothing.
        assert found["after"] > 0.95 * found["model"], kind
        assert found["peak"] < found["model"] + 64 * MIB, kind
        assert found["after"] < found["model"] + 64 * MIB, kind
        assert found["reported"] <= 64 * MIB, kind


# ------------------------------------------------------------------ address space

_LIMITED = """
    folder = sys.argv[1]
    load_into(Dense(1, (8, 8), torch.bfloat16, "meta"), f"{folder}/warm.safetensors", progress=False)

    def attempt(dtype, device, room, name="m.safetensors"):
        model = Dense(4, (2048, 2048) if name == "m.safetensors" else (1 << 28,), dtype, device)
        if device == "cpu":
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(-1)
        gc.collect()
        resource.setrlimit(resource.RLIMIT_AS, (status("VmSize") + (room << 20), resource.RLIM_INFINITY))
        try:
            load_into(model, f"{folder}/{name}", progress=False)
            said = None
        except WeightLoadersError as error:
            said = str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        if device == "meta":
            untouched = all(p.is_meta for p in model.parameters())
        else:
            untouched = all(bool((p == -1).all()) for p in model.parameters())
        right = not untouched and all(bool((p == i).all()) for i, p in enumerate(model.parameters()))
        return {"what": f"{dtype} {device} {room}", "said": said, "untouched": untouched, "right": right,
                "state": load_status(model)}

    outcomes = {"sweep": [], "ample": [], "short": []}
    for dtype in (torch.float32, torch.bfloat16):
        for device in ("meta", "cpu"):
            needed = (4 << 22) * dtype.itemsize >> 20 if device == "meta" else 0
            outcomes["sweep"] += [attempt(dtype, device, needed + more) for more in (-needed // 2, 0, 2, 8, 20)]
            outcomes["ample"].append(attempt(dtype, device, needed + 96))
        outcomes["short"].append(attempt(dtype, "meta", 512, "large.safetensors"))
    print(json.dumps(outcomes))
"""


def test_a_load_for_which_the_address_space_is_short_fits_or_says_so(tmp_path: Path) -> None:
    save_file({f"w{i}": torch.full((2048, 2048), float(i)) for i in range(4)}, tmp_path / "m.safetensors")
    save_file({"w0": torch.zeros(8, 8)}, tmp_path / "warm.safetensors")
    with (tmp_path / "large.safetensors").open("wb") as file:  # 4 GiB, of which only the header is written
        size = 1 << 30
        places = {f"w{i}": [i * size, (i + 1) * size] for i in range(4)}
        header = json.dumps(
            {name: {"dtype": "F32", "shape": [size // 4], "data_offsets": place} for name, place in places.items()}
        ).encode()
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 4 * size)
    outcomes = run(_LIMITED, tmp_path)
    for outcome in itertools.chain.from_iterable(outcomes.values()):
        if outcome["said"] is None:
            assert (outcome["right"], outcome["state"]) == (True, "loaded"), outcome
        else:
            assert outcome["untouched"] is (outcome["state"] is None), outcome
    assert all(outcome["said"] is None for outcome in outcomes["ample"])
    for outcome in outcomes["short"]:
        assert "not enough memory for tensor" in outcome["said"]
        assert outcome["untouched"]


_THREADS = """
    from weightloaders.weights.threads import threads_that_fit

    found = [threads_that_fit(4)]
    for room in (200, 0):
        resource.setrlimit(resource.RLIMIT_AS, (status("VmSize") + (room << 20), resource.RLIM_INFINITY))
        found.append(threads_that_fit(4))
    print(json.dumps(found))
"""


def test_no_more_threads_are_started_than_there_is_address_space_for() -> None:
    assert run(_THREADS) == [4, 1, 0]


_IN_PARALLEL = """
    import threading
    from weightloaders.weights.threads import in_parallel

    def work(number):
        names.add(threading.current_thread().name)
        if number == fails:
            raise ValueError(number)
        return number * number

    found = []
    for room in (None, 200, 0):
        if room is not None:
            resource.setrlimit(resource.RLIMIT_AS, (status("VmSize") + (room << 20), resource.RLIM_INFINITY))
        for fails in (None, 3):
            names = set()
            try:
                result = in_parallel(work, range(40), most=4, name="helper")
            except ValueError as error:
                result = str(error)
            found.append([result, "MainThread" in names])
    print(json.dumps(found))
"""


_CHECKSUMS = """
    from weightloaders.weights.checksums import Checksum
    from weightloaders.weights.source import FileSource

    source = FileSource(sys.argv[1])
    wrong, right = (Checksum("sha256", digest, "a test") for digest in ("0" * 64, sys.argv[2]))
    resource.setrlimit(resource.RLIMIT_AS, (status("VmSize") + (20 << 20), resource.RLIM_INFINITY))
    found = [[m.found for m in Checksum.mismatches({source: due})] for due in (wrong, right)]
    print(json.dumps(found))
"""


def test_checksums_are_compared_where_there_are_no_threads(tmp_path: Path) -> None:
    content = bytes(range(256)) * 100
    (tmp_path / "file").write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    assert run(_CHECKSUMS, tmp_path / "file", digest) == [[digest], []]


def test_what_is_done_in_parallel_is_done_here_where_there_are_no_threads() -> None:
    squares = [n * n for n in range(40)]
    assert run(_IN_PARALLEL) == [
        [squares, False], ["3", False], [squares, True], ["3", True], [squares, True], ["3", True]
    ]  # fmt: skip


def test_what_threads_that_could_not_be_started_were_to_do_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    started = 0
    start = threading.Thread.start

    def starts_two(thread: threading.Thread) -> None:
        nonlocal started
        started += 1
        if started > 2:
            raise RuntimeError("can't start new thread")
        start(thread)

    def work(number: int) -> int:
        time.sleep(0.01)
        return number * number

    monkeypatch.setattr(threading.Thread, "start", starts_two)
    assert in_parallel(work, range(40), most=8) == [n * n for n in range(40)]
    assert started == 3


# ------------------------------------------------------------------ descriptors

_SHARDS = """
    folder, *modes = sys.argv[1:]
    found = {}
    for mode in modes:
        model = Dense(64, (100,), torch.float32, "meta")
        load_into(model, folder, transfer=mode, progress=False)
        found[mode] = all(bool((p == i).all()) for i, p in enumerate(model.parameters()))
    print(json.dumps(found))
"""


def test_64_shards_load_with_40_descriptors(tmp_path: Path) -> None:
    names = {}
    for i in range(64):
        names[f"w{i}"] = f"model-{i + 1:05}-of-00064.safetensors"
        save_file({f"w{i}": torch.full((100,), float(i))}, tmp_path / names[f"w{i}"])
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    modes = ("direct", "o_direct", "stream", "mmap")
    assert run(_SHARDS, tmp_path, *modes, limit="ulimit -n 40") == dict.fromkeys(modes, True)
