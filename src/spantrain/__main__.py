"""`python -m spantrain`, and the program."""

import sys


def main() -> None:
    """Load the program and run it; Ctrl-C while it is loaded ends it like any other."""
    try:
        from spantrain.cli.main import run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
