"""Engines: what turns prompts into tokens under exactly one resident adapter each. Only this room imports torch."""
