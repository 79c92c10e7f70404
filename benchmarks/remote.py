"""Checkpoints far away, ours beside a download by boto3: time to fill a model from a server on this machine.

See README.md for the method.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

LAYERS, ROWS, COLUMNS = 24, 2048, 2048
FILE = "model.safetensors"


def weights() -> dict[str, torch.Tensor]:
    """A few large tensors and many small ones, in bfloat16: 208 MB."""
    import torch

    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(LAYERS):
        tensors[f"layers.{layer}.weight"] = torch.randn(ROWS, COLUMNS, generator=generator).to(torch.bfloat16)
        for name in ("bias", "norm", "scale"):
            tensors[f"layers.{layer}.{name}"] = torch.randn(ROWS, generator=generator).to(torch.bfloat16)
    return tensors


# ------------------------------------------------------------------ the server, in a process of its own


class Handler(BaseHTTPRequestHandler):
    """One file, at any path that ends in its name, by the kernel's own copying; whatever is sent after a delay."""

    protocol_version = "HTTP/1.1"
    file: Path
    delay: float

    def do_GET(self) -> None:
        """Send a range, or what is known of the file."""
        time.sleep(self.delay)
        size = self.file.stat().st_size
        if not self.path.endswith(FILE):
            self.send_response(403)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first, last = (int(wanted[1]), min(int(wanted[2] or size), size - 1)) if wanted else (0, size - 1)
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(last - first + 1))
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Mon, 30 Nov 2026 02:00:00 GMT")
        if wanted:
            self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.flush()
        with self.file.open("rb") as file:
            while first <= last:
                first += os.sendfile(self.connection.fileno(), file.fileno(), first, last - first + 1)

    do_HEAD = do_GET  # noqa: N815 -- as the base class has it

    def log_message(self, *args: object) -> None:
        """Nothing is logged."""


def serve(file: Path, delay: float) -> None:
    """Serve a file, and print the port."""
    handler = type("Bound", (Handler,), {"file": file, "delay": delay})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.request_queue_size = socket.SOMAXCONN
    print(server.server_port, flush=True)
    server.serve_forever()


@contextmanager
def serving(file: Path, delay: float) -> Iterator[str]:
    """The address of a server of a file."""
    command = [sys.executable, "-m", "benchmarks.remote", "--serve", str(file), "--delay", str(delay)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield f"http://127.0.0.1:{int((process.stdout or sys.stdin).readline())}"
        finally:
            process.terminate()


# ------------------------------------------------------------------ the ways


def ways(url: str, model: torch.nn.Module, folder: Path) -> dict[str, Callable[[], object]]:
    """Name -> what fills the model."""
    import boto3
    from botocore import UNSIGNED
    from botocore.config import Config
    from safetensors.torch import load_file

    from weightloaders import load_into

    config: Any = Config(signature_version=UNSIGNED)
    client: Any = boto3.client("s3", endpoint_url=url, region_name="us-east-1", config=config)

    def download() -> None:
        client.download_file("bucket", FILE, str(folder / "copy"))
        model.load_state_dict(load_file(folder / "copy"))

    ours = {"loader": "weightloaders_remote:RemoteLoader", "progress": False}
    s3 = {"endpoint": url, "anonymous": True}
    return {
        "s3://, weightloaders-remote": lambda: load_into(model, f"s3://bucket/{FILE}", loader_kwargs=s3, **ours),
        "https, weightloaders-remote": lambda: load_into(model, f"{url}/{FILE}", **ours),
        "https, built-in": lambda: load_into(model, f"{url}/{FILE}", loader="http", progress=False),
        "s3://, boto3 download, then load": download,
    }


def compare(delay: float, rounds: int, folder: Path) -> bool:
    """Time all ways in turn, and print the medians; whether they gave the same values."""
    import torch

    from benchmarks.dcp import model_of

    tensors = weights()
    model = model_of({name: tuple(tensor.shape) for name, tensor in tensors.items()})  # type: ignore[misc]
    seconds: dict[str, list[float]] = {}
    busy: dict[str, list[float]] = {}
    right = True
    with serving(folder / FILE, delay) as url:
        for turn in range(rounds + 1):
            for way, fill in ways(url, model, folder).items():
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.zero_()
                before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
                fill()
                taken, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
                state = model.state_dict()
                right &= all(torch.equal(state[name], tensor) for name, tensor in tensors.items())
                # The first of each warms up what is imported and connected.
                if turn:
                    seconds.setdefault(way, []).append(taken)
                    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
                    busy.setdefault(way, []).append(spent)
    size = (folder / FILE).stat().st_size
    print(f"\n{size / 1e6:.0f} MB, each request answered after {delay * 1000:.0f} ms; medians of {rounds}")
    for way, times in seconds.items():
        middle = statistics.median(times)
        print(
            f"  {way:34} {middle:6.2f} s  {size / middle / 1e9:5.2f} GB/s  "
            f"{statistics.median(busy[way]):5.2f} s of processor time"
        )
    return right


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--delay", type=float, default=0.0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.delay)
    from safetensors.torch import save_file

    os.environ.pop("HF_HUB_OFFLINE", None)
    with tempfile.TemporaryDirectory() as folder:
        save_file(weights(), Path(folder) / FILE)
        right = compare(0.0, arguments.rounds, Path(folder))
        right &= compare(0.05, arguments.rounds, Path(folder))
    print("\nall values are equal" if right else "\nVALUES DIFFER")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
