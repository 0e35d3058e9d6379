"""What PCI ids say: which function is a GPU and its name, which NIC has RDMA. Pure.

Source: the PCI ID Project's pci.ids; for H200, GH200 and H20 NVIDIA/gpu-admin-tools, gpu/devid_names.py. Names are
only of GPUs that are met in servers; others are shown by their ids.
"""

from collections.abc import Mapping

from headrace.fabric.topology.machine import PciFunction

NVIDIA, AMD, INTEL, HABANA = 0x10DE, 0x1002, 0x8086, 0x1DA3
AMAZON, MELLANOX = 0x1D0F, 0x15B3

_VENDORS: Mapping[int, str] = {NVIDIA: "NVIDIA", AMD: "AMD", INTEL: "Intel", HABANA: "Habana"}

_MODELS: Mapping[tuple[int, int], str] = {
    (NVIDIA, 0x1DB1): "V100 SXM2 16GB",
    (NVIDIA, 0x1DB4): "V100 PCIe 16GB",
    (NVIDIA, 0x1DB5): "V100 SXM2 32GB",
    (NVIDIA, 0x1DB6): "V100 PCIe 32GB",
    (NVIDIA, 0x1EB8): "T4",
    (NVIDIA, 0x20B0): "A100 SXM4 40GB",
    (NVIDIA, 0x20B2): "A100 SXM4 80GB",
    (NVIDIA, 0x20B5): "A100 PCIe 80GB",
    (NVIDIA, 0x20B7): "A30",
    (NVIDIA, 0x20F1): "A100 PCIe 40GB",
    (NVIDIA, 0x20F3): "A800 SXM4 80GB",
    (NVIDIA, 0x2235): "A40",
    (NVIDIA, 0x2236): "A10",
    (NVIDIA, 0x2237): "A10G",
    (NVIDIA, 0x2322): "H800 PCIe",
    (NVIDIA, 0x2324): "H800",
    (NVIDIA, 0x2329): "H20",
    (NVIDIA, 0x2330): "H100 SXM5 80GB",
    (NVIDIA, 0x2331): "H100 PCIe",
    (NVIDIA, 0x2335): "H200",
    (NVIDIA, 0x2342): "GH200",
    (NVIDIA, 0x26B5): "L40",
    (NVIDIA, 0x26B9): "L40S",
    (NVIDIA, 0x27B8): "L4",
    (AMD, 0x7408): "Instinct MI250X",
    (AMD, 0x740F): "Instinct MI210",
    (AMD, 0x74A0): "Instinct MI300A",
    (AMD, 0x74A1): "Instinct MI300X",
    (AMD, 0x74A5): "Instinct MI325X",
}


def model_name(function: PciFunction) -> str | None:
    """None where the ids are not in the table."""
    if function.vendor_id is None or function.device_id is None:
        return None
    model = _MODELS.get((function.vendor_id, function.device_id))
    return model and f"{_VENDORS[function.vendor_id]} {model}"


def is_gpu(function: PciFunction) -> bool:
    """Displays of NVIDIA; of others those that are no VGA, which a server's console is; accelerators of AMD and
    Habana. Source: PCI Code and ID Assignment, base classes 03 and 12."""
    if function.is_class(0x03, num_bits=8):
        is_vga = function.is_class(0x0300, num_bits=16)
        return function.vendor_id == NVIDIA or (function.vendor_id in _VENDORS and not is_vga)
    return function.is_class(0x12, num_bits=8) and function.vendor_id in {AMD, HABANA}


def has_rdma(function: PciFunction) -> bool:
    """NICs of which we know that there should be an RDMA device: ConnectX and BlueField, EFA."""
    is_efa = function.vendor_id == AMAZON and (function.device_id or 0) >> 4 == 0xEFA
    return function.is_class(0x02, num_bits=8) and (function.vendor_id == MELLANOX or is_efa)
