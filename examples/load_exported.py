"""Load what `spantrain export` wrote with the transformers library alone, and compare its output.

python examples/load_exported.py runs/hf
"""

import hashlib
import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

TOLERANCE = 1e-5


def main(folder: Path) -> int:
    """Return 0 if the loaded model gives what the exported one gave."""
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, name).from_pretrained(folder).eval()
    example = load_file(folder / "example.safetensors")
    wanted = example.pop("logits")
    with torch.no_grad():
        logits = model(**example).logits.float().contiguous()
    error = float((logits - wanted).abs().max())
    print(f"{name}: {sum(parameter.numel() for parameter in model.parameters())} parameters")
    print(f"logits {list(logits.shape)}, SHA-256 {hashlib.sha256(logits.numpy().tobytes()).hexdigest()}")
    print(f"largest difference from the exported model's: {error:.3g} (at most {TOLERANCE} is well)")
    return 0 if error <= TOLERANCE else 1


if __name__ == "__main__":
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "config.json").is_file():
        sys.exit("usage: python examples/load_exported.py DIR   (DIR as `spantrain export RUN --to DIR` wrote it)")
    sys.exit(main(Path(sys.argv[1])))
