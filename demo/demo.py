"""One real chat model, loaded through four loaders from three formats: the same values, the same words.

``make demo`` runs it. It ends with exit status 1 if the loaders disagree.
"""

from __future__ import annotations

import hashlib
import os
import sys
import textwrap
from typing import TYPE_CHECKING, Any

# Nothing here needs the network, and bars would fill a log file.
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1")

import torch
from rich.console import Console
from rich.padding import Padding

from demo.prepare import PREPARED, SMOLLM2, smollm2_gguf, write_once
from weightloaders import LLM, SamplingParams, open_weights
from weightloaders.report import bytes_text
from weightloaders.weights.raw import write_raw

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

BINARY = PREPARED / f"{SMOLLM2.name}-binary"
QUESTION = "What is gravity? Answer in two sentences."
# Loader name -> what `LLM` is given. A GGUF file has config and tokenizer in it, and says no dtype for its codes.
LOADS: dict[str, dict[str, Any]] = {
    "hf": {"model": str(SMOLLM2)},
    "local": {"model": str(SMOLLM2), "weight_loader_kwargs": {"file_pattern": "*.safetensors"}},
    "binary": {"model": str(SMOLLM2), "weights": str(BINARY)},
    "gguf": {"model": str(smollm2_gguf()), "dtype": "bfloat16"},
}


def fingerprint(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over the names, dtypes, shapes and bytes of tensors, whatever their order."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write_binary(folder: Path) -> None:
    """Write the shards' tensors in the custom binary format, one tensor in memory at a time."""
    with open_weights(str(SMOLLM2), loader="local") as weights:
        write_raw(folder, weights.infos(), weights.__getitem__)


def describe_folder(console: Console, folder: Path) -> None:
    """Print the files of a folder that hold weights, with their sizes."""
    prepared = folder.is_relative_to(PREPARED)
    console.print(f"{folder.relative_to(PREPARED.parent) if prepared else folder.name}/", style="bold")
    for file in sorted(folder.iterdir()):
        if file.suffix in {".safetensors", ".bin", ".txt", ".gguf"} or file.name.endswith(".index.json"):
            console.print(f"  {file.name:<36}{bytes_text(file.stat().st_size):>10}")


def main() -> int:
    """Run the demo.

    Returns:
        The exit status: 0 if all loaders gave the same tensors and the same text.
    """
    console = Console(highlight=False)
    console.rule("One model, three formats")
    write_once(BINARY, write_binary)
    for folder in (SMOLLM2, BINARY, smollm2_gguf().parent):
        describe_folder(console, folder)

    fingerprints: dict[str, str] = {}
    answers: dict[str, str] = {}
    for loader, arguments in LOADS.items():
        console.rule(f"weight_loader={loader!r}")
        llm = LLM(weight_loader=loader, **arguments)
        report = str(llm.load_report)
        fingerprints[loader] = fingerprint(llm.model.state_dict())
        [output] = llm.chat([{"role": "user", "content": QUESTION}], SamplingParams(temperature=0.0, max_tokens=96))
        answers[loader] = output.outputs[0].text.strip()
        # The labels of the report, and two more in its column.
        width = max(len(line.split("  ")[0]) for line in report.splitlines())
        answer = textwrap.shorten(answers[loader], 60, placeholder=" ...")
        own = {"fingerprint": f"{fingerprints[loader][:16]}...", "answer": answer}
        lines = [report, *(f"{label:<{width}}  {value}" for label, value in own.items())]
        console.print(Padding("\n".join(lines), (0, 2)), markup=False)

    console.rule("The same through every loader?")
    for loader, value in fingerprints.items():
        console.print(f"  {loader:<8}{value}")
    same = len(set(fingerprints.values())) == 1 and len(set(answers.values())) == 1 and all(answers.values())
    if not same:
        console.print("The loaders disagree.", style="bold red")
        return 1
    console.print("Four equal fingerprints, and the same words:", style="bold green")
    console.print(f"\n  Q: {QUESTION}\n  A: {answers['hf']}\n", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
