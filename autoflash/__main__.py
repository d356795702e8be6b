"""`python -m autoflash` is the `autoflash` command."""

from autoflash.cli import main

if __name__ == "__main__":
    main()
