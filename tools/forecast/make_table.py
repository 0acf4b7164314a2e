"""Makes targets/forecast/measured.json.xz and targets/qnn/phones.json again, from the package with their data.

    python -m pip download --no-deps qai-hub-models==0.65.0 -d WHEELS
    python tools/forecast/make_table.py WHEELS/qai_hub_models-0.65.0-py3-none-any.whl

Only networks that are already in the file are read: others are kept out to judge the forecast. The columns are those of
`MeasuredRow` in edgekit/forecasts/model.py; those of the phones are `Phone` in edgekit/phones.py.
"""

import json
import lzma
import sys
import zipfile
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
TARGETS = HERE.parent.parent / "targets"
OUT, PHONES = TARGETS / "forecast" / "measured.json.xz", TARGETS / "qnn" / "phones.json"
_PACKAGE, _VERSION = "qai-hub-models", "0.65.0"
# Not Qualcomm's own runtime for speech.
_RUNTIMES = ("onnx", "precompiled_qnn_onnx", "qnn_context_binary", "qnn_dlc", "tflite")


def read_devices(wheel: zipfile.ZipFile) -> list[dict[str, Any]]:
    """Returns the devices with a Hexagon NPU whose HTP version the package states."""
    told = yaml.safe_load(wheel.read("qai_hub_models/devices_and_chipsets.yaml"))
    listed: list[dict[str, Any]] = []
    for name, device in sorted(told["devices"].items()):
        chip = told["chipsets"].get(device["chipset"], {})
        if chip.get("htp_version"):
            listed.append(
                {
                    "name": name,
                    "chipset": device["chipset"],
                    "marketing": chip["marketing_name"],
                    "form": device["form_factor"],
                    "htp": chip["htp_version"],
                    "soc_model": chip["soc_model"],
                    "fp16": bool(chip.get("supports_fp16")),
                    "weight_sharing": bool(chip.get("supports_weight_sharing")),
                }
            )
    return listed


def read_network(wheel: zipfile.ZipFile, model: str, devices: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the package's facts about a model, and its rows by component, precision and runtime."""
    folder = f"qai_hub_models/models/{model}"
    about = yaml.safe_load(wheel.read(f"{folder}/manifest.yaml"))
    details = {key: str(value) for key, value in (about.get("technical_details") or {}).items()}
    known = {
        "use_case": about.get("use_case", ""),
        "source": str(about.get("source_repo") or "").removeprefix("https://"),
        "resolution": details.get("Input resolution", ""),
        "parameters": details.get("Number of parameters", ""),
    }
    rows: dict[str, Any] = {}
    perf = yaml.safe_load(wheel.read(f"{folder}/perf.yaml"))
    for precision, components in perf["precisions"].items():
        for component, told in components["components"].items():
            for device, runtimes in told.get("performance_metrics", {}).items():
                for runtime, row in runtimes.items():
                    if device in devices and runtime in _RUNTIMES and row.get("inference_time_milliseconds"):
                        at = rows.setdefault(component, {}).setdefault(precision, {}).setdefault(runtime, [])
                        layers, memory = row.get("layer_counts") or {}, row.get("estimated_peak_memory_range_mb") or {}
                        at.append(
                            [
                                devices.index(device),
                                row["inference_time_milliseconds"],
                                row.get("primary_compute_unit", ""),
                                *(layers.get(unit, 0) for unit in ("total", "gpu", "cpu")),
                                *(memory.get(end, 0) for end in ("min", "max")),
                            ]
                        )
    return known, rows


def write(path: Path, table: object) -> None:
    """Writes a value as JSON in xz, the same bytes each time."""
    path.write_bytes(lzma.compress(json.dumps(table, separators=(",", ":")).encode(), preset=9))


def main() -> None:
    """Writes the file, and prints the number of its rows."""
    kept = json.loads(lzma.decompress(OUT.read_bytes()))["networks"]
    with zipfile.ZipFile(sys.argv[1]) as wheel:
        devices = read_devices(wheel)
        names = [device["name"] for device in devices]
        read = {model: read_network(wheel, model, names) for model in sorted(kept)}
        licence = wheel.read(f"qai_hub_models-{_VERSION}.dist-info/licenses/LICENSE").decode()
    table: dict[str, Any] = {
        "source": "https://pypi.org/project/qai-hub-models/",
        "package": _PACKAGE,
        "version": _VERSION,
        "licence": "BSD-3-Clause",
        "notice": licence,
        "devices": names,
        "networks": {model: known for model, (known, _) in read.items()},
        "rows": {f"{model}/{part}": rows for model, (_, parts) in read.items() for part, rows in parts.items()},
    }
    write(OUT, table)
    OUT.with_name("LICENSE").write_text(
        f"measured.json.xz, and ../qnn/phones.json, are facts out of {_PACKAGE} {_VERSION}:\n\n{licence}"
    )
    head = {key: table[key] for key in ("source", "package", "version", "licence")}
    lines = ",\n".join(f"  {json.dumps(device, ensure_ascii=False)}" for device in devices)
    PHONES.write_text(json.dumps(head)[:-1] + f', "phones": [\n{lines}\n]}}\n')
    count = sum(len(each) for one in table["rows"].values() for two in one.values() for each in two.values())
    print(f"{count} rows, {len(names)} devices, {len(kept)} networks, {OUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
