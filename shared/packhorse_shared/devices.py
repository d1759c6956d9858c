"""Which devices there are, as words for CUDA_VISIBLE_DEVICES. The words are opaque: indexes, GPU UUIDs and MIG UUIDs alike."""

from __future__ import annotations

from packhorse_shared.errors import SettingsError

CPU = "cpu"


def device_words(devices: tuple[str, ...], cuda_visible_devices: str | None) -> tuple[str, ...]:
    """One word per device: ``("cpu",)``, or what each worker's CUDA_VISIBLE_DEVICES is set to.

    ``auto`` is every entry of ``cuda_visible_devices`` where that is set, else every GPU that the driver lists, else the
    CPU. Raises SettingsError when ``auto`` or ``cpu`` stands beside other words, or a word is given twice.
    """
    words = tuple(word.strip() for word in devices if word.strip())
    if not words:
        raise SettingsError("devices", "is empty; say auto, cpu, or a list such as 0,1")
    if len(words) > 1 and {"auto", CPU} & set(words):
        raise SettingsError("devices", f"auto and cpu stand alone, not in a list ({','.join(words)})")
    if len(set(words)) != len(words):
        raise SettingsError(
            "devices", f"a device is named twice ({','.join(words)}); use --workers_per_device for more workers"
        )
    if words != ("auto",):
        return words
    if cuda_visible_devices is not None:
        visible = tuple(word.strip() for word in cuda_visible_devices.split(",") if word.strip())
        return visible or (CPU,)
    return tuple(str(index) for index in range(_count_gpus())) or (CPU,)


def _count_gpus() -> int:
    """GPUs that the driver lists; 0 without a driver. NVML makes no CUDA context."""
    import pynvml  # noqa: PLC0415 (only where devices are counted)

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    try:
        return int(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()
