"""Where processes of ours find modules."""

import os
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]  # that holds our packages


def own_modules() -> dict[str, str]:
    """Variables under which `python -m` looks for modules everywhere but in the folder that it is
    called in: that is the user's, and a `random.py` or `torch.py` of his there would be run in the
    place of Python's. Where this process has xgpt from that folder, as from its sources, ours do
    too."""
    variables = {"PYTHONSAFEPATH": "1"}
    if sys.path[:1] in ([""], [str(_ROOT)]) and Path.cwd() == _ROOT:
        more = os.environ.get("PYTHONPATH")
        variables["PYTHONPATH"] = str(_ROOT) if not more else f"{_ROOT}{os.pathsep}{more}"
    return variables
