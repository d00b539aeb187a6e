"""Starts, checks and stops a whole stack on one machine, from a plan that is data."""
