"""headrace: LLM serving with prefill and decode on separate devices.

Nothing is imported here: the gateway must not load torch or a native module by accident.
"""
