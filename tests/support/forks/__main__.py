"""Serves as the process that forks: `python -m tests.support.forks DESCRIPTOR ADDRESS`."""

from tests.support.forks.server import main

if __name__ == "__main__":
    main()
