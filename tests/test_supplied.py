"""Sources with a way of their own to read many tensors: `Weights.describe(..., stream=...)`."""

from __future__ import annotations

import pytest
import torch

from weightloaders import BaseWeightLoader, Convert, TensorInfo, Weights, load_into, plan_load
from weightloaders.errors import LoadError, PlanError, SourceClosedError


class Engine(BaseWeightLoader):
    """Hands all tensors out in one buffer, which it reuses, last name first."""

    def __init__(self, tensors, names=None, fails_after=None):
        self.tensors, self.names, self.fails_after = tensors, names, fails_after
        self.asked, self.closed, self.single = [], 0, 0

    def get_weights(self, model_name_or_path):
        infos = [TensorInfo(n, t.dtype, t.shape, read=lambda t=t: self._read(t)) for n, t in self.tensors.items()]
        return Weights.describe(infos, borrowed=True, stream=self._stream)

    def _read(self, tensor):
        self.single += 1
        return tensor

    def _stream(self, names):
        self.asked.append(sorted(names))
        buffer = torch.empty(max(t.nbytes for t in self.tensors.values()), dtype=torch.uint8)
        try:
            for at, name in enumerate(reversed(names) if self.names is None else self.names):
                if at == self.fails_after:
                    raise OSError("the wire broke")
                tensor = self.tensors[name]
                memory = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                memory.copy_(tensor)
                yield name, memory
            buffer.fill_(255)
        finally:
            self.closed += 1


class Fused(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(4, 12, bias=False)
        self.out = torch.nn.Linear(4, 4)


TENSORS = {
    **{name: torch.randn(4, 4) for name in ("q", "k", "v")},
    "out.weight": torch.randn(4, 4),
    "out.bias": torch.randn(4),
}
RULES = Convert(["q", "k", "v"], "qkv.weight", "fuse_qkv")


def load(engine, model=None, rules=RULES, **options):
    return load_into(Fused() if model is None else model, "x", loader=engine, rules=rules, progress=False, **options)


@pytest.mark.parametrize("mode", ["direct", "stream", "mmap"])
def test_a_sources_own_stream_is_asked_once_and_what_waits_for_others_outlives_its_buffer(mode):
    engine, model = Engine(TENSORS), Fused()
    report = load(engine, model, transfer=mode)
    assert (engine.asked, engine.closed, engine.single) == ([sorted(TENSORS)], 1, 0)
    assert torch.equal(model.qkv.weight, torch.cat([TENSORS[n] for n in "qkv"]))
    assert torch.equal(model.out.weight, TENSORS["out.weight"])
    assert torch.equal(model.out.bias, TENSORS["out.bias"])
    assert report.bytes_read == sum(t.nbytes for t in TENSORS.values())


def test_code_that_computes_gets_tensors_that_are_its_own():
    kept = []

    def doubled(weight):
        kept.append(weight)
        return weight * 2

    engine, model = Engine({"w": torch.ones(2, 2), "v": torch.full((2, 2), 7.0)}), torch.nn.Module()
    model.a, model.b = torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(2, 2))
    load(engine, model, rules=[Convert("w", "a", doubled), Convert("v", "b", doubled)])
    assert (model.a[0, 0].item(), model.b[0, 0].item()) == (2.0, 14.0)
    assert sorted(t[0, 0].item() for t in kept if type(t) is torch.Tensor and not t.is_meta) == [1.0, 7.0]


def test_only_what_the_plan_needs_is_asked_for():
    engine = Engine({**TENSORS, "more": torch.zeros(3)})
    load(engine, on_unexpected="ignore")
    assert engine.asked == [sorted(TENSORS)]


def test_nothing_is_asked_for_where_the_plan_has_errors():
    engine = Engine({name: tensor for name, tensor in TENSORS.items() if name != "out.bias"})
    with pytest.raises(PlanError, match=r"out\.bias"):
        load(engine)
    assert engine.asked == []


def test_a_stream_that_fails_says_how_far_it_came_and_is_closed():
    engine = Engine(TENSORS, ["out.bias", "out.weight", "q"], fails_after=2)
    with pytest.raises(LoadError, match=r"failed after tensor 'out\.weight': OSError: the wire") as caught:
        load(engine)
    assert caught.value.written == ("out.bias", "out.weight")
    assert engine.closed == 1


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["q", "k", "out.weight"], "ended without tensor 'out.bias' and 1 more"),
        (["q", "q"], "handed out tensor 'q' twice"),
        (["other"], "handed out tensor 'other' unasked"),
    ],
)
def test_a_stream_that_does_not_hand_out_what_it_was_asked_for_is_an_error(names, message):
    engine = Engine({**TENSORS, "other": torch.zeros(2)}, names)
    with pytest.raises(LoadError, match=message):
        load(engine, on_unexpected="ignore")
    assert engine.closed == 1


def test_a_tensor_of_another_shape_than_the_catalogues_is_refused():
    class Liar(Engine):
        def _stream(self, names):
            return iter([(name, self.tensors[name][:2]) for name in names])

    with pytest.raises(LoadError, match=r"\[2, 4\]|\[2\]"):
        load(Liar(TENSORS))


def test_a_model_that_loads_itself_is_handed_the_stream_and_may_keep_what_it_gets():
    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Parameter(torch.zeros(4, 4)), torch.nn.Parameter(torch.zeros(4, 4))

        def load_weights(self, weights):
            kept = dict(weights)
            with torch.no_grad():
                self.a.copy_(kept["q"])
                self.b.copy_(kept["k"])

    engine, model = Engine({name: TENSORS[name] for name in "qk"}), Own()
    load(engine, model, rules=None)
    assert torch.equal(model.a, TENSORS["q"])
    assert torch.equal(model.b, TENSORS["k"])
    assert (engine.asked, engine.closed) == ([["k", "q"]], 1)


def test_single_tensors_are_read_by_themselves():
    engine = Engine(TENSORS)
    with engine.get_weights("x") as weights:
        assert torch.equal(weights["q"], TENSORS["q"])
        assert weights["q"].data_ptr() != TENSORS["q"].data_ptr()
    assert (engine.single, engine.asked) == (2, [])


def test_all_tensors_come_by_the_stream_and_belong_to_whoever_gets_them():
    engine = Engine(TENSORS)
    with engine.get_weights("x") as weights:
        for got in (dict(weights.items()), dict(zip(reversed(list(weights)), weights.values(), strict=True))):
            assert all(torch.equal(got[name], tensor) for name, tensor in TENSORS.items())
    assert (engine.single, len(engine.asked), engine.closed) == (0, 2, 2)
    with pytest.raises(SourceClosedError):
        list(weights.items())


def test_a_plan_says_which_tensors_it_reads():
    engine, model = Engine({**TENSORS, "more": torch.zeros(3)}), Fused()
    with engine.get_weights("x") as weights:
        plan = plan_load(model, weights, rules=RULES, on_unexpected="ignore")
        assert sorted(info.name for info in plan.tensors_read) == sorted(TENSORS)
