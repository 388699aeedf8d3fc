"""Entry point of ``python -m pipesched``."""

from pipesched.cli.main import main

if __name__ == "__main__":
    main()
