"""Entry point of ``python -m pipesched.cli``."""

from pipesched.cli.main import main

if __name__ == "__main__":
    main()
