"""autoflash: a kernel autotuner and code generator for attention."""

__version__ = "0.1.0"
