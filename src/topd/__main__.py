"""`python -m topd` is the `topd` command."""

import sys

from topd.cli import main

sys.exit(main())
