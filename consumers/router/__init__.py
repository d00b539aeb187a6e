"""Decides under which digest a job runs, and writes it down: decode, decide, admit, act."""
