"""A fingerprint of weights, by which anyone can see that two runs agree bit for bit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import torch
from torch import Tensor


def weights_sha256(model_state: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of a state dict's tensors, sorted by name.

    Neither the device nor the memory format nor the order of the mapping plays a part. Bits count,
    not values: 0.0 and -0.0 differ.
    """
    digest = hashlib.sha256()
    for name in sorted(model_state):
        tensor = model_state[name].detach()
        # The header says how many bytes follow it, so that no two states run together the same way.
        header = [name, str(tensor.dtype), list(tensor.shape)]
        digest.update(json.dumps(header).encode() + b"\n")
        flat = tensor.cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()
