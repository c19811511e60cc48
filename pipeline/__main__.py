"""`python -m rowstep.pipeline` is the `rowstep` command."""

from rowstep.pipeline.cli import main

if __name__ == "__main__":
    main(prog_name="rowstep")
