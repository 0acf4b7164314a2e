"""Checks that a folder is what its manifest says, before anything in it is used: a bundle may come from anybody.

Names must mean the same file on every system and nothing outside their folder, sizes and digests must be right, and
session options may only hold words that cannot read, write or run anything else.
"""

import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path

from edgekit._files import digest_file, safe_join
from edgekit.bundle.manifest import MAX_MANIFEST_BYTES, BundledFile, Manifest
from edgekit.errors import BundleError, UsageError, suggest_name
from edgekit.target import Target, TaskLimit

_MAX_NAME_BYTES = 512
# The longest name that ext4 (in bytes) and NTFS (in UTF-16 units) have room for.
_MAX_PART_BYTES = 255
_MAX_DEPTH = 16
_FORBIDDEN = frozenset('<>:"|?*\\')
# The superscript digits are devices too: Windows takes them for 1, 2 and 3 ("Naming files, paths, and namespaces").
_DEVICES = frozenset(
    {"con", "prn", "aux", "nul", "conin$", "conout$"}
    | {f"{kind}{digit}" for kind in ("com", "lpt") for digit in "123456789¹²³"}
)


def find_fault(name: str) -> str | None:
    """Returns why a name with `/` between folders is no safe file name, None if it is one.

    Safe is what Linux, macOS and Windows all take for the same file below the folder: see Microsoft's "Naming files,
    paths, and namespaces" for the characters, the final dots and spaces, and the names of devices.
    """
    if not name or len(name) > _MAX_NAME_BYTES:
        return "is empty or too long"
    try:
        size_bytes = len(name.encode())
    except UnicodeEncodeError:
        return "is no text"
    parts = name.split("/")
    if size_bytes > _MAX_NAME_BYTES or len(parts) > _MAX_DEPTH:
        return "is too long"
    return next((fault for part in parts if (fault := _find_fault_of_part(part))), None)


def find_clash(names: Iterable[str]) -> tuple[str, str] | None:
    """Returns two names that cannot both be files: equal but for case or Unicode form, or one a folder of the other."""
    # Split before sorting: as texts "a-b" would stand between "a" and "a/b", and the neighbours would not meet.
    folded = sorted((tuple(_fold(name).split("/")), name) for name in names)
    for (first, name), (second, other) in pairwise(folded):
        if second[: len(first)] == first:
            return name, other
    return None


def _find_fault_of_part(part: str) -> str | None:
    if part in {"", ".", ".."}:
        return "is absolute or climbs"
    if any(unicodedata.category(character).startswith("C") for character in part) or not _FORBIDDEN.isdisjoint(part):
        return "holds a character that is not allowed everywhere"
    if part[-1] in ". " or len(part.encode()) > _MAX_PART_BYTES:
        return "ends in a dot or a space, or is too long"
    # "nul.txt" is the device as well: Windows looks at what stands before the first dot.
    if part.partition(".")[0].rstrip().casefold() in _DEVICES:
        return "is the name of a device on Windows"
    return None


def _fold(name: str) -> str:
    # Twice, because folding the case may take a composed letter apart; macOS compares names without regard to either.
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


# What a folder is, by the file that names all others, and what opens it.
_KINDS = {
    "manifest.json": "one model: edgekit verify",
    "group.json": "a group of models: edgekit group verify",
}


def read_bounded(folder: Path, name: str) -> bytes:
    """Returns the bytes of a manifest or index in a folder; of one that is too large, enough to see that.

    Raises:
        BundleError: it is missing, a link, or no regular file.
    """
    file = safe_join(folder, name)
    _check_regular(file, name, folder)
    with file.open("rb") as stream:
        # One byte more than allowed, so that the decoder sees that it is too large.
        return stream.read(MAX_MANIFEST_BYTES + 1)


