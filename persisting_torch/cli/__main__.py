"""python -m persisting_torch.cli"""

from __future__ import annotations

from persisting_torch.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
