"""Which NICs are near which device, and which CPUs near them. Nothing here knows libfabric, and nothing needs a device.

snapshot   what was read of sysfs, from a directory or a recorded file; the only part that reads anything
parse      a snapshot as a Topology; its NICs are found in `nics`, what is missing is said in `unseen`
machine    the records: PCI functions, NUMA nodes, NICs, GPUs
groups     for every device its domain group, and the CPUs of its owner thread
models     what PCI ids say; `cpus` and `numbers`: texts of sysfs

topology = parse_topology(read_machine())
groups = plan_domain_groups(topology)
"""