def check_files(folder: Path, files: Mapping[str, BundledFile], beside: Collection[str]) -> None:
    """Refuses a folder that does not hold exactly these files, and perhaps those `beside`, to the byte.

    Names are judged before any file is opened, and sizes before digests are computed.

    Raises:
        BundleError: a file is missing, altered, unlisted, a link, or bears an unsafe name.
    """
    _check_names(folder, files, beside)
    for name, entry in files.items():
        path = safe_join(folder, name)
        _check_regular(path, name, folder)
        # Sizes of all before a digest of any: a file of terabytes is refused without being read.
        size_bytes = path.stat().st_size
        if size_bytes != entry.size_bytes:
            raise BundleError(
                f"{name!r} of bundle '{folder}' has {size_bytes} bytes, the manifest says {entry.size_bytes}",
                hint="the bundle was altered or copied badly: build it again",
            )
    for name, entry in files.items():
        if digest_file(folder / name) != entry.sha256:
            raise BundleError(
                f"{name!r} of bundle '{folder}' was altered: its sha256 is not that of the manifest",
                hint="build the bundle again",
            )


def iterate_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yields everything below a folder that is no folder, by its name with `/`, sorted."""
    for path in sorted(folder.rglob("*")):
        # A link to a folder is listed, not followed: it leads out of the bundle, and is refused as no regular file.
        if path.is_symlink() or not path.is_dir():
            yield path.relative_to(folder).as_posix(), path


def _check_names(folder: Path, files: Iterable[str], beside: Collection[str]) -> None:
    wanted = set(files)
    present = {name for name, _ in iterate_files(folder)} - set(beside)
    # A file too many is an alteration like any other: apps copy folders whole.
    for name in sorted(present - wanted):
        raise BundleError(
            f"bundle '{folder}' holds {name!r}, which its manifest does not list", hint="remove that file"
        )
    for name in sorted(wanted - present):
        raise BundleError(f"bundle '{folder}' lacks the file {name[:200]!r}", hint="build the bundle again")
    for name in sorted(wanted):
        fault = find_fault(name)
        if fault is not None:
            raise BundleError(f"{name[:200]!r} of bundle '{folder}' {fault}", hint="build the bundle again")
    clash = find_clash(wanted)
    if clash is not None:
        raise BundleError(
            f"{clash[0]!r} and {clash[1]!r} of bundle '{folder}' are one file on some systems",
            hint="build the bundle again",
        )


def _check_regular(path: Path, name: str, folder: Path) -> None:
    if path.is_symlink() or not path.is_file():
        reason = "is a link or no regular file" if path.is_symlink() or path.exists() else "is missing"
        raise BundleError(f"{name[:200]!r} of bundle '{folder}' {reason}", hint=_find_next_step(name, folder))


def _find_next_step(name: str, folder: Path) -> str:
    """Returns what to do where a file is not there: there may be a folder of another kind, or of several bundles."""
    for other, what in _KINDS.items():
        if name in _KINDS and other != name and (folder / other).is_file():
            return f"it holds {what} '{folder}'"
    inside = sorted(path.parent.name for path in folder.glob(f"*/{name}")) if name in _KINDS else []
    return f"it holds {', '.join(inside[:8])}: name one of them" if inside else "build the bundle again"


# Patterns are matched whole. None lets a slash, a colon or a quote through: no path, no address, no second option.
_FLAG, _NUMBER, _WORD = "[01]", r"\d{1,6}", r"[A-Za-z][A-Za-z0-9_]{0,63}"
_PLAIN = r"\d{1,9}|true|false|on|off"
_COUNT, _TRUTH, _LEVEL = r"\d{1,20}", "true|false|True|False|0|1", "[0-5]"
# Shapes of inputs as TensorRT reads them; the one value that has a colon, and empty where there are none.
_SHAPES = r"(?:[A-Za-z_][\w.-]{0,63}:\d{1,6}(?:x\d{1,6}){0,7}(?:,(?!$)|$)){0,32}"
_NAME, _VERSION = r"[A-Za-z][\w.-]{0,63}", r"[0-9A-Za-z][0-9A-Za-z.+_-]{0,63}"

# Keys of onnxruntime_session_options_config_keys.h (1.31) that change how a model runs. Those that name a file or a
# folder (ep.context_file_path, session.node_partition_config_file, ...) or write one (ep.context_enable) are left out.
_SESSION: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "ep.context_embed_mode",
            "mlas.enable_gemm_fastmath_arm64_bfloat16",
            "optimization.enable_cast_chain_elimination",
            "optimization.enable_gelu_approximation",
            "session.allow_released_opsets_only",
            "session.disable_aot_function_inlining",
            "session.disable_cpu_ep_fallback",
            "session.disable_double_qdq_remover",
            "session.disable_prepacking",
            "session.disable_qdq_constant_folding",
            "session.disable_quant_qdq",
            "session.enable_dq_matmulnbits_fusion",
            "session.enable_quant_qdq_cleanup",
            "session.enable_saved_runtime_optimizations",
            "session.force_spinning_stop",
            "session.inter_op.allow_spinning",
            "session.intra_op.allow_spinning",
            "session.qdqisint8allowed",
            "session.set_denormal_as_zero",
            "session.strict_shape_type_inference",
            "session.use_device_allocator_for_initializers",
            "session.use_env_allocators",
            "session.use_ort_model_bytes_directly",
            "session.use_ort_model_bytes_for_initializers",
            "session.x64quantprecision",
        ),
        _FLAG,
    ),
    "ep.nnapi.partitioning_stop_ops": rf"{_WORD}(,{_WORD}){{0,63}}",
    "optimization.disable_specified_optimizers": rf"{_WORD}(;{_WORD}){{0,63}}",
    "session.dynamic_block_base": _NUMBER,
    "session.load_model_format": "ONNX|ORT",
    "session.qdq_matmulnbits_accuracy_level": "[0-4]",
}

# OpenVINO's properties in JSON, by device; those that name a file or a folder (CACHE_DIR, ...) are left out.
_OV_NAMES = (
    "DYNAMIC_QUANTIZATION_GROUP_SIZE|ENABLE_CPU_PINNING|ENABLE_HYPER_THREADING|EXECUTION_MODE_HINT"
    "|INFERENCE_NUM_THREADS|INFERENCE_PRECISION_HINT|KV_CACHE_PRECISION|MODEL_PRIORITY|NUM_STREAMS|PERFORMANCE_HINT"
    "|SCHEDULING_CORE_TYPE"
)
_OV_PROPERTY = rf'"({_OV_NAMES})":"\w{{1,32}}"'
_OV_DEVICE = rf'"(CPU|GPU|NPU)":\{{{_OV_PROPERTY}(,{_OV_PROPERTY}){{0,15}}\}}'

PROVIDER_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "CPUExecutionProvider": {"use_arena": _FLAG},
    "CUDAExecutionProvider": {
        **dict.fromkeys(
            (
                "cudnn_conv1d_pad_to_nc1d",
                "cudnn_conv_use_max_workspace",
                "do_copy_in_default_stream",
                "enable_cuda_graph",
                "enable_cudnn",
                "fuse_conv_bias",
                "prefer_nhwc",
                "use_ep_level_unified_stream",
                "use_tf32",
            ),
            _TRUTH,
        ),
        **dict.fromkeys(("device_id", "gpu_mem_limit", "sdpa_kernel"), _COUNT),
        "arena_extend_strategy": "kNextPowerOfTwo|kSameAsRequested",
        "cudnn_conv_algo_search": "DEFAULT|EXHAUSTIVE|HEURISTIC",
    },
    "CoreMLExecutionProvider": {
        "AllowLowPrecisionAccumulationOnGPU": _FLAG,
        "EnableOnSubgraphs": _FLAG,
        "MLComputeUnits": _WORD,
        "ModelFormat": "MLProgram|NeuralNetwork",
        "ProfileComputePlan": _FLAG,
        "RequireStaticInputShapes": _FLAG,
        "SpecializationStrategy": _WORD,
    },
    "DmlExecutionProvider": {
        "device_filter": "any|gpu|npu",
        "device_id": _NUMBER,
        "disable_metacommands": "true|false",
        "performance_preference": "default|high_performance|minimum_power",
    },
    "NnapiExecutionProvider": dict.fromkeys(
        ("NNAPI_FLAG_CPU_DISABLED", "NNAPI_FLAG_CPU_ONLY", "NNAPI_FLAG_USE_FP16", "NNAPI_FLAG_USE_NCHW"), _FLAG
    ),
    "OpenVINOExecutionProvider": {"load_config": rf"\{{{_OV_DEVICE}(,{_OV_DEVICE}){{0,2}}\}}"},
    "QNNExecutionProvider": {
        **dict.fromkeys(
            (
                "disable_file_mapped_weights",
                "enable_block_quant_weight_optimization",
                "enable_htp_fp16_clamp_overflow",
                "enable_htp_fp16_precision",
                "enable_htp_monolithic_lstm",
                "enable_htp_shared_memory_allocator",
                "enable_htp_spill_fill_buffer",
                "enable_vtcm_backup_buffer_sharing",
                "extended_udma",
                "htp_bf16_enable",
                "htp_share_resource_optimization",
                "offload_graph_io_quantization",
                "skip_qnn_version_check",
            ),
            _FLAG,
        ),
        **dict.fromkeys(("device_id", "htp_arch", "rpc_control_latency", "soc_model", "vtcm_mb"), _NUMBER),
        **dict.fromkeys(("htp_performance_mode", "qnn_context_priority"), _WORD),
        "backend_type": "cpu|gpu|htp|saver",
        "htp_graph_finalization_optimization_mode": "[0-3]",
    },
    "TensorrtExecutionProvider": {
        **dict.fromkeys(
            (
                "trt_bf16_enable",
                "trt_build_heuristics_enable",
                "trt_context_memory_sharing_enable",
                "trt_cuda_graph_enable",
                "trt_detailed_build_log",
                "trt_dla_enable",
                "trt_engine_cache_enable",
                "trt_engine_hw_compatible",
                "trt_force_sequential_engine_build",
                "trt_force_timing_cache",
                "trt_fp16_enable",
                "trt_int8_enable",
                "trt_int8_use_native_calibration_table",
                "trt_layer_norm_fp32_fallback",
                "trt_sparsity_enable",
                "trt_timing_cache_enable",
            ),
            _TRUTH,
        ),
        **dict.fromkeys(("trt_profile_max_shapes", "trt_profile_min_shapes", "trt_profile_opt_shapes"), _SHAPES),
        **dict.fromkeys(
            (
                "device_id",
                "trt_dla_core",
                "trt_max_partition_iterations",
                "trt_max_workspace_size",
                "trt_min_subgraph_size",
            ),
            _COUNT,
        ),
        "trt_builder_optimization_level": _LEVEL,
        "trt_engine_cache_prefix": _WORD,
        "trt_int8_calibration_table_name": _NAME,
        "trt_op_types_to_exclude": rf"(?:{_WORD}(?:,{_WORD}){{0,63}})?",
    },
    "WebGpuExecutionProvider": {
        **dict.fromkeys(("enableGraphCapture", "enableInt64", "enableRobustness"), _FLAG),
        "powerPreference": "high-performance|low-power",
        "preferredLayout": "NCHW|NHWC",
        "validationMode": "basic|disabled|full|wgpuOnly",
    },
    "XnnpackExecutionProvider": {"intra_op_num_threads": _NUMBER},
}
"""Options of the providers that are words, switches and numbers, each with the pattern of its value.

