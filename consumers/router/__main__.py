"""`python -m consumers.router`: the router process."""

import sys

from consumers.router.app import main

if __name__ == "__main__":
    sys.exit(main())
