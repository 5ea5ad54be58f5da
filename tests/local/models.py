"""Folders of models, as small as they can be: what an engine would load, and what it could not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 8192}


def model_folder(folder: Path, **config: Any) -> Path:
    """A folder that is made, with one file of weights; `config` is laid over CONFIG."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(safetensors())
    return folder


def safetensors(count: int = 8, kind: str = "BF16", width: int = 2) -> bytes:
    """A file with one tensor of `count` numbers."""
    size = count * width
    tensor = {"dtype": kind, "shape": [count], "data_offsets": [0, size]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "weight": tensor}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(size)


def sharded(folder: Path, count: int) -> list[Path]:
    """Spread the weights of a folder over files that an index names; returns those."""
    (folder / "model.safetensors").unlink()
    files = [folder / f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    for file in files:
        file.write_bytes(safetensors())
    names = {f"layer.{i}": file.name for i, file in enumerate(files)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return files
