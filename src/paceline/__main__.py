"""`python -m paceline`, the form that torchrun starts."""

import sys

from paceline.cli import main

sys.exit(main())
