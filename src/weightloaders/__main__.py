"""``python -m weightloaders``."""

from weightloaders.cli.main import main

if __name__ == "__main__":
    main()
