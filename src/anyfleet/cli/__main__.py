"""So that `python -m anyfleet.cli` is the command too."""

from anyfleet.cli import main

if __name__ == "__main__":
    main()
