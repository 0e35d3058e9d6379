"""Never run on a device: CUDA memory that transfers read and write, and that other processes of this host can map.

Owns one allocation: the file that stands for it, and a mapping of it here. It is to a CUDA device what `memory` is to
the host: a `NativeFabric` is given the file, and hands it on to peers. Importing this needs no CUDA.

    memory = CudaMemory(1 << 30, device=0)
    kv = torch.as_tensor(memory, device="cuda:0").view(torch.bfloat16)
    fabric = NativeFabric(memory.fd, memory.num_bytes, cuda_device=0, transports=("mapped", "efa"))
"""

import weakref

from headrace.errors import InputError
from headrace.fabric import _native


class CudaMemory:
    """At least `num_bytes` bytes of CUDA device `device`, whatever they hold. Views of it end with it: keep it for as
    long as there is one. Raises InputError, or FabricError without a driver and where the device cannot share its
    memory."""

    def __init__(self, num_bytes: int, *, device: int = 0) -> None:
        if num_bytes < 1:
            raise InputError("num_bytes", f"must be at least 1, is {num_bytes}")
        self.device = device
        self._memory = _native.CudaMemory(device, num_bytes)
        self.num_bytes = self._memory.num_bytes
        self._finalizer = weakref.finalize(self, self._memory.close)

    @property
    def fd(self) -> int:
        """Whoever holds it can map the memory."""
        return self._memory.fd

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """`[num_bytes] uint8`: `torch.as_tensor` and others make views of it without a copy."""
        return {
            "shape": (self.num_bytes,),
            "typestr": "|u1",
            "data": (self._memory.address, False),
            "strides": None,
            "version": 3,
        }

    def close(self) -> None:
        """Idempotent. Fabrics and peers that have it mapped keep it."""
        self._finalizer()

    def __repr__(self) -> str:
        return f"CudaMemory({self.num_bytes} bytes of device {self.device}, fd={self.fd})"
