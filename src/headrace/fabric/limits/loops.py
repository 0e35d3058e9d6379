"""The native loops, loaded as they must be. Nothing else of this room imports the module itself."""

import os

# Debian's libfabric loads PSM, which would replace the handlers of SIGINT and others as it loads: Ctrl-C would then end
# Python without a KeyboardInterrupt. It reads these names once, so they precede the import.
os.environ.setdefault("IPATH_NO_BACKTRACE", "1")
os.environ.setdefault("HFI_NO_BACKTRACE", "1")

from headrace.fabric._limits import CopyLoop, StreamLoop, WakeLoop, WriteLoop, copy_methods

__all__ = ["CopyLoop", "StreamLoop", "WakeLoop", "WriteLoop", "copy_methods"]
