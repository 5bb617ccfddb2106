"""`python -m penstock` runs the command line."""

from penstock.cli.entry import main

if __name__ == "__main__":
    main()
