"""Which peers take part in the decode benchmark."""

from autoflash.peers import Maker, decode

NAMES = ("cudnn", "flashinfer", "flash_attention_3", "flash_attention_4", "vllm_triton")
PEERS: dict[str, Maker] = {name: decode.PEERS[name] for name in NAMES}
