"""The process `batchtune`: what is interrupted before the command has begun ends as any other."""

import sys


def main() -> None:
    """Runs the command line; exits with the documented code."""
    try:
        from batchtune.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
