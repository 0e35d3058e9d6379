"""How the fetching of a model reports how far it is; whoever shows it (the command line) passes it in. Owns nothing."""

from typing import Protocol


class Progress(Protocol):
    def __call__(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        """Stage `stage` (what a person reads, such as `converting smollm2-135m-instruct`) is at `done_bytes` of
        `total_bytes`, which is at least 1. A stage begins at 0, never falls, and ends at `total_bytes` unless an error
        ends it; after a failure it may begin anew. Stages come one after another; calls may come from another thread
        than the caller's, but never two at once."""
        ...


def no_progress(stage: str, done_bytes: int, total_bytes: int) -> None:
    """For callers that show nothing."""
