"""`python -m prescore`, which is how `torchrun -m prescore` starts the command line on every rank."""

import sys

from prescore.bench.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
