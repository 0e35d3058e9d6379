"""One-sided transfers between processes and hosts: regions, page ids and transfer ids above, addresses and keys below.

`interface` has the verbs and their records, `native` the implementation over mapped memory and libfabric, `memory` and
`cuda_memory` what transfers read and write, `places` where transports listen, `limits` the bare loops that it is
measured against, `topology` which NICs are near what. What other programs need is found here, loaded when it is asked
for: the types stand in `__init__.pyi`, docs/transfers.md is the page.
"""

from importlib import import_module

_ELSEWHERE = {
    "CudaMemory": "cuda_memory",
    "NativeFabric": "native",
    "SharedMemory": "memory",
    "available_transports": "native",
}
"""Where a name comes from, if not from `interface`."""


def __getattr__(name: str) -> object:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(f"{__name__}.{_ELSEWHERE.get(name, 'interface')}"), name)
    return found
