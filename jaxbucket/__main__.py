"""`python -m jaxbucket` runs the command `jaxbucket`."""

from jaxbucket.cli import main

if __name__ == "__main__":
    main(prog_name="jaxbucket")
