"""`python -m consumers.settler`: one settler, by the environment's settings."""

import sys

from consumers.settler.app import main

if __name__ == "__main__":
    sys.exit(main())
