"""Converts a GGUF file to a Hugging Face folder in bfloat16: `python convert.py SOURCE.gguf FOLDER`.

Stands alone: it runs in the engine's interpreter, which has torch, transformers, gguf and accelerate
but perhaps not Tandem. Whoever starts it keeps its standard input open, and it ends as soon as that does:
however its starter ends.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path


def convert(source: Path, folder: Path) -> None:
    """Write config, weights (bfloat16) and tokenizer of a GGUF model into an existing folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    where, name = str(source.parent), source.name
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(
        where, gguf_file=name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.to(torch.bfloat16).save_pretrained(folder, safe_serialization=True)
    tokenizer.save_pretrained(folder)


def end_with_stdin() -> None:
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=end_with_stdin, daemon=True).start()
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
