"""Every error of headrace, one tree, by who must act.

`InputError`     the user or caller: a field is wrong, the message names it and what would be right
`FabricError`    the operator: a link, provider or peer failed; carries the provider's code, text and the call
`RankLost`       the operator: a process of an instance of several ranks died or hangs, and the instance ends with it
`ProtocolFault`  the peer's authors: the other side broke PROTOCOL's rules; its access is revoked
`Closed`         nobody: we closed it ourselves and somebody used it afterwards
"""


class HeadraceError(Exception):
    """Root of the tree; never raised itself."""


class InputError(HeadraceError, ValueError):
    """A value from outside is wrong. `field` is its name; the text says what would be right."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class FabricError(HeadraceError):
    """A fabric call failed. `code` is the provider's errno (positive), `call` what was attempted."""

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call}: {text} ({code})")
        self.call = call
        self.code = code
        self.text = text


class RankLost(HeadraceError):
    """A rank of this instance is gone or does nothing any more: no further step can be computed."""


class HandshakeRefused(HeadraceError):
    """The peer's Hello differs in something that must be equal; `field` says in what."""

    def __init__(self, field: str, ours: object, theirs: object) -> None:
        super().__init__(f"{field} differs: ours {ours!r}, theirs {theirs!r}")
        self.field = field
        self.ours = ours
        self.theirs = theirs


class ProtocolFault(HeadraceError):
    """The peer did what PROTOCOL forbids (a count that contradicts itself, more writes than posted)."""


class Closed(HeadraceError):
    """The object was closed by this process before the call."""
