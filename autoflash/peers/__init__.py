"""Peers: other implementations of attention that may stand beside autoflash; each is optional."""

import importlib.metadata

from autoflash.peers import backward, decode, prefill
from autoflash.peers.contender import Contender, Maker, Unavailable

__all__ = ["PACKAGES", "PEERS", "Contender", "Maker", "Unavailable", "peer_versions"]

# By op: each peer's name, and what makes a contender of it.
PEERS: dict[str, dict[str, Maker]] = {
    "prefill": prefill.PEERS,
    "decode": decode.PEERS,
    "backward": backward.PEERS,
}
# What the peers are installed from; the others come with torch.
PACKAGES = (
    *("flash-attn", "flash-attn-3", "flash-attn-4", "nvidia-cutlass-dsl"),
    *("flashinfer-python", "vllm", "xformers"),
)


def peer_versions() -> dict[str, str]:
    """Versions of what the peers come from, where they are installed."""
    import torch

    cudnn = torch.backends.cudnn.version()
    found = {"cudnn": str(cudnn)} if cudnn else {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
