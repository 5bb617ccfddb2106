"""PRESETS: the devices of the papers, with the source of every number."""

from penstock.devices.profile import DeviceProfile

_ASSUMED = "write bandwidth, latency and page size are assumed"

NVME = DeviceProfile(
    name="nvme",
    title="NVMe",
    bandwidth=1.8e9,
    write_bandwidth=1.8e9,
    iops=150e3,
    latency_s=80e-6,
    source=(
        "KVSwap (arXiv 2511.11907) section 4.1: 1.8 GB/s; Fig. 2: reads of 512 bytes stay below "
        f"6 % of that, which 150k reads per second keep (4 %); {_ASSUMED}"
    ),
)
UFS = DeviceProfile(
    name="ufs",
    title="UFS 4.0",
    bandwidth=2.9e9,
    write_bandwidth=2.0e9,
    iops=2.9e9 / 24576,
    latency_s=100e-6,
    is_pipelined=True,
    source=(
        "DynaKV (arXiv 2511.07427) Fig. 3b: bandwidth in proportion to the request size below "
        f"24 KB, then 2.9 GB/s; {_ASSUMED}"
    ),
)
EMMC = DeviceProfile(
    name="emmc",
    title="eMMC",
    bandwidth=250e6,
    write_bandwidth=125e6,
    iops=8e3,
    latency_s=150e-6,
    source=(
        "KVSwap (arXiv 2511.11907) section 4.1: 250 MB/s; Fig. 2: reads of 512 bytes stay below "
        f"6 % of that, which 8k reads per second keep (2 %); {_ASSUMED}"
    ),
)
PRESETS = {profile.name: profile for profile in (NVME, UFS, EMMC)}
"""Name to profile. Whatever runs on one of these is simulated and says so."""
