"""`python -m moec` is `moec`."""

from moec.cli.main import main

if __name__ == "__main__":
    main()
