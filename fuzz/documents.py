"""What is said about weights in texts: indexes, plans, configs, rules; and folders of several parts."""

from __future__ import annotations

import functools
import importlib
import json
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from weightloaders_dcp import DcpLoader
from weightloaders_meta import MetaLoader

from fuzz.mutate import Mutator, dumped
from fuzz.target import Files, Model, Target, bytes_of, sound_tensors
from fuzz.torch_files import changed_pickle
from weightloaders import LoadPlan, plan_load
from weightloaders.config import LLMConfig
from weightloaders.loaders.local import LocalLoader
from weightloaders.mapping.parsing import parse_rules
from weightloaders.plan.document import PlanData, fingerprint

if TYPE_CHECKING:
    from collections.abc import Sequence


class Dcp(Target):
    """Folders of `torch.distributed.checkpoint`."""

    name = "dcp"

    @functools.cache  # noqa: B019 -- a target lives as long as its process
    def seeds(self) -> list[Files]:
        """Sound folders of one rank."""
        return [
            _dcp({"model": {"a": torch.zeros(2, 3)}, "n": 3}),
            _dcp({"b": torch.ones(3, dtype=torch.int8)}),
            _dcp(sound_tensors()),
        ]

    def mutated(self, files: Files, mutator: Mutator, others: Sequence[Files]) -> Files:
        """The metadata above all."""
        name = ".metadata" if mutator.rng.random() < 0.85 else "__0_0.distcp"
        others = [o[name] for o in others[:20] if name in o]  # type: ignore[misc]
        return files | {name: changed_pickle(files[name], mutator, others)}  # type: ignore[arg-type]

    def read(self, folder: Path, files: Files) -> None:
        """By the loader."""
        self.take(DcpLoader().get_weights(str(folder)), folder, files)


def _dcp(state: dict[str, Any]) -> Files:
    place = Path(tempfile.mkdtemp())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            save(state, storage_writer=FileSystemWriter(place), no_dist=True)
        return {file.name: file.read_bytes() for file in place.iterdir()}
    finally:
        shutil.rmtree(place)


