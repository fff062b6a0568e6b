"""What XLA has to know about a GPU to compile for it without having one."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class GpuTarget:
    """The properties of a GPU that the compiler uses.

    Attributes:
      name: as `device.device_kind` shows it.
      compute_capability: major version of the instruction set.
      num_cores: the number of streaming multiprocessors.
      num_fpus: float32 units of each.
      memory_bytes: size of the memory.
      bandwidth: bytes per second of the memory.
      l2_bytes: size of the L2 cache.
      clock_ghz: the highest clock rate, in GHz.
      shared_bytes: shared memory of each multiprocessor; a block can use 1,024 fewer.
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
        """Returns XLA's `GpuTargetConfigProto` as text."""
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024
              threads_per_warp: 32
              shared_memory_per_block: 49152
              shared_memory_per_core: {self.shared_bytes}
              shared_memory_per_block_optin: {self.shared_bytes - 1024}
              threads_per_core_limit: 2048
              core_count: {self.num_cores}
              fpus_per_core: {self.num_fpus}
              block_dim_limit_x: 2147483647
              block_dim_limit_y: 65535
              block_dim_limit_z: 65535
              memory_bandwidth: {self.bandwidth}
              l2_cache_size: {self.l2_bytes}
              clock_rate_ghz: {self.clock_ghz}
              device_memory_size: {self.memory_bytes}
              registers_per_core_limit: 65536
              registers_per_block_limit: 65536
              cuda_compute_capability {{ major: {self.compute_capability} }}
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 10 }}
            device_description_str: "{self.name}"
        """


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
