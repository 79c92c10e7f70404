"""Values: every type of blocks as the gguf package decodes it, whole and in pieces; and what every loader must do."""

import math
import threading

import gguf
import gguf_models
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from weightloaders_gguf import GgufLoader
from weightloaders_gguf.ggml_types import HALVES_IN_BLOCK, TYPES, WITHOUT_DECODER

import weightloaders as wl
from weightloaders.errors import LoadError, SourceReadError, UnsupportedDtypeError
from weightloaders.testing import LoaderConformance

PLAIN = {
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64
}  # fmt: skip
CODED = sorted(kind.name for kind in TYPES.values() if not kind.torch_name and kind.name not in WITHOUT_DECODER)


class TestGguf(LoaderConformance):
    """The suite that every loader passes."""

    loader = GgufLoader
    dtypes = PLAIN
    max_dims = 4
    holds_empty = True

    def write_checkpoint(self, folder, tensors):
        return gguf_models.write(folder / "model.gguf", tensors)


def stored_as(tmp_path, kind, shape=(24, 512), *, big_endian=False, name="w"):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    codes = gguf_models.coded(values, kind)
    path = gguf_models.write(tmp_path / "a.gguf", {name: values}, kinds=lambda *_: kind)
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(gguf.quants.dequantize(codes, gguf.GGMLQuantizationType[kind]))
    return path, expected


@pytest.mark.parametrize("kind", CODED)
def test_every_type_is_decoded_as_the_gguf_package_decodes_it(tmp_path, kind):
    path, expected = stored_as(tmp_path, kind)
    assert expected.shape == (24, 512)
    with wl.open_weights(path) as weights:
        assert weights.info("w").dtype is torch.float32
        assert torch.equal(weights["w"].view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("kind", CODED)
def test_a_part_of_a_tensor_is_the_same_part(tmp_path, kind):
    path, expected = stored_as(tmp_path, kind)
    with wl.open_weights(path) as weights:
        (extent,) = weights.info("w").extents
        flat = expected.reshape(-1).view(torch.int32)
        for start, end in (
            (0, 1),
            (5, 6),
            (255, 257),
            (1000, 3333),
            (0, flat.numel()),
            (flat.numel() - 1, flat.numel()),
        ):
            raw = extent.source.read(extent.offset + 4 * start, 4 * (end - start))
            assert np.array_equal(np.frombuffer(raw, dtype=np.int32), flat[start:end].numpy())
        # In the middle of a number, too: a reader may want any bytes.
        whole = expected.numpy().tobytes()
        assert extent.source.read(extent.offset + 13, 1001) == whole[13 : 13 + 1001]


@pytest.mark.parametrize("kind", sorted(HALVES_IN_BLOCK))
def test_big_endian_blocks_are_decoded(tmp_path, kind):
    values = torch.randn((4, 512), generator=torch.Generator().manual_seed(3))
    codes = gguf_models.coded(values, kind)
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(gguf.quants.dequantize(codes, gguf.GGMLQuantizationType[kind]))
    _, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = codes.reshape(-1, nbytes).copy()
    for at in HALVES_IN_BLOCK[kind]:
        blocks[:, at : at + 2] = blocks[:, at : at + 2][:, ::-1]
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "nothing", endianess=gguf.GGUFEndian.BIG)
    number = gguf.GGMLQuantizationType[kind]
    writer.add_tensor("w", blocks.reshape(codes.shape), raw_dtype=number)
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()
    with wl.open_weights(tmp_path / "a.gguf") as weights:
        assert torch.equal(weights["w"].view(torch.int32), expected.view(torch.int32))


def test_big_endian_blocks_that_nobody_has_described_are_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "nothing", endianess=gguf.GGUFEndian.BIG)
    codes = gguf_models.coded(torch.randn(2, 256), "IQ2_XS")
    writer.add_tensor("w", codes, raw_dtype=gguf.GGMLQuantizationType.IQ2_XS)
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()
    with pytest.raises(UnsupportedDtypeError, match="IQ2_XS, big-endian") as raised:
        wl.open_weights(tmp_path / "a.gguf")
    assert raised.value.tensor == "w"


