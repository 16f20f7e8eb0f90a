from xgpt.app.library import load as load
from xgpt.app.library import plan as plan
from xgpt.app.library import results as results
from xgpt.app.library import run as run
from xgpt.app.library import simulate as simulate
from xgpt.app.library import sweep as sweep
from xgpt.app.library import write_report as write_report

__version__: str