class Index(Target):
    """Indexes of sharded checkpoints."""

    name = "index"

    _FILE = "model.safetensors.index.json"
    _WORDS = (
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "../model.safetensors",
        "/etc/passwd", "C:\\x.safetensors",
        "./model-00001-of-00002.safetensors", "x/../model-00001-of-00002.safetensors",
        "model.safetensors.index.json", "a\\..\\..\\b", "c", "b",
        "a.weight", "weight_map", "metadata", "total_size", {"total_size": 31},
        "model-00001-of-00002.SAFETENSORS", ".", "model.bin", "//h/s",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        first = sound_tensors()
        second = {"c": first.pop("c")}
        self.fixed = {
            "model-00001-of-00002.safetensors": safetensors.torch.save(first),
            "model-00002-of-00002.safetensors": safetensors.torch.save(second),
        }

    def seeds(self) -> list[Files]:
        """A sound index, and two with more in them."""
        one, two = self.fixed
        weight_map = {"a.weight": one, "b": one, "c": two}
        made: list[Any] = [
            {"metadata": {"total_size": 31}, "weight_map": weight_map},
            {"weight_map": weight_map | {"__metadata__": one}},
            {"weight_map": {"b": one}},
        ]
        return [{self._FILE: dumped(value)} for value in made]

    def mutated(self, files: Files, mutator: Mutator, others: Sequence[Files]) -> Files:
        """As JSON, or as a text."""
        return {self._FILE: mutator.json(files[self._FILE], self._WORDS)}

    def read(self, folder: Path, files: Files) -> None:
        """By the loader."""
        self.take(LocalLoader().get_weights(str(folder)), folder, files)


class Plan(Target):
    """Plans as documents, held against a model and a source, and run."""

    name = "plan"

    def __init__(self) -> None:
        super().__init__()
        tensors = {
            "t": torch.ones(3, 2),
            "x.a.weight": torch.full((2, 3), 2.0),
            "d": torch.zeros(3, dtype=torch.float16),
        }
        self.fixed = {"model.safetensors": safetensors.torch.save(tensors | sound_tensors())}

    @functools.cache  # noqa: B019 -- a target lives as long as its process
    def seeds(self) -> list[Files]:
        """Plans for the model: plain, with names changed, and with a layout that is."""
        transpose = {"sources": ["t"], "targets": "a.weight", "function": "transpose"}
        made = []
        with tempfile.TemporaryDirectory() as name:
            place = Path(name) / "model.safetensors"
            place.write_bytes(self.fixed["model.safetensors"])
            for rules in (
                None,
                [{"drop": "a.weight"}, {"rename": {"x": ""}}],
                [{"drop": "a.weight"}, {"convert": transpose}],
            ):
                with LocalLoader().get_weights(str(place)) as weights:
                    made.append({"plan.json": plan_load(Model(), weights, rules=rules).to_json().encode()})
        return made

    def mutated(self, files: Files, mutator: Mutator, others: Sequence[Files]) -> Files:
        """As JSON, mostly with the checksums of what it then says."""
        raw = mutator.json(
            files["plan.json"], ("copy", "compute", "call", "a.weight", "b", "c", "t", "float32", "int8", 0, 1, [0, 0])
        )
        if mutator.rng.random() < 0.7:
            raw = _with_fingerprint(raw)
        return {"plan.json": raw}

    def read(self, folder: Path, files: Files) -> None:
        """Read it, prove it, run it."""
        plan = LoadPlan.from_json(files["plan.json"])
        str(plan)
        for name in list(plan.targets)[:3]:
            plan.explain(name)
        model = Model()
        with LocalLoader().get_weights(str(folder / "model.safetensors")) as weights:
            proved = plan_load(model, weights, plan=plan)
            if proved.ok:
                proved.run(model)
                if all(
                    name in weights and bytes_of(p) == bytes_of(weights[name]) for name, p in model.state_dict().items()
                ):
                    self.remarks["proved and run, to the source's values"] += 1
                else:
                    self.remarks["proved and run, to other values"] += 1


def _with_fingerprint(raw: bytes) -> bytes:
    try:
        tree = json.loads(raw)
        data = PlanData.model_validate(tree)
        tree["fingerprint"] = fingerprint(data.model, data.source).model_dump(mode="json")
        return dumped(tree)
    except (ValueError, TypeError, RecursionError):
        return raw


class Config(Target):
    """Config files of `LLM`, as JSON, YAML and TOML."""

    name = "config"

    _YAML = (
        'model: ./smollm2\nweight_loader_kwargs: {dtype: bfloat16, file_pattern: "*.bin"}\nmax_num_seqs: 4\n',
        "model: x\nrules:\n- rename: {a: b}\non_missing: {'a.*': warn}\n",
    )
    _TOML = ('model = "x"\ndtype = "float16"\n[sampling_params]\ntemperature = 0.5\n',)
    _JSON: tuple[Any, ...] = (
        {"model": "./x", "weights": "../y", "weight_loader": "local", "verify": "finite", "transfer": "direct",
         "progress": False},
        {"model": "x", "on_missing": {"a.*": "warn"}, "device_map": {"": 0}, "max_model_len": 8, "rules": "r.yaml",
         "model_kwargs": {"a": 1}},
    )  # fmt: skip
    _WORDS = (
        *LLMConfig.model_fields,
        "error",
        "warn",
        "ignore",
        "direct",
        "auto",
        1,
        0,
        -1,
        "~",
        "~root/x",
        "./a",
        {"mode": "mapped"},
        {"threads": 0},
    )

    def seeds(self) -> list[Files]:
        """Sound configs."""
        # JSON thrice: it is read a hundred times as fast, so more of it is.
        made = [{"config.json": dumped(value)} for value in self._JSON] * 6
        made += [{"config.yaml": text.encode()} for text in self._YAML]
        return made + [{"config.toml": text.encode()} for text in self._TOML * 2]

    def mutated(self, files: Files, mutator: Mutator, others: Sequence[Files]) -> Files:
        """As JSON where it is, else as a text."""
        ((name, raw),) = files.items()
        if name.endswith(".json"):
            return {name: mutator.json(raw, self._WORDS)}
        text = mutator.text(raw.decode("utf-8", "surrogateescape"), [str(word) for word in self._WORDS])
        return {name: text.encode("utf-8", "surrogatepass")}

    def read(self, folder: Path, files: Files) -> None:
        """As `LLM.from_config` reads it."""
        (name,) = files
        LLMConfig.from_file(folder / name).arguments()


class Rules(Target):
    """Rules from YAML, applied to a source."""

    name = "rules"

    _YAML = (
        "rename:\n  x.{i}: a\n", "drop: ['*.bias', b]\n", "rename: [[x, a], [b, d]]\n",
        "convert: [{sources: [q, k, v], targets: a.weight, function: fuse_qkv}]\n",
        "convert: [{sources: 'e.{i}', targets: a.weight, function: stack_experts}]\n",
        "convert: [{sources: t, targets: a.weight, function: transpose}]\n",
        "[{drop: c}, {rename: {'**.b': '**.c'}}]\n",
    )  # fmt: skip
    _WORDS = (
        "rename", "drop", "convert", "sources", "targets", "function", "fuse_qkv", "split_qkv", "stack_experts",
        "transpose", "reshape", "unstack_experts",
        "fuse_gate_up", "rotary_meta_to_hf", "pad_rows", "weight_norm", "{i}", "*", "**", "heads", "os.system",
        "a.weight", "{i}{j}", "**.**", "***",
        "b", "c", "q", "k", "v", "t", "x.0", "x.1", "e.0", "e.1", "\\", "(", "[", "+", "?", "$", "^", "|", "rows",
        "shape",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        # torch does so when sizes do not fit: it makes code of text then, and looks for a folder to keep things in.
        importlib.import_module("torch._dynamo")
        tensors = {f"{n}": torch.ones(2, 3) for n in ("q", "k", "v", "x.0", "x.1", "e.0", "e.1")}
        self.fixed = {"model.safetensors": safetensors.torch.save(tensors | {"t": torch.zeros(3, 2)} | sound_tensors())}

    def seeds(self) -> list[Files]:
        """Sound rules."""
        return [{"rules.yaml": text.encode()} for text in self._YAML]

    def mutated(self, files: Files, mutator: Mutator, others: Sequence[Files]) -> Files:
        """As a text."""
        text = mutator.text(files["rules.yaml"].decode("utf-8", "surrogateescape"), self._WORDS)
        return {"rules.yaml": text.encode("utf-8", "surrogatepass")}

    def read(self, folder: Path, files: Files) -> None:
        """Parse them, plan by them, and run what is whole."""
        rules = parse_rules(folder / "rules.yaml")
        model = Model()
        with LocalLoader().get_weights(str(folder / "model.safetensors")) as weights:
            plan = plan_load(model, weights, rules=rules)
            if plan.ok:
                plan.run(model)


class Params(Target):
    """Meta's ``params.json``, beside the parts of two ranks."""

    name = "params"

    def __init__(self) -> None:
        super().__init__()
        self.fixed = {"consolidated.safetensors": safetensors.torch.save(_llama())}

    _WORDS = (
        "dim",
        "n_heads",
        "n_layers",
        "n_kv_heads",
        "vocab_size",
        "multiple_of",
        "ffn_dim_multiplier",
        "norm_eps",
        "rope_theta",
        "hidden_dim",
        "moe",
        "head_dim",
        4,
        8,
    )

    def seeds(self) -> list[Files]:
        """That of a small Llama, old and new."""
        old = {"dim": 8, "n_heads": 2, "n_layers": 1, "norm_eps": 1e-5, "vocab_size": -1, "multiple_of": 4}
        new = old | {
            "n_kv_heads": 2,
            "vocab_size": 6,
            "rope_theta": 5e5,
            "use_scaled_rope": True,
            "ffn_dim_multiplier": 1.3,
        }
        return [{"params.json": dumped(value)} for value in (old, new)]

    def mutated(self, files: Files, mutator: Mutator, others: Sequence[Files]) -> Files:
        """As JSON, or as a text."""
        return {"params.json": mutator.json(files["params.json"], self._WORDS)}

    def read(self, folder: Path, files: Files) -> None:
        """By the loader, which makes a config of it."""
        from weightloaders_meta.model_files import _config, _read

        from weightloaders.weights.meta_llama import LlamaShapes
        from weightloaders.weights.source import FileSource

        shapes = LlamaShapes.read(files["params.json"])
        with MetaLoader().get_weights(str(folder)) as weights:
            if shapes is not None:
                infos = {info.name: info for info in weights.infos()}
                shapes = shapes.with_vocabulary_of(infos, 2)
                for info in weights.infos():
                    shapes.way_of(info, 2)
                shapes.parts_needed(weights.infos())
            source = FileSource(folder / "params.json")
            _config(_read(source), source.name, weights, None)


def _llama() -> dict[str, torch.Tensor]:
    shapes = {
        "tok_embeddings.weight": (6, 8), "output.weight": (6, 8), "norm.weight": (8,),
        "layers.0.attention.wq.weight": (8, 8),
        "layers.0.attention.wk.weight": (8, 8), "layers.0.attention.wv.weight": (8, 8),
        "layers.0.attention.wo.weight": (8, 8),
        "layers.0.feed_forward.w1.weight": (24, 8), "layers.0.feed_forward.w2.weight": (8, 24),
        "layers.0.feed_forward.w3.weight": (24, 8),
        "layers.0.attention_norm.weight": (8,), "layers.0.ffn_norm.weight": (8,),
    }  # fmt: skip
    return {name: torch.zeros(shape) for name, shape in shapes.items()}
