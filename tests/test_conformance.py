"""The suite for loaders, of the built-in ones; each format is written by the library that it belongs to."""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

import pytest
import torch
from safetensors.torch import save_file

from weightloaders.loaders.binary import BinaryLoader
from weightloaders.loaders.dummy import DummyLoader
from weightloaders.loaders.hf import HuggingFaceLoader
from weightloaders.loaders.http import HttpLoader
from weightloaders.loaders.local import LocalLoader
from weightloaders.loaders.torch import TorchLoader
from weightloaders.testing import LoaderConformance, tiny_checkpoint
from weightloaders.testing.conformance.options import Options
from weightloaders.testing.conformance.package import Package
from weightloaders.testing.tiny import DTYPES


def dense(tensors):
    """Each in memory of its own, which safetensors wants."""
    return {name: tensor.clone().contiguous() for name, tensor in tensors.items()}


class InThisProcess(LoaderConformance):
    """For those after the first few: starting processes takes long."""

    @pytest.mark.slow
    def test_a_spawned_process_reads_the_same_values(self, tmp_path):
        super().test_a_spawned_process_reads_the_same_values(tmp_path)


class TestLocal(LoaderConformance):
    loader = LocalLoader
    name = "local"
    dtypes = frozenset(DTYPES) - {torch.complex128}

    def write_checkpoint(self, folder, tensors):
        save_file(dense(tensors), folder / "model.safetensors")
        return folder / "model.safetensors"


class TestHuggingFace(InThisProcess, TestLocal):
    loader = HuggingFaceLoader
    name = "hf"

    def write_checkpoint(self, folder, tensors):
        """Two shards with an index, as transformers writes."""
        names = list(tensors)
        weight_map = {}
        for i, part in enumerate((names[::2], names[1::2]), 1):
            file = f"model-{i:05}-of-00002.safetensors"
            save_file(dense({name: tensors[name] for name in part}), folder / file, {"format": "pt"})
            weight_map |= dict.fromkeys(part, file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return folder


class TestTorch(LoaderConformance):
    loader = TorchLoader
    name = "torch"

    def write_checkpoint(self, folder, tensors):
        torch.save(dict(tensors), folder / "pytorch_model.bin")
        return folder


class TestBinary(InThisProcess):
    loader = BinaryLoader
    name = "binary"

    def may_go_unnoticed(self, damage, file):
        """Values are told from nothing; and the last line of a list may be shorter and mean as many bytes."""
        return (damage, file.name) in {("garbage", "model.bin"), ("truncated", "meta.txt")}

    def write_checkpoint(self, folder, tensors):
        lines = []
        with (folder / "model.bin").open("wb") as file:
            for name, tensor in tensors.items():
                file.write(bytes(tensor.clone().contiguous().flatten().view(torch.uint8).tolist()))
                dtype = str(tensor.dtype).removeprefix("torch.")
                lines.append(f"{name}:{','.join(map(str, tensor.shape))}:{dtype}")
        (folder / "meta.txt").write_text("\n".join(lines), encoding="utf-8")
        return folder


class TestAuto(InThisProcess, TestLocal):
    """What it chooses reads as well through it."""

    loader = "auto"
    name = "auto"


class FolderHandler(BaseHTTPRequestHandler):
    """Serves files by their paths, and ranges of them."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        path = Path(unquote(urlsplit(self.path).path))
        if not path.is_file():
            self.answer(404, b"not here")
            return
        size = path.stat().st_size
        headers = {"ETag": f'"{path.stat().st_mtime_ns:x}"'}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        first, last = map(int, wanted.groups()) if wanted else (0, size - 1)
        if wanted and first >= size:
            self.answer(416, b"", {"Content-Range": f"bytes */{size}"})
            return
        with path.open("rb") as file:
            file.seek(first)
            part = file.read(last - first + 1)
        if wanted:
            headers["Content-Range"] = f"bytes {first}-{first + len(part) - 1}/{size}"
        self.answer(206 if wanted else 200, part, headers)

    def answer(self, status, body, headers=()):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **dict(headers)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *args):
        pass


class TestHttp(InThisProcess, TestLocal):
    loader = HttpLoader
    name = "http"

    @pytest.fixture(autouse=True)
    def server(self, monkeypatch):
        """The tests are offline; these may use the network of this machine."""
        import huggingface_hub.constants

        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        with ThreadingHTTPServer(("127.0.0.1", 0), FolderHandler) as server:
            self.url = f"http://127.0.0.1:{server.server_address[1]}"
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
            yield
            server.shutdown()

    def write_checkpoint(self, folder, tensors):
        return self.url + quote(str(super().write_checkpoint(folder, tensors)))

    @pytest.mark.slow
    def test_changed_bytes_never_end_in_a_foreign_exception(self, tmp_path):
        super().test_changed_bytes_never_end_in_a_foreign_exception(tmp_path)


class TestDummy(Options, Package):
    """It reads no values, so that only the rest can be asked of it."""

    loader = DummyLoader
    name = "dummy"

    def write_checkpoint(self, folder, tensors):
        return tiny_checkpoint(folder)