@pytest.mark.parametrize("dtype", sorted(PLAIN, key=str))
def test_big_endian_numbers_are_read(tmp_path, dtype):
    values = (torch.arange(12).reshape(3, 4) - 5).to(dtype)
    path = gguf_models.write(tmp_path / "a.gguf", {"w": values}, big_endian=True)
    with wl.open_weights(path) as weights:
        assert torch.equal(weights["w"], values)


# ------------------------------------------------------------------ loading


class Holder(torch.nn.Module):
    def __init__(self, dtype=torch.float32, shape=(24, 512)):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))


@pytest.mark.parametrize("mode", ["direct", "mmap", "o_direct", "stream"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_mode_of_transfer_decodes(tmp_path, mode, dtype):
    path, expected = stored_as(tmp_path, "Q4_K")
    model = Holder(dtype)
    wl.load_into(model, path, transfer=mode, progress=False)
    assert torch.equal(model.w, expected.to(dtype))


def test_parts_of_a_tensor_by_rules(tmp_path):
    path, expected = stored_as(tmp_path, "Q6_K")

    class Halves(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (torch.nn.Parameter(torch.zeros(512, 12)) for _ in "ab")

    model = Halves()
    rule = wl.Convert("w", ["a", "b"], lambda w: (w[:12].T, w[12:].T))
    wl.load_into(model, path, rules=[rule], progress=False)
    assert torch.equal(model.a, expected[:12].T)
    assert torch.equal(model.b, expected[12:].T)


def test_memory_is_bounded_and_so_is_the_number_of_threads(tmp_path):
    path, expected = stored_as(tmp_path, "Q8_0", (2048, 4096))
    model = Holder(torch.bfloat16, (2048, 4096))
    seen = set()
    report = wl.load_into(
        model, path, progress=lambda _: seen.add(threading.get_ident()), transfer=wl.TransferOptions(extra_memory="8MB")
    )
    assert torch.equal(model.w, expected.bfloat16())
    assert 0 < report.extra_memory <= 8 << 20
    # A file on a disk is read by as many threads as files are, not by as many as a network's.
    assert len(seen) <= 5


def test_a_file_that_changes_meanwhile_is_noticed(tmp_path):
    path, _ = stored_as(tmp_path, "Q8_0")
    weights = wl.open_weights(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises((LoadError, SourceReadError), match="changed") as raised:
        wl.load_into(Holder(), weights, progress=False)
    assert raised.value.file == str(path)


def test_checksums_are_those_of_the_file(tmp_path):
    import hashlib

    path, _ = stored_as(tmp_path, "Q8_0")
    (tmp_path / "a.gguf.sha256").write_text(hashlib.sha256(path.read_bytes()).hexdigest())
    wl.load_into(Holder(), path, verify="sha256", progress=False)
    (tmp_path / "a.gguf.sha256").write_text("0" * 64)
    with pytest.raises(wl.errors.WeightLoadersError, match="checksum"):
        wl.load_into(Holder(), path, verify="sha256", progress=False)


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    kinds = ["Q4_1", "Q5_0", "IQ4_XS"]
    tensors = {kind: torch.randn(3, 256) for kind in kinds}
    path = gguf_models.write(tmp_path_factory.mktemp("made") / "a.gguf", tensors, kinds=lambda name, _: name)
    with wl.open_weights(path) as weights:
        whole = b"".join(weights[kind].numpy().tobytes() for kind in kinds)
        yield weights.info("Q4_1").extents[0].source, whole


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_bytes_that_were_made_can_be_asked_for(several, data):
    source, whole = several
    assert source.size == len(whole) == math.prod((3, 3, 256, 4))
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, len(whole)))
    assert source.read(start, end - start) == whole[start:end]
    with pytest.raises(SourceReadError):
        source.read(start, len(whole) + 1)
