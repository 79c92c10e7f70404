"""While a thread writes weights, others neither compute with them nor save them; and the other way round."""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from weightloaders import LLM, BaseWeightLoader, SamplingParams, hookimpl, hooks, load_into, load_status, save_weights
from weightloaders.errors import ModelError, WeightLoadersError
from weightloaders.loading import turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PATIENCE = 60
# Long enough for what does not wait to be done.
A_MOMENT = 0.3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints of one model."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        initializer_range=0.5,
    )  # fmt: skip
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        folder = tmp_path_factory.mktemp(f"seed{seed}")
        LlamaForCausalLM(config).save_pretrained(folder)
        found.append(folder)
    return found[0], found[1]


def text(llm: LLM) -> list[int]:
    return list(llm.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids)


@pytest.fixture
def texts(folders: tuple[Path, Path]) -> tuple[list[int], list[int]]:
    old, new = (text(LLM(folder, progress=False)) for folder in folders)
    assert old != new
    return old, new


class Paused:
    """Code that stops at its first call until it is let go."""

    def __init__(self) -> None:
        self.reached, self.go = threading.Event(), threading.Event()

    def __call__(self, *_: Any) -> None:
        self.reached.set()
        assert self.go.wait(PATIENCE)


@contextlib.contextmanager
def started(work: Callable[[], Any]) -> Iterator[tuple[threading.Thread, list[Any]]]:
    """Work in a thread, and what it returned or raised."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except WeightLoadersError as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield thread, results
    thread.join(PATIENCE)
    assert not thread.is_alive()


def reload_by_llm(llm: LLM, folder: Path, **options: Any) -> None:
    llm.reload_weights(folder, **options)


def reload_by_load_into(llm: LLM, folder: Path, **options: Any) -> None:
    load_into(llm.model, folder, **options)


def reload_a_part(llm: LLM, folder: Path, **options: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    load_into(llm.model.get_submodule("lm_head"), {"weight": tensors["lm_head.weight"]}, **options)


@pytest.mark.parametrize("reload", [reload_by_llm, reload_by_load_into, reload_a_part])
def test_a_load_waits_for_the_text_that_is_being_written(
    folders: tuple[Path, Path], texts: tuple[list[int], list[int]], reload: Callable[..., None]
) -> None:
    llm = LLM(folders[0], progress=False)
    head = llm.model.get_parameter("lm_head.weight")
    before, paused = head.clone(), Paused()
    handle = llm.model.register_forward_hook(paused)
    with started(lambda: text(llm)) as (_, written):
        assert paused.reached.wait(PATIENCE)
        with started(lambda: reload(llm, folders[1], progress=False)) as (loading, _):
            loading.join(A_MOMENT)
            assert loading.is_alive()
            assert torch.equal(head, before)
            # It has its turn before those that come now, so that steady work can't keep it off.
            with started(lambda: text(llm)) as (_, later):
                paused.go.set()
    handle.remove()
    assert written == [texts[0]]
    assert not torch.equal(head, before)
    assert later == [text(llm)] != [texts[0]]
    assert load_status(llm.model) == "loaded"


def test_text_that_is_asked_for_during_a_load_is_written_with_the_new_weights(
    folders: tuple[Path, Path], texts: tuple[list[int], list[int]]
) -> None:
    llm, paused = LLM(folders[0], progress=False), Paused()
    with started(lambda: llm.reload_weights(folders[1], progress=paused)):
        assert paused.reached.wait(PATIENCE)
        with started(lambda: text(llm)) as (writing, written):
            writing.join(A_MOMENT)
            assert writing.is_alive()
            paused.go.set()
    assert written == [texts[1]]


def test_a_model_is_saved_with_the_weights_from_before_or_after_a_load(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    llm, paused = LLM(folders[0], progress=False), Paused()
    with started(lambda: llm.reload_weights(folders[1], progress=paused)):
        assert paused.reached.wait(PATIENCE)
        with started(lambda: save_weights(llm.model, tmp_path / "saved.safetensors")) as (saving, _):
            saving.join(A_MOMENT)
            assert saving.is_alive()
            paused.go.set()
    saved, expected = load_file(tmp_path / "saved.safetensors"), load_file(folders[1] / "model.safetensors")
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in expected)


def test_while_an_atomic_load_reads_text_is_written_with_the_old_weights(
    folders: tuple[Path, Path], texts: tuple[list[int], list[int]]
) -> None:
    llm, paused = LLM(folders[0], progress=False), Paused()
    with started(lambda: llm.reload_weights(folders[1], progress=paused, atomic=True)):
        assert paused.reached.wait(PATIENCE)
        assert text(llm) == texts[0]
        paused.go.set()
    assert text(llm) == texts[1]


def test_many_threads_write_text_at_once(folders: tuple[Path, Path]) -> None:
    llm, together = LLM(folders[0], progress=False), threading.Barrier(3, timeout=PATIENCE)
    # Each passes only when the others write, too.
    handle = llm.model.register_forward_hook(lambda *_: (together.wait(), None)[1])
    with started(lambda: text(llm)) as (_, a), started(lambda: text(llm)) as (_, b):
        c = text(llm)
    handle.remove()
    assert a == b == [c]


def test_what_would_wait_for_itself_is_refused(
    folders: tuple[Path, Path], texts: tuple[list[int], list[int]], tmp_path: Path
) -> None:
    llm = LLM(folders[0], progress=False)
    refused: list[str] = []

    def attempt(what: Callable[[], object]) -> None:
        with pytest.raises(ModelError) as error:
            what()
        refused.append(error.value.message)

    handle = llm.model.register_forward_hook(lambda *_: attempt(lambda: llm.reload_weights(folders[1])))
    assert text(llm) == texts[0]
    handle.remove()
    assert set(refused) == {"weights are loaded from within what uses the model, which would go on with others"}
    refused.clear()

    def progress(_: Any) -> None:
        attempt(lambda: text(llm))
        attempt(lambda: save_weights(llm.model, tmp_path / "saved"))

    llm.reload_weights(folders[1], progress=progress, transfer={"threads": 1})
    assert set(refused) == {"this model is used from within a load into it: some of its weights are old and some new"}
    assert text(llm) == texts[1]
    # Text within text is as good as any.
    inner: list[list[int]] = []

    def write_once(*_: Any) -> None:
        handle.remove()
        inner.append(text(llm))

    handle = llm.model.register_forward_hook(write_once)
    assert [text(llm)] == inner == [texts[1]]


def test_ctrl_c_while_a_load_waits_leaves_nothing_behind(
    folders: tuple[Path, Path], texts: tuple[list[int], list[int]]
) -> None:
    llm, paused = LLM(folders[0], progress=False), Paused()
    handle = llm.model.register_forward_hook(paused)
    with started(lambda: text(llm)) as (_, written):
        assert paused.reached.wait(PATIENCE)
        timer = threading.Timer(A_MOMENT, _thread.interrupt_main)
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            llm.reload_weights(folders[1])
        timer.join()
        paused.go.set()
    handle.remove()
    assert written == [texts[0]] == [text(llm)]
    llm.reload_weights(folders[1])
    assert text(llm) == texts[1]


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_a_forked_child_does_not_wait_for_threads_that_it_has_not(folders: tuple[Path, Path]) -> None:
    model = torch.nn.Linear(2, 2)
    paused = Paused()
    weights = {"weight": torch.ones(2, 2), "bias": torch.ones(2)}
    with started(lambda: load_into(model, weights, progress=paused)):
        assert paused.reached.wait(PATIENCE)
        child = os.fork()
        if child == 0:
            try:
                # What the other thread would have gone on with is half of it.
                if load_status(model) == "failed":
                    load_into(model, weights, progress=False)
                    os._exit(0)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        paused.go.set()
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="there are no signals of one's own")
def test_a_signals_handler_that_saves_is_refused_while_its_thread_waits_to_load(
    folders: tuple[Path, Path], texts: tuple[list[int], list[int]], tmp_path: Path
) -> None:
    """As what saves a model that is about to be preempted."""
    llm, paused = LLM(folders[0], progress=False), Paused()
    handle = llm.model.register_forward_hook(paused)
    refused: list[ModelError] = []

    def save(*_: Any) -> None:
        try:
            save_weights(llm.model, tmp_path / "saved.safetensors")
        except ModelError as error:
            refused.append(error)
        paused.go.set()

    before = signal.signal(signal.SIGUSR1, save)
    try:
        with started(lambda: text(llm)) as (_, written):
            assert paused.reached.wait(PATIENCE)
            timer = threading.Timer(A_MOMENT, signal.raise_signal, [signal.SIGUSR1])
            timer.start()
            llm.reload_weights(folders[1], progress=False)
            timer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    handle.remove()
    assert written == [texts[0]]
    assert len(refused) == 1
    assert text(llm) == texts[1]


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="there are no timers of the process")
def test_a_signals_handler_may_save_at_any_moment(tmp_path: Path) -> None:
    """Also at one in which its own thread is taking a turn."""
    model, calls = torch.nn.Linear(2, 2), 0

    def save(*_: Any) -> None:
        nonlocal calls
        calls += 1
        with contextlib.suppress(WeightLoadersError):
            save_weights(model, tmp_path / "by_handler.safetensors")
        # Once more, but not within itself.
        signal.setitimer(signal.ITIMER_REAL, 0.0005)

    before = signal.signal(signal.SIGALRM, save)
    signal.setitimer(signal.ITIMER_REAL, 0.0005)
    try:
        with started(lambda: [load_into(model, model.state_dict(), progress=False) for _ in range(50)]):
            for _ in range(2000):
                with turns.using(model):
                    pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert calls
    assert not turns._using
    assert not turns._writing


def test_a_module_that_has_parameters_of_the_model_waits_as_well() -> None:
    model, sibling = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    sibling.weight = model.weight
    paused = Paused()
    weights = {"weight": torch.ones(2, 2), "bias": torch.ones(2)}
    with started(lambda: load_into(model, weights, progress=paused)):
        assert paused.reached.wait(PATIENCE)
        with started(lambda: sibling_in_use(sibling)) as (using, _):
            using.join(A_MOMENT)
            assert using.is_alive()
            paused.go.set()


def sibling_in_use(sibling: torch.nn.Module) -> None:
    with turns.using(sibling):
        pass


class Saving:
    """A plugin that keeps a copy of a model before each load and after it."""

    def __init__(self, model: torch.nn.Module, folder: Path) -> None:
        self.model, self.folder, self.saved = model, folder, []

    @hookimpl
    def before_load(self, plan: Any) -> None:
        self.saved.append(save_weights(self.model, self.folder / f"{len(self.saved)}.safetensors")[0])

    @hookimpl
    def after_load(self, report: Any) -> None:
        self.saved.append(save_weights(self.model, self.folder / f"{len(self.saved)}.safetensors")[0])


class Own(BaseWeightLoader):
    """Calls the default way from within its own, so that hooks are told of a load within a load."""

    def get_weights(self, model_name_or_path: str) -> Any:
        return {"weight": torch.ones(2, 2), "bias": torch.ones(2)}

    def load_weights(self, model: torch.nn.Module, weights: Any) -> Any:
        return super().load_weights(model, weights)


@pytest.mark.parametrize("inner", [False, True])
def test_hooks_before_and_after_a_load_may_save_the_model(tmp_path: Path, inner: bool) -> None:
    model = torch.nn.Linear(2, 2)
    old = model.weight.detach().clone()
    source: Any = tmp_path if inner else {"weight": torch.ones(2, 2), "bias": torch.ones(2)}
    with hooks.isolated():
        hooks.load_plugins()
        plugin = Saving(model, tmp_path)
        hooks._state.manager.register(plugin, "saving")
        load_into(model, source, loader=Own if inner else "auto", progress=False)
    weights = [load_file(path)["weight"] for path in plugin.saved]
    assert all(torch.equal(weight, old) for weight in weights[:-1])
    assert bool((weights[-1] == 1).all())


_INTERRUPTED = """
import os, random, signal, torch
from weightloaders import load_into
from weightloaders.errors import LoadError
model, weights = torch.nn.Linear(2, 2), {"weight": torch.ones(2, 2), "bias": torch.ones(2)}
signal.signal(signal.SIGALRM, signal.default_int_handler)
random.seed(0)
for _ in range(3000):
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, 1e-5 + random.random() * 0.0012)
            load_into(model, weights, progress=False)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        pass
load_into(model, weights, progress=False)
print("done", flush=True)
os._exit(0)
"""


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="there are no timers of the process")
def test_ctrl_c_at_any_step_of_a_load_does_not_keep_the_next_one_off() -> None:
    done = subprocess.run([sys.executable, "-c", _INTERRUPTED], capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout == "done\n", done.stderr[-2000:]
