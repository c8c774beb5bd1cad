"""`python -m graft` is `graft`."""

from graft.cli import main

if __name__ == "__main__":
    main()
