"""What a job's output folder keeps of its submission to Slurm: slurm.json."""

import json
from dataclasses import dataclass
from pathlib import Path

from xgpt.core.json_values import write_json
from xgpt.launch.slurm_queue import SlurmJob, ask

RECORD_FILE = "slurm.json"
_LOG_LINES, _LOG_BYTES = 12, 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmRecord:
    """`job_id`: as squeue takes it, of a task of an array `123_4`. `cluster`: of a federation."""

    job_id: str
    cluster: str | None
    script: Path
    log: Path
    submitted: str

    def save(self, output: Path) -> None:
        write_json(output / RECORD_FILE, {"version": 1, **{
            name: getattr(self, name) for name in self.__slots__}})

    def ask(self) -> SlurmJob | None:
        """What Slurm says of the job now. Raises XgptError where it cannot be asked."""
        return ask(self.job_id, self.cluster)

    def end_of_log(self) -> str:
        """The last lines that the job said; empty where it said nothing."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(self.log.stat().st_size - _LOG_BYTES, 0))
                text = file.read().decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.rstrip().splitlines()[-_LOG_LINES:])


def load_record(output: Path) -> SlurmRecord | None:
    """The folder's latest submission; None where there was none."""
    try:
        values = json.loads((output / RECORD_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return SlurmRecord(job_id=values["job_id"], cluster=values["cluster"],
                       script=Path(values["script"]), log=Path(values["log"]),
                       submitted=values["submitted"])
