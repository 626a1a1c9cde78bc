"""What happened: the ledger of bytes per tier and kind, and what crossed the wire."""

from zerostd.monitoring.ledger import Ledger, Memory

__all__ = ["Ledger", "Memory"]
