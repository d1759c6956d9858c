"""``import packhorse`` is cheap, and gives what it says it gives."""

from __future__ import annotations

import subprocess
import sys

import pytest

import packhorse

HEAVY = ("torch", "transformers", "tokenizers", "numpy", "packhorse_worker")


def test_importing_the_package_imports_no_torch() -> None:
    code = (
        "import sys, packhorse, packhorse.cli\n"
        f"heavy = [name for name in {HEAVY} if name in sys.modules]\n"
        "assert not heavy, heavy\n"
        "names = 'EncodeCudaGraphConfig EncodeError EncodeExtraInputSpec Encoder EncoderOutput LLM ModelFilesError'\n"
        "assert set(names.split()) == set(packhorse.__all__)\n"
        "assert set(packhorse.__all__) <= set(dir(packhorse))\n"
        "assert packhorse.ModelFilesError.__name__ == 'ModelFilesError'\n"
        "packhorse.EncodeCudaGraphConfig(extra_model_inputs=[packhorse.EncodeExtraInputSpec('x', ('num_tokens',), 'int8')])\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_name_is_there_and_no_other() -> None:
    for name in packhorse.__all__:
        assert getattr(packhorse, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Encoders'"):
        packhorse.Encoders  # type: ignore[attr-defined] # noqa: B018
