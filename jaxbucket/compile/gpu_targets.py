"""What XLA has to know about a GPU to compile for it without having one."""

from __future__ import annotations

from typing import NamedTuple

# XLA's `GpuTargetConfigProto`, as text.
_TARGET_CONFIG = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared_bytes}
  shared_memory_per_block_optin: {optin_bytes}
  threads_per_core_limit: 2048
  core_count: {num_cores}
  fpus_per_core: {num_fpus}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: {l2_bytes}
  clock_rate_ghz: {clock_ghz}
  device_memory_size: {memory_bytes}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {compute_capability} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{name}"
"""


class GpuTarget(NamedTuple):
    """The properties of a GPU that differ between models.

    A core is a streaming multiprocessor, and `num_fpus` counts the float32 units of
    each. The bandwidth is in bytes per second. Shared memory is that of a core.
    """

    name: str
    compute_capability: int
    num_cores: int
    num_fpus: int
    memory_bytes: int
    bandwidth: int
    l2_bytes: int
    clock_ghz: float
    shared_bytes: int

    def target_config(self) -> str:
        """Returns XLA's description of the GPU."""
        # A block may use all shared memory but 1,024 bytes.
        optin = self.shared_bytes - 1024
        return _TARGET_CONFIG.format(**self._asdict(), optin_bytes=optin)


# From NVIDIA's data sheets, and the attributes that the driver reports.
GPUS = {
    "a100-40gb": GpuTarget(
        *("NVIDIA A100-SXM4-40GB", 8, 108, 64, 42_331_013_120, 1_555_200_000_000),
        *(41_943_040, 1.41, 167_936),
    ),
    "a100": GpuTarget(
        *("NVIDIA A100-SXM4-80GB", 8, 108, 64, 85_100_068_864, 2_039_040_000_000),
        *(41_943_040, 1.41, 167_936),
    ),
    "h100": GpuTarget(
        *("NVIDIA H100 80GB HBM3", 9, 132, 128, 84_942_979_072, 3_352_320_000_000),
        *(52_428_800, 1.98, 233_472),
    ),
    "h200": GpuTarget(
        *("NVIDIA H200", 9, 132, 128, 151_397_597_184, 4_800_000_000_000),
        *(52_428_800, 1.98, 233_472),
    ),
    "b200": GpuTarget(
        *("NVIDIA B200", 10, 148, 128, 191_514_411_008, 7_672_320_000_000),
        *(132_644_864, 1.965, 233_472),
    ),
}
