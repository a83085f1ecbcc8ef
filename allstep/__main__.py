"""`python -m allstep` is the `allstep` command."""

import sys

from allstep.cli.main import main

sys.exit(main())
