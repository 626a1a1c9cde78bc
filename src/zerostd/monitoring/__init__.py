"""Records of what happens: the ledger of bytes by tier and kind, bytes sent, and events."""

from zerostd.monitoring.ledger import Ledger, Memory

__all__ = ["Ledger", "Memory"]
