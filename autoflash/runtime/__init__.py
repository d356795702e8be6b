"""The code of the exported module: standard library, torch and triton only."""
