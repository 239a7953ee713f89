"""Which device serves: the back end that the settings ask for, and what `pool_bytes = auto` may take of its memory."""

from __future__ import annotations

import importlib.util
import logging
import os

from ...model.backend import Backend, BackendLimits, Progress
from ...model.cache import cache_directory
from ...model.host_memory import HeadStart
from ...model.loading import LoadedModel
from ..settings.config import Config
from ..settings.options import ConfigError
from .ledger import CPU_AUTO_BYTES

log = logging.getLogger(__name__)

NVIDIA_NODES = ("/dev/nvidiactl", "/dev/dxg")
"""Device nodes of NVIDIA's driver, on Linux and under WSL. Looking for them costs nothing; importing CuPy does."""


def chosen_device(config: Config) -> str:
    """`cpu` or `cuda`: auto takes the card where there is a driver for one, and CuPy to use it."""
    if config.device != "auto":
        return config.device
    return "cuda" if _has_card() and importlib.util.find_spec("cupy") is not None else "cpu"


def _has_card() -> bool:
    return any(os.path.exists(node) for node in NVIDIA_NODES)


def pool_head_start(config: Config) -> HeadStart | None:
    """The first thing of a start: the pool's memory, if it is the host's and there is plenty."""
    if chosen_device(config) == "cuda":
        return None
    return HeadStart(CPU_AUTO_BYTES if config.pool_bytes is None else config.pool_bytes)


def device_backend(
    config: Config,
    model: LoadedModel,
    limits: BackendLimits,
    progress: Progress,
    *,
    head_start: HeadStart | None = None,
) -> Backend:
    """The back end, with weights and workspace. Its compiler is imported here: it takes longer than all the rest.

    Raises ConfigError for what the device cannot do, MemoryError for what does not fit.
    """
    try:
        if chosen_device(config) == "cuda":
            return _cuda_backend(config, model, limits, progress)
        if config.device == "auto" and _has_card():
            log.warning("there is a GPU here; to use it, install kvpool[daemon,cuda13]")
        return _cpu_backend(config, model, limits, progress, head_start)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _cpu_backend(
    config: Config, model: LoadedModel, limits: BackendLimits, progress: Progress, head_start: HeadStart | None
) -> Backend:
    from ...model.cpu.backend import CpuBackend

    return CpuBackend(
        model.program,
        model.checkpoint,
        limits,
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        activations=config.activations,
        threads=config.threads or 0,
        progress=progress,
        model_hash=model.model_hash,
        head_start=head_start,
    )


def _cuda_backend(config: Config, model: LoadedModel, limits: BackendLimits, progress: Progress) -> Backend:
    try:
        from ...model.cuda.backend import CudaBackend

        return CudaBackend(
            model.program,
            model.checkpoint,
            limits,
            dtype=config.dtype,
            kv_dtype="float8_e4m3" if config.kv_dtype == "fp8" else config.kv_dtype,
            products=config.products,
            progress=progress,
            kernel_folder=cache_directory() / "kernels" / "cuda",
        )
    except ImportError as error:
        raise ConfigError(
            f"device cuda needs {error.name}; install kvpool[daemon,cuda13], or set device to cpu"
        ) from None
    except RuntimeError as error:
        raise ConfigError(f"the card cannot be used: {error}; set device to cpu") from None
