"""`python -m batchtune` is the command `batchtune`."""

from batchtune.cli import main

if __name__ == "__main__":
    main()
