"""The process `batchtune`: what is interrupted while the command line is still being loaded ends as any other."""

import sys


def main() -> None:
    """Runs the command line; exits with the documented code."""
    try:
        from batchtune.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
