"""How other servers call the splitting of one model over several devices, which Packhorse does not do."""

from __future__ import annotations

WORDS = frozenset(
    """
    tensor_parallel_size tensor_parallel tp_size tp pipeline_parallel_size pipeline_parallel pp_size pp context_parallel_size
    cp_size moe_tensor_parallel_size moe_expert_parallel_size moe_cluster_parallel_size
    """.split()
)
"""With underscores."""
REFUSAL = (
    "a model is not split over devices here (tensor and pipeline parallelism); each device holds a whole copy, "
    "see --devices and --workers_per_device"
)
