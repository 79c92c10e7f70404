"""The way to an accelerator: slots, streams and events, on a stand-in that does everything as late as it may.

What is put into a stream of the stand-in happens only when somebody waits for an event that was recorded behind it. So
a slot that is filled again too early, or a wait that is left out, makes wrong values.
"""

from __future__ import annotations

import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch

from weightloaders import Weights, load_into
from weightloaders.errors import ConfigError, LoadError, ModelError
from weightloaders.mapping.placement import placement
from weightloaders.plan import CopyStep
from weightloaders.targets import Target
from weightloaders.transfer import staging
from weightloaders.transfer.device_map import DeviceMap
from weightloaders.transfer.devices import Accelerator, device_for, enough_memory_on, usable_device
from weightloaders.transfer.engine import Transfer
from weightloaders.transfer.forecast import forecast
from weightloaders.transfer.options import TransferOptions
from weightloaders.transfer.staging import Slot, Staging
from weightloaders.weights.info import Extent, TensorInfo
from weightloaders.weights.reading import swap_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from weightloaders.transfer.devices import Event
    from weightloaders.transfer.engine import Transferred

CPU = torch.device("cpu")
SLOT = 64


def _done() -> None:
    """In place of what was done, and of all that it held."""


class LateStream:
    def __init__(self, device: LateDevice | None = None) -> None:
        self.device = device
        self.queue: list[Callable[[], object]] = []
        self.done = 0
        self.lock = threading.RLock()

    def upload(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        self.run(lambda: destination.copy_(source))

    def run(self, work: Callable[[], object]) -> None:
        inference = torch.is_inference_mode_enabled()

        def late() -> None:
            with torch.inference_mode(inference), torch.no_grad():
                work()

        self.queue.append(late)

    def allocate(self, nbytes: int) -> torch.Tensor:
        assert self.device is not None
        return self.device.lend(torch.full((nbytes,), 0xEE, dtype=torch.uint8))

    def record(self) -> Event:
        return LateEvent(self, len(self.queue))

    def wait(self, event: Event) -> None:
        self.run(event.synchronize)

    def advance(self, to: int) -> None:
        with self.lock:
            while self.done < to:
                self.queue[self.done]()
                self.queue[self.done] = _done
                self.done += 1

    @property
    def pending(self) -> int:
        return len(self.queue) - self.done


class LateEvent:
    def __init__(self, stream: LateStream, at: int) -> None:
        self.stream, self.at = stream, at

    def synchronize(self) -> None:
        self.stream.advance(self.at)


class LateDevice:
    def __init__(self) -> None:
        self.streams: list[LateStream] = []
        self.consumers = LateStream()
        self.released = self.still_held = 0
        self.lent: list[weakref.ref[torch.Tensor]] = []

    def lend(self, memory: torch.Tensor) -> torch.Tensor:
        self.lent.append(weakref.ref(memory))
        return memory

    def stream(self) -> LateStream:
        self.streams.append(LateStream(self))
        return self.streams[-1]

    def current_stream(self) -> LateStream:
        return self.consumers

    def page_locked(self, nbytes: int) -> torch.Tensor:
        return self.lend(torch.full((nbytes,), 0xDD, dtype=torch.uint8))

    def can_cast(self, source: torch.dtype, target: torch.dtype) -> bool:
        return True

    def release_unused(self) -> None:
        self.released += 1
        self.still_held = sum(memory() is not None for memory in self.lent)


class Account:
    def __init__(self) -> None:
        self.now = self.most = 0
        self.lock = threading.Lock()

    def __call__(self, nbytes: int) -> None:
        with self.lock:
            self.now += nbytes
            self.most = max(self.most, self.now)


def stage(device: LateDevice, account: Account | None = None) -> Staging:
    return Staging({CPU: device}, account or Account(), slot_bytes=SLOT)


def numbers(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8)


def fill(there: Staging, target: torch.Tensor, data: torch.Tensor, starts: range | None = None) -> None:
    for start in starts or range(0, len(data), SLOT):
        part = data[start : start + SLOT]
        with there.slot() as slot:
            slot.view(len(part))[:] = part.numpy().tobytes()
            slot.upload(0, target[start : start + len(part)])


def cast(there: Staging, target: torch.Tensor, values: torch.Tensor) -> None:
    """Every second element, as another dtype, backwards."""
    count = SLOT // values.element_size()
    for start in range(0, len(values), count):
        part = values[start : start + count]
        with there.slot() as slot:
            slot.view(part.nbytes)[:] = part.view(torch.uint8).numpy().tobytes()

            def place(stored: torch.Tensor, start: int = start, dtype: torch.dtype = values.dtype) -> None:
                given = stored.view(dtype)
                target[start : start + len(given)].copy_(given.flip(0))

            slot.place(CPU, 0, part.nbytes, place)


def flipped(values: torch.Tensor) -> torch.Tensor:
    count = SLOT // values.element_size()
    return torch.cat([part.flip(0) for part in values.split(count)])


def test_bytes_arrive_when_all_is_done() -> None:
    data, target = numbers(1000), torch.zeros(1000, dtype=torch.uint8)
    with stage(LateDevice()) as there:
        fill(there, target, data)
    assert torch.equal(target, data)


def test_casts_are_made_on_the_device_after_the_copy() -> None:
    values, target = torch.randn(333), torch.zeros(333, dtype=torch.bfloat16)
    with stage(LateDevice()) as there:
        cast(there, target, values)
    assert torch.equal(target, flipped(values).bfloat16())


def test_several_threads_fill_one_tensor() -> None:
    device = LateDevice()
    data, target = numbers(5000), torch.zeros(5000, dtype=torch.uint8)
    barrier = threading.Barrier(3)

    def work(thread: int) -> None:
        barrier.wait(10)
        fill(there, target, data, range(thread * SLOT, len(data), 3 * SLOT))

    with stage(device) as there, ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
    assert torch.equal(target, data)
    assert len(device.streams) == 3


def test_one_read_goes_to_several_tensors_and_devices() -> None:
    first, second = LateDevice(), LateDevice()
    meta = torch.device("meta")  # a name for a second device; nothing lies there
    data, target, cast_to = numbers(48), torch.zeros(16, dtype=torch.uint8), torch.zeros(8)
    with Staging({CPU: first, meta: second}, Account(), slot_bytes=SLOT) as there:
        for _ in range(3):
            with there.slot() as slot:
                slot.view(48)[:] = data.numpy().tobytes()
                slot.upload(0, target)
                slot.place(meta, 16, 32, lambda stored: cast_to.copy_(stored.view(torch.float32)))
    assert torch.equal(target, data[:16])
    assert torch.equal(cast_to.view(torch.uint8), data[16:])
    assert [len(device.streams) for device in (first, second)] == [1, 1]


def test_reading_goes_on_while_a_copy_is_under_way() -> None:
    device = LateDevice()
    data, target = numbers(3 * SLOT), torch.zeros(3 * SLOT, dtype=torch.uint8)
    with stage(device) as there:
        fill(there, target, data, range(0, 2 * SLOT, SLOT))
        copies = device.streams[0].pending
        assert copies == 3  # the wait for the caller's own stream, and two copies
        fill(there, target, data, range(2 * SLOT, 3 * SLOT, SLOT))
        # The third went into the first slot, so the first copy was waited for; the second was not.
        assert device.streams[0].done == 2
    assert torch.equal(target, data)


def test_what_the_caller_has_put_into_its_own_stream_comes_first() -> None:
    device = LateDevice()
    target = torch.zeros(SLOT, dtype=torch.uint8)
    device.consumers.run(lambda: target.fill_(7))  # what initialises the parameter is still on its way
    data = numbers(SLOT)
    with stage(device) as there:
        fill(there, target, data)
    device.consumers.record().synchronize()
    assert torch.equal(target, data)


@pytest.mark.parametrize(
    ("owner", "wait"),
    [(Slot, "wait_until_free"), (staging._Lane, "synchronize"), (LateStream, "wait")],
    ids=["for a slot", "at the end", "for the caller's stream"],
)
def test_each_wait_is_needed(owner: type, wait: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in is strict enough to notice: without any one of them the values are wrong."""
    device = LateDevice()
    data, target = numbers(6 * SLOT), torch.zeros(6 * SLOT, dtype=torch.uint8)
    device.consumers.run(lambda: target.fill_(7))
    monkeypatch.setattr(owner, wait, lambda *args: None)
    with stage(device) as there:
        fill(there, target, data)
    device.consumers.record().synchronize()
    assert not torch.equal(target, data)


def test_work_that_is_not_read_from_a_slot_is_done_when_it_returns() -> None:
    target = torch.zeros(4)
    with stage(LateDevice()) as there:
        there.run(CPU, lambda: target.fill_(3))
        assert target.tolist() == [3, 3, 3, 3]


def test_a_read_that_fails_leaves_what_came_before_in_order() -> None:
    data, target = numbers(2 * SLOT), torch.zeros(2 * SLOT, dtype=torch.uint8)
    with pytest.raises(OSError, match="the disk"), stage(LateDevice()) as there:  # noqa: PT012 -- all of it is the test
        fill(there, target, data, range(0, SLOT, SLOT))
        with there.slot() as slot:
            slot.view(SLOT)[:] = data[SLOT:].numpy().tobytes()
            slot.upload(0, target[SLOT:])
            raise OSError("the disk is gone")
    assert torch.equal(target, data)


def test_memory_is_accounted_for_and_given_back() -> None:
    device, account = LateDevice(), Account()
    target = torch.zeros(20 * SLOT, dtype=torch.uint8)
    with stage(device, account) as there:
        assert account.now == 0
        fill(there, target, numbers(SLOT))
        assert account.now == SLOT  # what is not needed is not taken
        fill(there, target, numbers(20 * SLOT))
        assert account.now == staging.SLOTS * SLOT
        cast(there, torch.zeros(1), torch.ones(1))
        assert account.now == account.most == (staging.SLOTS + 1) * SLOT
        assert device.released == 0
    assert account.now == 0
    # An allocator can give back only what nobody holds any more.
    assert (device.released, device.still_held) == (1, 0)


def test_the_caches_of_others_are_left_alone_where_nothing_was_staged() -> None:
    device = LateDevice()
    with stage(device):
        pass
    assert device.released == 0


def test_without_page_locked_memory_the_values_are_right_and_it_is_told_once() -> None:
    class Poor(LateDevice):
        def page_locked(self, nbytes: int) -> torch.Tensor:
            raise RuntimeError("CUDA error: out of memory. Something about kernels.\nSecond line")

    data, target = numbers(5 * SLOT), torch.zeros(5 * SLOT, dtype=torch.uint8)
    with stage(Poor()) as there:
        fill(there, target, data)
    assert torch.equal(target, data)
    assert len(there.notes) == 1
    assert "no page-locked memory to be had (CUDA error: out of memory)" in there.notes[0]


def test_too_little_memory_on_the_device_is_our_error() -> None:
    class Full(LateStream):
        def allocate(self, nbytes: int) -> torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64 bytes.")

    class FullDevice(LateDevice):
        def stream(self) -> LateStream:
            self.streams.append(Full())
            return self.streams[-1]

    with pytest.raises(LoadError, match=f"not enough memory for {SLOT} bytes"), stage(FullDevice()) as there:
        cast(there, torch.zeros(9), torch.ones(9))


def test_a_lack_of_device_memory_says_where_and_another_error_stays_as_it_is() -> None:
    where = torch.device("cuda", 1)
    with pytest.raises(LoadError) as caught, enough_memory_on(where, "tensor 'w', which takes 8 bytes", tensor="w"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert "not enough memory on cuda:1 for tensor 'w', which takes 8 bytes" in str(caught.value)
    assert caught.value.tensor == "w"
    assert "device_map" in str(caught.value)
    with pytest.raises(RuntimeError, match="unspecified launch failure"), enough_memory_on(where, "something"):
        raise RuntimeError("CUDA error: unspecified launch failure")


class Broken(LateDevice):
    """A device that fails at whatever it is asked for."""

    def stream(self) -> LateStream:
        stream = super().stream()
        stream.run(self._fail)
        return stream

    def _fail(self) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_device_that_fails_does_not_hide_the_first_error() -> None:
    target = torch.zeros(SLOT, dtype=torch.uint8)
    with pytest.raises(OSError, match="the disk"), stage(Broken()) as there:  # noqa: PT012 -- all of it is the test
        fill(there, target, numbers(SLOT))
        raise OSError("the disk is gone")
    with pytest.raises(LoadError, match="illegal memory access"), stage(Broken()) as there:
        fill(there, target, numbers(SLOT))


# ------------------------------------------------------------------ through the engine


class Late:
    """Takes the CPU for an accelerator that is late."""

    def __init__(self, *, casts: bool = True) -> None:
        self.devices: list[LateDevice] = []
        self.casts = casts

    def __call__(self, where: torch.device) -> LateDevice:
        device = LateDevice()
        device.can_cast = lambda source, target: self.casts  # type: ignore[method-assign]
        self.devices.append(device)
        return device


def source(path: Path, *tensors: torch.Tensor, byteorder: Any = "little") -> list[TensorInfo]:
    """Tensors one behind the other, eight bytes between them."""
    data, offsets = [], []
    end = 0
    for tensor in tensors:
        raw = tensor.contiguous().view(-1).view(torch.uint8)
        if byteorder == "big":
            raw = raw.view(-1, tensor.element_size()).flip(1).reshape(-1)
        data += [bytes(8), raw.numpy().tobytes()]
        offsets.append(end + 8)
        end += 8 + tensor.nbytes
    path.write_bytes(b"".join(data))
    return [
        TensorInfo(f"w{at}", tensor.dtype, tensor.shape, Extent(path, offset, byteorder=byteorder))
        for at, (tensor, offset) in enumerate(zip(tensors, offsets, strict=True))
    ]


def into(parameter: torch.Tensor, info: TensorInfo) -> CopyStep:
    return CopyStep.whole(Target(info.name, parameter, "parameter", True, parameter.dtype), info)


def move(steps: list[CopyStep], late: Callable[[torch.device], Any], **options: Any) -> Transferred:
    moved = Transfer(steps, open_device=late, options=TransferOptions(extra_memory="4 MiB", threads=2, **options)).run()
    # Nothing goes past the stand-in.
    assert "straight" not in moved.bytes_by_path
    return moved


@pytest.mark.parametrize("casts", [True, False], ids=["casts on the device", "casts on the host"])
@pytest.mark.parametrize("byteorder", ["little", "big"])
@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16], ids=str)
def test_every_dtype_arrives_as_torch_would_cast_it(
    tmp_path: Path, stored: torch.dtype, wanted: torch.dtype, byteorder: str, casts: bool
) -> None:
    # Larger than all the slots of both threads together.
    expected = [torch.randn(900, 1100, dtype=torch.float64).to(stored), torch.randn(7).to(stored)]
    parameters = [torch.full(tensor.shape, 7.0, dtype=wanted) for tensor in expected]
    infos = source(tmp_path / "f", *expected, byteorder=byteorder)
    late = Late(casts=casts)
    moved = move([into(p, info) for p, info in zip(parameters, infos, strict=True)], late)
    assert all(torch.equal(p, e.to(wanted)) for p, e in zip(parameters, expected, strict=True))
    assert moved.extra_memory <= 4 << 20
    # What was cast on the host went by way of nothing that is to be given back.
    assert all(device.released for device in late.devices) or not casts
    assert not any(device.still_held for device in late.devices)


def test_parts_and_transposes_are_placed_on_the_device(tmp_path: Path) -> None:
    q, k, turned = torch.randn(300, 500), torch.randn(100, 500), torch.randn(700, 500)
    infos = source(tmp_path / "f", q, k, turned)
    fused, transposed = torch.full((400, 500), 7.0), torch.full((500, 700), 7.0)
    steps = [
        CopyStep(
            Target("qk", fused, "parameter", True, fused.dtype),
            tuple(infos[:2]),
            (
                placement(0, 0, 0, [(q.numel(), 1, 1)]),
                placement(1, 0, q.numel(), [(k.numel(), 1, 1)]),
            ),
        ),
        CopyStep(
            Target("t", transposed, "parameter", True, transposed.dtype),
            (infos[2],),
            (placement(0, 0, 0, [(700, 500, 1), (500, 1, 700)]),),
        ),
    ]
    move(steps, Late())
    assert torch.equal(fused, torch.cat([q, k]))
    assert torch.equal(transposed, turned.t())


def test_bytes_are_reversed_on_the_device_that_they_are_on() -> None:
    # Of the devices without which this can be told, meta is the only one: there nothing else may take part.
    swap_bytes(torch.empty(100, dtype=torch.float64, device="meta"))


def test_a_parameter_that_is_not_in_row_major_order_arrives(tmp_path: Path) -> None:
    expected = torch.randn(400, 600)
    parameter = torch.full((600, 400), 7.0, dtype=torch.bfloat16).t()
    move([into(parameter, source(tmp_path / "f", expected)[0])], Late())
    assert torch.equal(parameter, expected.bfloat16())


def test_thousands_of_small_tensors_arrive_in_few_reads(tmp_path: Path) -> None:
    expected = [torch.randn(1 + at % 50) for at in range(3000)]
    parameters = [
        torch.zeros(tensor.shape, dtype=(torch.float32, torch.float16)[at % 2]) for at, tensor in enumerate(expected)
    ]
    infos = source(tmp_path / "f", *expected)
    moved = move([into(p, info) for p, info in zip(parameters, infos, strict=True)], Late())
    assert all(torch.equal(p, e.to(p.dtype)) for p, e in zip(parameters, expected, strict=True))
    assert moved.reads < 20


def test_what_a_loader_reads_itself_arrives(tmp_path: Path) -> None:
    expected = torch.randn(30, 40)
    parameter = torch.zeros(30, 40, dtype=torch.bfloat16)
    move([into(parameter, TensorInfo("w", torch.float32, (30, 40), read=expected.clone))], Late())
    assert torch.equal(parameter, expected.bfloat16())


def test_a_file_that_ends_too_early_names_the_tensor(tmp_path: Path) -> None:
    infos = source(tmp_path / "f", torch.ones(1000), torch.ones(1000))
    os.truncate(tmp_path / "f", 5000)
    with pytest.raises(LoadError) as caught:
        move([into(torch.zeros(1000), info) for info in infos], Late())
    assert caught.value.tensor in caught.value.written
    assert caught.value.file == str(tmp_path / "f")


def test_a_lack_of_page_locked_memory_is_told_in_the_report(tmp_path: Path) -> None:
    class Poor(LateDevice):
        def page_locked(self, nbytes: int) -> torch.Tensor:
            raise RuntimeError("no more")

    parameter = torch.zeros(10)
    moved = move([into(parameter, source(tmp_path / "f", torch.ones(10))[0])], lambda where: Poor())
    assert torch.equal(parameter, torch.ones(10))
    assert len(moved.notes) == 1
    assert "no page-locked memory" in moved.notes[0]


def test_a_device_that_fails_fails_the_load(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="an illegal memory access") as caught:
        move([into(torch.zeros(10), source(tmp_path / "f", torch.ones(10))[0])], lambda where: Broken())
    assert caught.value.written == ("w0",)


@pytest.mark.parametrize("to_cast", [False, True])
def test_a_forecast_for_an_accelerator_tells_what_goes_through_slots(tmp_path: Path, to_cast: bool) -> None:
    expected = torch.randn(3000, 1000)
    info = source(tmp_path / "f", expected)[0]
    dtype = torch.bfloat16 if to_cast else torch.float32
    with torch.device("meta"):
        on_meta = torch.empty(3000, 1000, dtype=dtype)
    told = forecast([into(on_meta, info)], devices=DeviceMap({"": torch.device("cuda", 0)}))
    done = Transfer([into(torch.empty(3000, 1000, dtype=dtype), info)], open_device=Late()).run()
    assert (told.bytes_to_read, told.buffered, told.reads) == (
        done.bytes_read,
        done.bytes_by_path["buffered"],
        done.reads,
    )
    assert told.straight == 0
    assert 0 < done.extra_memory <= told.extra_memory <= 64 << 20
    assert forecast([into(on_meta, info)]).straight == (0 if to_cast else expected.nbytes)


# ------------------------------------------------------------------ what this machine has


def test_memory_of_the_host_is_written_directly() -> None:
    assert device_for(CPU) is None
    assert device_for(torch.device("meta")) is None
    assert isinstance(device_for(torch.device("cuda", 1)), Accelerator)


@pytest.mark.parametrize("device", ["cuda:4096", "mps:7", 4096, "cudda", "cpu:x", True, None, object()])
def test_a_device_that_is_not_here_is_named_with_those_that_are(device: object) -> None:
    with pytest.raises(ConfigError, match=r"this machine has cpu") as caught:
        usable_device(device)
    assert str(device) in str(caught.value)


@pytest.mark.parametrize("device", ["cpu", "cpu:0", CPU])
def test_the_cpu_is_always_here(device: torch.device | str) -> None:
    assert usable_device(device) == CPU


# ------------------------------------------------------------------ on accelerators


def accelerator(index: int = 0) -> torch.device:
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return torch.device(kind.type, index)


def filled(shape: tuple[int, ...], dtype: torch.dtype, where: torch.device) -> torch.Tensor:
    return torch.full(shape, 7.0, dtype=dtype, device=where)


@pytest.mark.gpu
@pytest.mark.parametrize("byteorder", ["little", "big"])
@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_on_an_accelerator_every_dtype_arrives_as_torch_would_cast_it(
    tmp_path: Path, stored: torch.dtype, wanted: torch.dtype, byteorder: str
) -> None:
    expected = [torch.randn(3000, 1100, dtype=torch.float64).to(stored), torch.randn(7).to(stored)]
    parameters = [filled(tuple(tensor.shape), wanted, accelerator()) for tensor in expected]
    infos = source(tmp_path / "f", *expected, byteorder=byteorder)
    moved = Transfer([into(p, info) for p, info in zip(parameters, infos, strict=True)]).run()
    assert all(torch.equal(p.cpu(), e.to(wanted)) for p, e in zip(parameters, expected, strict=True))
    assert moved.extra_memory <= 64 << 20


@pytest.mark.gpu
def test_on_an_accelerator_transposes_and_codes_arrive(tmp_path: Path) -> None:
    turned, codes = torch.randn(3000, 500), torch.randn(40, 50).to(torch.float8_e4m3fn)
    infos = source(tmp_path / "f", turned, codes)
    by_columns = filled((3000, 500), torch.float32, accelerator()).t().contiguous().t()
    transposed = filled((500, 3000), torch.bfloat16, accelerator())
    there = torch.zeros(40, 50, dtype=torch.float8_e4m3fn, device=accelerator())
    Transfer(
        [
            into(by_columns, infos[0]),
            CopyStep(
                Target("t", transposed, "parameter", True, transposed.dtype),
                (infos[0],),
                (placement(0, 0, 0, [(3000, 500, 1), (500, 1, 3000)]),),
            ),
            into(there, infos[1]),
        ]
    ).run()
    assert torch.equal(by_columns.cpu(), turned)
    assert torch.equal(transposed.cpu(), turned.t().bfloat16())
    assert torch.equal(there.cpu().view(torch.uint8), codes.view(torch.uint8))


@pytest.mark.gpu
def test_on_an_accelerator_new_infinities_are_noticed(tmp_path: Path) -> None:
    old = torch.tensor([1.0, float("inf"), -float("inf")])
    infos = source(tmp_path / "f", torch.tensor([1.0, 1e6]), old, torch.ones(3))
    parameters = [filled(info.shape, torch.float16, accelerator()) for info in infos]
    moved = Transfer([into(p, info) for p, info in zip(parameters, infos, strict=True)]).run()
    assert moved.infinities == ["w0"]
    assert torch.equal(parameters[1].cpu(), old.half())


@pytest.mark.gpu
def test_on_an_accelerator_what_the_caller_began_comes_first_and_what_it_does_next_comes_later(tmp_path: Path) -> None:
    expected = torch.randn(2000, 1000)
    info = source(tmp_path / "f", expected)[0]
    parameter = torch.empty(2000, 1000, device=accelerator())
    stream = torch.Stream(accelerator())
    with stream:
        busy = torch.randn(2000, 2000, device=accelerator())
        for _ in range(50):
            busy = busy @ busy / busy.norm()
        parameter.fill_(7)
        Transfer([into(parameter, info)]).run()
        after = parameter * 2
    stream.synchronize()
    assert torch.equal(after.cpu(), expected * 2)


@pytest.mark.gpu
def test_on_an_accelerator_without_page_locked_memory_the_values_are_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(self: Accelerator, nbytes: int) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Accelerator, "page_locked", none_left)
    expected = torch.randn(5000, 1000)
    parameters = [filled((5000, 1000), dtype, accelerator()) for dtype in (torch.float32, torch.bfloat16)]
    info = source(tmp_path / "f", expected)[0]
    moved = Transfer([into(p, info) for p in parameters]).run()
    assert all(torch.equal(p.cpu(), expected.to(p.dtype)) for p in parameters)
    assert len(moved.notes) == 1


@pytest.mark.gpu
def test_on_an_accelerator_what_only_the_load_needed_is_given_back(tmp_path: Path) -> None:
    module = torch.get_device_module(accelerator())
    if not hasattr(module, "memory_reserved"):
        pytest.skip("its allocator does not tell what it keeps")
    info = source(tmp_path / "f", torch.randn(3000, 1000))[0]
    parameter = filled((3000, 1000), torch.bfloat16, accelerator())
    module.empty_cache()
    before = module.memory_reserved(accelerator())
    Transfer([into(parameter, info)]).run()
    assert module.memory_reserved(accelerator()) == before


@pytest.mark.gpu
def test_on_an_accelerator_too_little_memory_is_our_error(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = torch.nn.Linear(1 << 24, 1 << 24, bias=False)  # a million GB
    weights = TensorInfo("weight", torch.float32, (1 << 24, 1 << 24), read=lambda: torch.empty(0))
    with pytest.raises(ModelError, match=r"not enough memory on .* for tensor 'weight'"):
        load_into(model, Weights.describe([weights]), device=accelerator(), progress=False)
    assert model.weight.is_meta


@pytest.mark.gpu
def test_the_second_accelerator_is_filled_whatever_the_current_one_is(tmp_path: Path) -> None:
    if torch.accelerator.device_count() < 2:
        pytest.skip("needs two")
    expected = torch.randn(3000, 1000)
    info = source(tmp_path / "f", expected)[0]
    parameters = [filled((3000, 1000), torch.bfloat16, accelerator(index)) for index in (0, 1)]
    for index in (0, 1):
        with torch.accelerator.device_index(index):
            Transfer([into(p, info) for p in parameters]).run()
            assert torch.accelerator.current_device_index() == index
        for parameter in parameters:
            assert torch.equal(parameter.cpu(), expected.bfloat16())
            parameter.fill_(7)


@pytest.mark.gpu
def test_a_device_without_a_number_is_the_current_one() -> None:
    for index in range(torch.accelerator.device_count()):
        with torch.accelerator.device_index(index):
            assert usable_device(accelerator().type) == accelerator(index)
