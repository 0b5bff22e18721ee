"""`python -m shardrules`: the command line."""

from shardrules._cli import main

if __name__ == "__main__":
    main()
