"""`python -m wassersmooth` and `torchrun -m wassersmooth`."""

from wassersmooth.cli import main

raise SystemExit(main())
