"""The audit: what happened under one digest, replayed from the log, and whether anything is missing."""
