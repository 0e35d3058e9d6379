"""One-sided transfers over libfabric: regions, page ids and transfer ids above, addresses and keys below.

`interface` has the verbs and their records, `native` the libfabric implementation. Nothing heavy is loaded here.
"""
