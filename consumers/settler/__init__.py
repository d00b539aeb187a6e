"""Ends leases and writes outcomes: what was committed to `metering` is applied to the ledger and to the audit."""
