"""Checkpoints of ranks, and torch's files, from a bucket: of a real S3 server, by weightloaders-remote."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp

import weightloaders as wl

pytestmark = pytest.mark.filterwarnings("ignore:.*assuming the intent is to:UserWarning")
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_REGION": "us-east-1",
}


@pytest.fixture
def bucket(tmp_path, monkeypatch, registry):
    """Puts a folder into a bucket; returns its address there."""
    remote = pytest.importorskip("weightloaders_remote")
    boto3 = pytest.importorskip("boto3")
    pytest.importorskip("moto")
    registry.register("remote", remote.RemoteLoader, replace=True)
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as server:
        try:
            found = next(match for line in server.stderr if (match := re.search(r"http://127\.0\.0\.1:\d+", line)))
            for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": found[0]}.items():
                monkeypatch.setenv(name, value)
            client = boto3.client("s3")
            client.create_bucket(Bucket="bucket")

            def put(folder):
                for file in folder.rglob("*"):
                    if file.is_file():
                        client.upload_file(str(file), "bucket", file.relative_to(tmp_path).as_posix())
                return f"s3://bucket/{folder.relative_to(tmp_path).as_posix()}"

            yield put
        finally:
            server.terminate()


@pytest.mark.parametrize("kind", ["nested", "hf"])
def test_slices_of_ranks_are_read_from_a_bucket(two_ranks, tmp_path, bucket, kind):
    shutil.copytree(two_ranks / kind, tmp_path / kind)
    address = bucket(tmp_path / kind)
    shutil.rmtree(tmp_path / kind)
    whole = torch.load(two_ranks / "whole.pt")
    with wl.open_weights(address) as weights:
        assert len(weights.info("rows").extents) == 2
        assert all(torch.equal(tensor, whole[name]) for name, tensor in weights.items())


@pytest.mark.slow
def test_minilm_saved_by_torch_is_read_from_a_bucket(tmp_path, bucket, minilm):
    transformers = pytest.importorskip("transformers")
    state = transformers.AutoModel.from_pretrained(minilm).state_dict()
    dcp.save({"model": state}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for kind, zipped in (("zip", True), ("legacy", False)):
        (tmp_path / kind).mkdir()
        torch.save(state, tmp_path / kind / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    for kind in ("dcp", "zip", "legacy"):
        address = bucket(tmp_path / kind)
        shutil.rmtree(tmp_path / kind)
        with wl.open_weights(address) as weights:
            assert set(weights) == set(state)
            assert all(info.is_raw for info in weights.infos())
        config = transformers.AutoConfig.from_pretrained(minilm)
        model = transformers.AutoModel.from_config(config)
        report = wl.load_into(model, address, progress=False)
        assert not report.missing
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
