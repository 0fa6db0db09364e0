"""Run the `pdserve` command: python -m pdserve."""

from pdserve.cli.app import main

if __name__ == "__main__":
    main()