Paths (backend_path, profiling_file_path, ModelCacheDirectory, cache_dir, op_packages, ...) are the user's own to give.
"""

# What manifest and `target.json` both say: apps read the one, devices the other.
_TOLD: Mapping[str, Callable[[Target], object]] = {
    "target": lambda target: target.name,
    "settings": lambda target: target.settings,
    "provider": lambda target: target.provider,
    "provider_options": lambda target: target.session.provider_options,
    "session_config": lambda target: target.session.config,
    "chain": lambda target: target.session.chain,
    "platforms": lambda target: target.session.platforms,
    "minimum_ort": lambda target: target.minimum_ort,
    "thresholds": lambda target: target.thresholds,
    "verification": lambda target: target.verification,
    "fallback": lambda target: target.fallback,
}


def check_requests(manifest: Manifest, source: str) -> None:
    """Refuses a manifest that asks a session for anything but known words, switches and numbers.

    Versions go into POMs and Gradle lines as they stand, so they are held to what a version may be, too.

    Raises:
        BundleError: a session key, a provider option or its value is not among those that a bundle may pass, or
            something else stands in place of a version.
    """
    _check_words(manifest.session_config, _SESSION, "session_config", source)
    options = PROVIDER_OPTIONS.get(manifest.provider)
    _check_words(manifest.provider_options, options, "provider_options", source)
    for chained in manifest.chain or ():
        _check_words({chained.provider: ""}, dict.fromkeys(PROVIDER_OPTIONS, ""), "chain", source)
        _check_words(chained.provider_options, PROVIDER_OPTIONS[chained.provider], "chain", source)
    for index, tuned in enumerate(manifest.tuned or ()):
        place = f"tuned[{index}].setting"
        _check_words(tuned.setting.config, _SESSION, f"{place}.config", source)
        _check_words(tuned.setting.provider_options, options, f"{place}.provider_options", source)
        if tuned.setting.form and tuned.setting.form not in manifest.forms:
            raise BundleError(
                f"'{source}' has no files of the form {tuned.setting.form!r}, which {place} wants",
                hint="tune it again: edgekit tune BUNDLE --apply",
            )
    # Versions end in POMs and Gradle files, where more than a word would be code.
    for name, version in {**manifest.versions, "minimum_ort": manifest.minimum_ort}.items():
        if not re.fullmatch(_NAME, name) or not re.fullmatch(_VERSION, version):
            raise BundleError(
                f"'{source}' has no version that a build file could hold: {name[:99]!r} = {version[:99]!r}",
                hint="build the bundle again",
            )
    for name, platform in manifest.platforms.items():
        _check_words(platform.provider_options, options, f"platforms.{name[:99]}.provider_options", source)


def check_same(manifest: Manifest, said: Collection[str], target: Target, source: str) -> None:
    """Refuses a bundle whose manifest and `target.json` tell apps and devices different things.

    `said` are the keys that the file has: one of schema version 1 lacks some, which were filled in on reading.

    Raises:
        BundleError: they contradict each other.
    """
    for key, told in _TOLD.items():
        if key in said and getattr(manifest, key) != told(target):
            raise BundleError(
                f"'{source}' and target.json beside it contradict each other in '{key}'", hint="build the bundle again"
            )


def bundled_task(manifest: Manifest) -> TaskLimit | None:
    """Returns the metric that a bundle asks for, None where it asks for none.

    Raises:
        UsageError: it is a function of somebody's own, which runs only where the user names it.
    """
    task = manifest.thresholds.task
    # `module:function` imports and runs Python.
    if task is not None and ":" in task.name:
        raise UsageError(
            f"bundle '{manifest.name}' asks for the metric {task.name[:200]!r}, code that no bundle may run",
            hint=f"if it is yours: --metric {task.name[:200]}",
        )
    return task


def _check_words(given: Mapping[str, str], allowed: Mapping[str, str] | None, place: str, source: str) -> None:
    """Holds keys and values against what is allowed; a provider that is not known here takes plain values only."""
    for key, value in given.items():
        if allowed is not None and key not in allowed:
            names = list(allowed)
            raise BundleError(
                f"{key[:99]!r} in {place} of '{source}' is not for a bundle to set",
                hint=suggest_name(key, names) if names else "leave it out: this provider takes no options",
            )
        if not re.fullmatch(_PLAIN if allowed is None else allowed[key], value):
            raise BundleError(
                f"{key!r} in {place} of '{source}' cannot be {value[:99]!r}", hint="build the bundle again"
            )
