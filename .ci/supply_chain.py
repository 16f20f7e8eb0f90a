"""What an installation brings with it: `python .ci/supply_chain.py` writes, by pip's own resolver,

    .ci/hashes.txt   every package of `.[run,report]` and of what it needs, with its file's SHA-256:
                     pip install --require-hashes -r .ci/hashes.txt, then pip install --no-deps -e .
    .ci/sbom.json    the same as a software bill of materials (CycloneDX 1.5), licences included

`--check` resolves nothing: it holds both files against constraints.txt and each other. They are of
the Python and the platform that are named in them: wheels of others have other hashes."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HASHES, SBOM = ROOT / ".ci/hashes.txt", ROOT / ".ci/sbom.json"
WANTED = ".[run,report]"
_LINE = re.compile(r"(?P<name>[\w.-]+)==(?P<version>\S+) --hash=sha256:(?P<digest>[0-9a-f]{64})")


def resolved() -> list[dict[str, Any]]:
    """The packages as pip reports them, by name; ours is not among them."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--dry-run",
                        "--ignore-installed", "--report", str(report), "-c", "constraints.txt",
                        "-e", WANTED], cwd=ROOT, check=True)
        items = json.loads(report.read_text(encoding="utf-8"))["install"]
    found = [item for item in items if "archive_info" in item["download_info"]]
    return sorted(found, key=lambda item: normal(item["metadata"]["name"]))


def normal(name: str) -> str:
    """As PEP 503 compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def hashes_of(items: list[dict[str, Any]]) -> str:
    where = f"Python {'.'.join(platform.python_version_tuple()[:2])}, {sys.platform} " \
            f"{platform.machine()}"
    lines = [f"# {WANTED} with all it needs, for {where}; written by .ci/supply_chain.py"]
    for item in items:
        meta, digest = item["metadata"], item["download_info"]["archive_info"]["hashes"]["sha256"]
        lines.append(f"{normal(meta['name'])}=={meta['version']} --hash=sha256:{digest}")
    return "\n".join(lines) + "\n"


def sbom_of(items: list[dict[str, Any]]) -> str:
    components = []
    for item in items:
        meta = item["metadata"]
        name, version = normal(meta["name"]), meta["version"]
        licence = meta.get("license_expression") or next((
            line.rpartition("::")[2].strip() for line in meta.get("classifier", ())
            if line.startswith("License ::")), None) or (meta.get("license") or "").split("\n")[0]
        components.append({
            "type": "library", "name": name, "version": version,
            "purl": f"pkg:pypi/{name}@{version}",
            "hashes": [{"alg": "SHA-256", "content": item["download_info"]["archive_info"][
                "hashes"]["sha256"]}],
            **({"licenses": [{"license": {"name": licence[:200]}}]} if licence else {})})
    return json.dumps({"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1,
                       "metadata": {"component": {"type": "application", "name": "xgpt"}},
                       "components": components}, indent=1) + "\n"


def check() -> list[str]:
    """What is wrong with the files as they are."""
    wrong = []
    lines = [line for line in HASHES.read_text(encoding="utf-8").splitlines()
             if line and not line.startswith("#")]
    found = {match["name"]: match for line in lines if (match := _LINE.fullmatch(line))}
    if len(found) != len(lines):
        wrong.append(f"{HASHES.name}: {len(lines) - len(found)} lines without one hash each")
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        name, _, version = line.partition("==")
        held = found.get(normal(name))
        # a build's own part, such as +cpu, is the index's
        if held is not None and held["version"].partition("+")[0] != version.partition(";")[0]:
            wrong.append(f"{HASHES.name}: {name} {held['version']}, of constraints.txt {version}")
    listed = {(one["name"], one["version"], one["hashes"][0]["content"]) for one in
              json.loads(SBOM.read_text(encoding="utf-8"))["components"]}
    if listed != {(m["name"], m["version"], m["digest"]) for m in found.values()}:
        wrong.append(f"{SBOM.name} and {HASHES.name} name different packages")
    return wrong


def main() -> int:
    if sys.argv[1:] == ["--check"]:
        wrong = check()
        print("\n".join(wrong) or "hashes, bill of materials and constraints agree")
        return int(bool(wrong))
    items = resolved()
    HASHES.write_text(hashes_of(items), encoding="utf-8")
    SBOM.write_text(sbom_of(items), encoding="utf-8")
    print(f"{len(items)} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
