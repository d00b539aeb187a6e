"""Tests on real engines: torch, PEFT, vLLM."""
